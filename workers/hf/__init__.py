"""Imports and exports Hugging Face checkpoints."""
