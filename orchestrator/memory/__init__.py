"""Fits a run into its ranks' memory: what to recompute and keep, what to change, and what is held when."""
