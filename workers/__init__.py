"""Executes: the instruction loop, model stages, optimizer, data, checkpoints. No Ray, no pydantic."""
