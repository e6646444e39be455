"""Results as the command line prints them, used as their `repr`."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType

WIDTH = 100  # characters


def as_text(renderable: RenderableType) -> str:
    """The text that a console without colours shows."""
    console = Console(file=StringIO(), width=WIDTH, color_system=None, force_jupyter=False)
    with console.capture() as capture:
        console.print(renderable, crop=False)
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))


def log_console(*, quiet: bool) -> Console:
    """In a notebook the console prints log lines: a live table would need a terminal, and each print would be a cell
    output."""
    console = Console(quiet=quiet)
    return Console(quiet=quiet, force_jupyter=False, force_terminal=False) if console.is_jupyter else console
