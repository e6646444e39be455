"""`pentad doctor`: checks of this machine, or of the nodes of a cluster."""

from __future__ import annotations

from typing import Annotated

from rich.console import Console
from typer import Option

from pentad.orchestrator.cli.arguments import Json, Words, split_words


def doctor(
    words: Words = None,
    burn: Annotated[
        float | None,
        Option(min=0, max=86400, help="Seconds to multiply matrices on all GPUs, or CPU cores (default: 30 on GPUs)."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Check versions, GPUs, links, limits and disks, here or on a cluster.

    Checks what CONFIG needs, on the cluster that it names. The exit status is 1 if a check fails.
    """
    from pentad.orchestrator.cli.show_doctor import show_doctor
    from pentad.orchestrator.config.config import load

    return show_doctor(load(*split_words(words)), burn, Console(), as_json=as_json)
