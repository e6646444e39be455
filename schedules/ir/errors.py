"""What pentad raises when its user, not pentad, is wrong."""


class PentadError(Exception):
    """A user's mistake, told in one sentence: the key or argument, the value found, the value expected."""
