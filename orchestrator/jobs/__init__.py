"""Runs submitted to a cluster as Ray jobs."""
