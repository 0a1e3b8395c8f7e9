"""The wire formats and their generated stubs."""
