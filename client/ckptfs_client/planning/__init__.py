"""Figures before a run: the interval between checkpoints, the risk of a loss, the space."""
