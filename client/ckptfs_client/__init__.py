"""The command `ckptfs`, the helpers of mount(8) and umount(8), and `ckptfs_client.client`: a small library over the control socket."""
