"""What a stage allocates and keeps between forward and backward, in bytes, and with which kernels."""
