"""ckptfs: checkpoint files and what happens to them. No FUSE and no command line in this package."""

__version__ = "0.2.0"
