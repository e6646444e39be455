"""Fits a run into the memory of its ranks: what to recompute and keep, what to change, and what is held when."""
