"""The error for a user's mistake, the error for an invalid program, and helpers for the text of messages."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 1500  # characters of a message, as the values that it quotes may be of any length


class PentadError(Exception):
    """A user's mistake in one sentence: `KEY is VALUE: expected WHAT`."""

    @property
    def sentences(self) -> list[str]:
        """One sentence per mistake; the middle of a very long one is left out."""
        return [shortened(str(self))]


class ScheduleError(Exception):
    """A program that must not run. `rank` and `index` locate the culprit in that rank's stream; -1: nowhere."""

    def __init__(self, text: str, rank: int = -1, index: int = -1) -> None:
        super().__init__(text)
        self.rank, self.index = rank, index


def enumerated(items: Iterable[object], most: int | None = None) -> str:
    """'a, b and c'; a list of more than `most` is cut to its first items and the number of the others."""
    shown = list(map(str, items))
    if most is not None and len(shown) > most:
        shown = [*shown[: most - 1], f"{len(shown) - most + 1} more"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def shortened(sentence: str) -> str:
    return sentence if len(sentence) <= LONGEST else f"{sentence[: LONGEST // 2]} ... {sentence[-LONGEST // 3 :]}"


def printable(text: str) -> str:
    """`text` with escapes such as \\x1b for what would control a terminal or cannot be encoded; line breaks and tabs
    stay."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)
