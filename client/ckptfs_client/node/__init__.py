"""The commands about this machine, its mounts and its files."""
