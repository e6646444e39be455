"""Measurements of a machine: what its GPUs report, and how fast and consistently they and their links work."""
