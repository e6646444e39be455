"""Point-to-point transfers between pipeline ranks, and the reduction of the gradient norm."""
