"""Point-to-point transfers between pipeline ranks."""
