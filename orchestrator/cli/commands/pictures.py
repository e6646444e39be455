"""`pentad timeline`, `pentad curves` and `pentad page`: tables and pictures of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from pentad.orchestrator.cli.arguments import Address, Folder, Json, Run, Timeout, files_by_option


def timeline(
    run: Folder,
    step: Annotated[int | None, Option(help="The measured step to compare (default: the last).")] = None,
    evaluation: Annotated[
        bool, Option("--eval", help="Compare the last round of an evaluation; --step is the number of steps before it.")
    ] = False,
    explain: Annotated[
        bool, Option("--explain", help="Show what each rank's time went into, and what would shorten the step.")
    ] = False,
    profile: Annotated[
        bool, Option("--profile", help="Show the kernels of a profiled step (metrics.profile_steps), in its trace too.")
    ] = False,
    html: Annotated[Path | None, Option(help="Write an interactive page of all measured steps.")] = None,
    svg: Annotated[Path | None, Option(help="Write a figure of the step.")] = None,
    trace: Annotated[Path | None, Option(help="Write a trace that opens in Perfetto (.json.gz).")] = None,
    as_json: Json = False,
) -> None:
    """Compare a measured step of a run with the same step simulated at its measured costs."""
    from pentad.orchestrator.cli.show_run import show_explanation, show_profile, show_timeline

    files = files_by_option(html=html, svg=svg, trace=trace)
    if profile:
        refused = ["--eval"] * evaluation + [option for option in files if explain or option != "--trace"]
        show_profile(run, Console(), step=step, explained=explain, trace=trace, refused=refused, as_json=as_json)
        return
    if explain:
        show_explanation(run, Console(), step=step, refused=["--eval"] * evaluation + [*files], as_json=as_json)
        return
    show_timeline(run, Console(), step=step, evaluation=evaluation, files=files, as_json=as_json)


def curves(
    run: Folder, svg: Annotated[Path | None, Option(help="Write a figure.")] = None, as_json: Json = False
) -> None:
    """Show the losses of a run by step: of each corpus, in training and on held-out data."""
    from pentad.orchestrator.cli.show_run import show_curves

    show_curves(run, Console(), svg=svg, as_json=as_json)


def page(run: Run, address: Address = None, timeout: Timeout = 5.0, as_json: Json = False) -> None:
    """Print the address of a run's page, with its token: for one browser, not for others to see. That of a run that has
    ended is served from its folder, until Ctrl-C."""
    from pentad.orchestrator.cli.resolve import folder_of
    from pentad.orchestrator.cli.show_status import show_page

    show_page(folder_of(run, address), as_json=as_json, timeout_seconds=timeout)
