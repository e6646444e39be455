"""Results as the command line prints them: their `repr`."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType

WIDTH = 100  # characters


def as_text(renderable: RenderableType) -> str:
    """What a console without colours shows."""
    console = Console(file=StringIO(), width=WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))
