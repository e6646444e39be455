"""Runs many configurations as short trials, several beside each other, and keeps a row of each."""
