"""Computes: Triton kernels, each beside its torch reference. Knows no mesh and no process group."""
