"""The files that are open, and what the mount process does for them beside the requests."""
