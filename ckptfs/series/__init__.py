"""Series of checkpoints: their names, their complete members, and the newest of these. Pure rules."""
