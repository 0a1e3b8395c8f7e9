"""ckptfs: what a checkpoint file is and what happens to it. No FUSE, no gRPC and no command line in here."""

__version__ = "0.2.0"
