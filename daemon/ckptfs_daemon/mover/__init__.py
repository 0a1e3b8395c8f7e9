"""The mover process: every flow in a lane of its own."""
