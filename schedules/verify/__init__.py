"""Proofs about programs, and the diagnosis of runs that hang."""
