"""What evaluations read, and what they add up."""
