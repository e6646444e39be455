"""`pentad checkpoint save`, `list`, `verify` and `prune`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from pentad.orchestrator.cli.arguments import Address, Json, Run, Timeout
from pentad.orchestrator.cli.completion import run_names

checkpoint = typer.Typer(help="Save, list, verify and delete checkpoints.", no_args_is_help=True)
_Folder = Annotated[
    str,
    Argument(
        metavar="RUN", help="A run's folder, its name under runs/, or an imported model.", autocompletion=run_names
    ),
]


@checkpoint.command()
def save(run: Run, address: Address = None, timeout: Timeout = 600.0, as_json: Json = False) -> None:
    """Save a checkpoint of a live run and wait until it is committed."""
    from pentad.orchestrator.cli.resolve import folder_of
    from pentad.orchestrator.cli.show_status import show_request

    show_request(folder_of(run, address), "checkpoint", Console(), as_json=as_json, timeout_seconds=timeout)


@checkpoint.command(name="list")
def list_(run: _Folder, as_json: Json = False) -> None:
    """List the checkpoints of a run: step, time and size, and which are complete. Their contents are not read."""
    from pentad.orchestrator.cli.show_checkpoints import show_list

    show_list(run, Console(), as_json=as_json)


@checkpoint.command()
def verify(
    run: Annotated[
        str,
        Argument(
            metavar="RUN", help="A run, for all of its checkpoints, or the folder of one.", autocompletion=run_names
        ),
    ],
    as_json: Json = False,
) -> int:
    """Compare every byte of checkpoints with their checksums.

    Damaged files are named; the exit status is then 1.
    """
    from pentad.orchestrator.cli.show_checkpoints import show_verify

    return show_verify(run, as_json=as_json)


@checkpoint.command()
def prune(
    run: _Folder,
    dry_run: Annotated[bool, Option("--dry-run", help="Only show what would be deleted.")] = False,
    as_json: Json = False,
) -> None:
    """Delete the checkpoints of an ended run that its checkpoint.keep, keep_every and keep_best do not keep."""
    from pentad.orchestrator.cli.show_checkpoints import show_prune

    show_prune(run, dry_run=dry_run, as_json=as_json)
