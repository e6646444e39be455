"""Matrices of layers, their products in the compute dtype or in 8 bits, and W as data."""
