"""The catalog of a node: which files exist, and where their copies are. Most SQL is in this package."""
