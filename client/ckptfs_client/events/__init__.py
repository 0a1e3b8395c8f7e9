"""What has happened: the commands about the event log, and goodput from it."""
