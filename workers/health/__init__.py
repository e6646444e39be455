"""Measurements of a machine: what its GPUs report, how fast and how alike they and their links work."""
