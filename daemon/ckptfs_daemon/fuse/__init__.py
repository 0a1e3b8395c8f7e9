"""The kernel's FUSE interface: connection, session, requests and replies."""
