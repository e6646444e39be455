"""Triton kernels, each beside its torch reference. They know no mesh and no process group."""
