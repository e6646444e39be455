"""Finds where text can be cut without changing its tokens."""
