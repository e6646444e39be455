"""The executor and the step around it."""
