"""Finds flipped bits: digests of the state, and of what ranks compute."""
