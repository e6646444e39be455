"""The functions and results that the command line and `import pentad` share."""
