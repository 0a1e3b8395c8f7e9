"""The supervisor: the FUSE descriptor, the children and their restarts."""
