"""Copies of the training state in the memory of ranks, from which a run recovers without a disk."""
