"""Layers of the model families, with forward, input gradient and weight gradient written out."""
