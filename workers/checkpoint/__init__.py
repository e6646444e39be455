"""Checkpoints, on disk or in a store."""
