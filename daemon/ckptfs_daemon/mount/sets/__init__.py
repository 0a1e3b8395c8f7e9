"""Checkpoint sets: found, kept in the history, and expired."""
