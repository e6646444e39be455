"""Writes a user's schedule file and runs its function `plan`."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from pentad.schedules.generators.custom import program
from pentad.schedules.ir.errors import PentadError

HEAD = "from pentad.schedules.generators.custom import BW, B, F, W\n"
DEF = "def plan(rank, ranks, microbatches):\n"


def body(*lines: str) -> str:
    """The code of `plan` with these lines as its body."""
    return DEF + "".join(f"    {line}\n" for line in lines)


def write(folder: Path, code: str) -> str:
    """Writes the code to my.py and returns the schedule name that refers to its `plan`."""
    (folder / "my.py").write_text(HEAD + textwrap.dedent(code))
    return f"{folder}/my.py:plan"


def refusal(text: str, ranks: int = 2, microbatches: int = 4, chunks: int | None = None) -> str:
    """The one-sentence error with which a schedule is refused."""
    with pytest.raises(PentadError) as error:
        program(text, ranks, microbatches, chunks)
    sentence = str(error.value)
    assert sentence.startswith(f"schedule {text}: ") and "\n" not in sentence and len(sentence) < 600
    return sentence
