"""8-bit floating-point numbers: casts with scales, alone and fused, and scaled matrix products."""
