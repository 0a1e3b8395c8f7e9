"""The handlers of the kernel's requests, and the virtual trees below `.ckptfs`."""
