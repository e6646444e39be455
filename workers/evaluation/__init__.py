"""What evaluations read and sum."""
