"""The compute order of every schedule."""
