"""What a stage allocates and keeps between forward and backward, in bytes, and which kernels it uses."""
