"""The command `ckptfs`, the helpers of mount(8) and umount(8), and the library `ckptfs_client.client`."""
