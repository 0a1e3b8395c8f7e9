"""The command `ckptfs`, the mount helpers, and a small library over the control socket."""
