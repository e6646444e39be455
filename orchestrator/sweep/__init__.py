"""Runs many configurations as short trials, several at a time, and keeps a row for each."""
