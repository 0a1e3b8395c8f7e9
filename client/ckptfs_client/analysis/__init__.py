"""What has happened, from the event log; figures before a run: how often to save, loss, space."""
