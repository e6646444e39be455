"""The fixture `pentad`, which runs a command line."""

from commands import pentad

__all__ = ["pentad"]
