"""This node's view of the namespace that all nodes share."""
