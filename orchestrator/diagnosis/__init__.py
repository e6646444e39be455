"""Finds out what slows a run down: which rank, since when, and what would help."""
