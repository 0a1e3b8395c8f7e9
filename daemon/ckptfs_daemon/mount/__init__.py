"""The mount process: handlers, open files and this node's view of the shared namespace."""
