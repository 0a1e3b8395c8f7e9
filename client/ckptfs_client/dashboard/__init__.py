"""Live views of all mounts: `ckptfs web` and `ckptfs status --watch`."""
