"""The control service of a live run."""
