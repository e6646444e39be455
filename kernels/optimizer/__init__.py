"""Sums of gradients and updates of weights."""
