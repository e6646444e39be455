"""`pentad timeline`, `pentad curves` and `pentad page`: tables and pictures of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.text import Text
from typer import Option

from pentad.orchestrator.cli.arguments import Address, Folder, Json, Run, Timeout, files_by_option
from pentad.schedules.ir.errors import PentadError


def timeline(
    run: Folder,
    step: Annotated[int | None, Option(help="The measured step to compare (default: the last).")] = None,
    evaluation: Annotated[
        bool, Option("--eval", help="Compare the last round of an evaluation; --step is the number of steps before it.")
    ] = False,
    explain: Annotated[
        bool, Option("--explain", help="Show what each rank spent its time on, and what would shorten the step.")
    ] = False,
    profile: Annotated[
        bool,
        Option("--profile", help="Show the kernels of a profiled step (metrics.profile_steps), also in its trace."),
    ] = False,
    html: Annotated[Path | None, Option(help="Write an interactive page of all measured steps.")] = None,
    svg: Annotated[Path | None, Option(help="Write a figure of the step.")] = None,
    trace: Annotated[Path | None, Option(help="Write a trace that opens in Perfetto (.json.gz).")] = None,
    as_json: Json = False,
) -> None:
    """Draw a measured step of a run beside its simulation.

    The simulation takes the costs that were measured in the same step.
    """
    from pentad.orchestrator.api.comparison import compare
    from pentad.orchestrator.cli.show_schedule import output_file, write
    from pentad.orchestrator.monitoring.runfolder import resolve_run

    files, console = files_by_option(html=html, svg=svg, trace=trace), Console()
    if profile:
        refused = ["--eval"] * evaluation + [option for option in files if explain or option != "--trace"]
        option = "--explain --profile" if explain else "--profile"
        _refuse(refused, f"{option} without it, which is of a step")
        _show_profile(resolve_run(run), step, console, explain=explain, trace=trace, as_json=as_json)
        return
    if explain:
        refused = ["--eval"] * evaluation + [*files]
        _refuse(refused, "--explain without it, which draws nothing and is of a step")
        _explain(resolve_run(run), step, console, as_json=as_json)
        return
    folder = resolve_run(run)
    found = compare(folder, step, evaluation=evaluation)
    if html is not None:
        write("--html", html, found.html())
    if svg is not None:
        write("--svg", svg, found.svg())
    if trace is not None:
        with output_file("--trace", trace) as file:
            found.write_trace(file)
    if as_json:
        print(json.dumps({"run": str(folder), **found.facts()}))
        return
    console.print(found, crop=False)
    for path in files.values():
        console.print(Text(f" written to {path}"), soft_wrap=True)
    if (html or trace) and found.planned.plan is None:
        text = f" without planned bytes and messages inside layers, as {found.planned.why}"
        console.print(Text(text), soft_wrap=True)


def _explain(folder: Path, step: int | None, console: Console, *, as_json: bool) -> None:
    from pentad.orchestrator.api.explanation import explain

    explanation = explain(folder, step)
    if as_json:
        print(json.dumps({"run": str(folder), **explanation.facts()}))
    else:
        console.print(explanation, crop=False)


def _refuse(options: Sequence[str], expected: str) -> None:
    if options:
        raise PentadError(f"{options[0]} is given: expected {expected}")


def _show_profile(
    folder: Path, step: int | None, console: Console, *, explain: bool, trace: Path | None, as_json: bool
) -> None:
    """The kernels of a profiled step by op, also written to a trace (default: beside the profile); with `explain`,
    below where the step's time went."""
    from pentad.orchestrator.api.explanation import explain as explained
    from pentad.orchestrator.cli.show_schedule import output_file
    from pentad.orchestrator.diagnosis.kernels import profile_of

    found = profile_of(folder, step)
    explanation, path = explained(folder, found.step) if explain else None, trace or found.default_trace
    if not explanation:
        with output_file("--trace", path) as file:
            found.write_trace(file)
    if as_json:
        facts = (
            {**explanation.facts(), "profile": found.facts()} if explanation else {**found.facts(), "trace": str(path)}
        )
        print(json.dumps({"run": str(folder), **facts}))
        return
    if explanation:
        console.print(explanation, "", crop=False, sep="\n")
    console.print(found, crop=False)
    if not explanation:
        console.print(Text(f" written to {path}, for https://ui.perfetto.dev"), soft_wrap=True)


def curves(
    run: Folder, svg: Annotated[Path | None, Option(help="Write a figure.")] = None, as_json: Json = False
) -> None:
    """Show the losses of a run by step, in training and on held-out data, of each corpus."""
    from pentad.orchestrator.api.curves import curves_of
    from pentad.orchestrator.cli.show_schedule import write
    from pentad.orchestrator.monitoring.runfolder import resolve_run

    folder, console = resolve_run(run), Console()
    found = curves_of(folder)
    if svg is not None:
        write("--svg", svg, found.svg())
    if as_json:
        print(json.dumps({"run": str(folder), **found.facts()}))
        return
    console.print(found)
    if svg is not None:
        console.print(Text(f" written to {svg}"), soft_wrap=True)


def page(run: Run, address: Address = None, timeout: Timeout = 5.0, as_json: Json = False) -> None:
    """Print the address of a run's page, with its secret token.

    The page of a run that has ended is served from its folder until Ctrl-C.
    """
    from pentad.orchestrator.cli.resolve import folder_of
    from pentad.orchestrator.cli.show_status import show_page

    show_page(folder_of(run, address), as_json=as_json, timeout_seconds=timeout)
