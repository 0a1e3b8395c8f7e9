"""The commands about series of checkpoints and their sets."""
