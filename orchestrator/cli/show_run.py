"""`pentad timeline` and `pentad curves`: what a run has measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pentad.orchestrator.api.comparison import compare
from pentad.orchestrator.api.curves import curves_of
from pentad.orchestrator.api.explanation import explain
from pentad.orchestrator.cli.show_schedule import output_file, write
from pentad.orchestrator.diagnosis.kernels import profile_of
from pentad.orchestrator.monitoring.runfolder import resolve_run
from pentad.schedules.ir.errors import PentadError


def show_timeline(
    run: str, console: Console, *, step: int | None, evaluation: bool, files: Mapping[str, Path], as_json: bool
) -> None:
    """Compares a measured step of a run, or an evaluation after this many steps, with its simulation at its own costs,
    two rows per rank.

    The default is the last one. `files` are by the option that asks for them: --html (all steps), --svg, --trace.
    """
    folder = resolve_run(run)
    found = compare(folder, step, evaluation=evaluation)
    for option, path in files.items():
        match option:
            case "--html":
                write(option, path, found.html())
            case "--svg":
                write(option, path, found.svg())
            case _:
                with output_file(option, path) as file:
                    found.write_trace(file)
    if as_json:
        print(json.dumps({"run": str(folder), **found.facts()}))
        return
    console.print(found, crop=False)
    for path in files.values():
        console.print(Text(f" written to {path}"), soft_wrap=True)
    if {"--html", "--trace"}.intersection(files) and found.planned.plan is None:
        text = f" without planned bytes and messages inside layers, as {found.planned.why}"
        console.print(Text(text), soft_wrap=True)


def show_explanation(run: str, console: Console, *, step: int | None, refused: Sequence[str], as_json: bool) -> None:
    """What a measured step's time went into, and what would shorten it. Raises PentadError with options that draw."""
    if refused:
        raise PentadError(f"{refused[0]} is given: expected --explain without it, which draws nothing and is of a step")
    folder = resolve_run(run)
    found = explain(folder, step)
    if as_json:
        print(json.dumps({"run": str(folder), **found.facts()}))
    else:
        console.print(found, crop=False)


def show_profile(
    run: str,
    console: Console,
    *,
    step: int | None,
    explained: bool,
    trace: Path | None,
    refused: Sequence[str],
    as_json: bool,
) -> None:
    """The kernels of a profiled step by op, written to a trace too (default: beside the profile); or, if it is
    `explained`, below what the step's time went into. Raises PentadError with other options."""
    if refused:
        option = "--explain --profile" if explained else "--profile"
        raise PentadError(f"{refused[0]} is given: expected {option} without it, which is of a step")
    folder = resolve_run(run)
    found = profile_of(folder, step)
    explanation, path = explain(folder, found.step) if explained else None, trace or found.default_trace
    if not explained:
        with output_file("--trace", path) as file:
            found.write_trace(file)
    if as_json:
        facts = {"profile": found.facts()} if explanation else {**found.facts(), "trace": str(path)}
        print(json.dumps({"run": str(folder), **(explanation.facts() if explanation else {}), **facts}))
        return
    if explanation:
        console.print(explanation, "", crop=False, sep="\n")
    console.print(found, crop=False)
    if not explained:
        console.print(Text(f" written to {path}, for https://ui.perfetto.dev"), soft_wrap=True)


def show_curves(run: str, console: Console, *, svg: Path | None, as_json: bool) -> None:
    """Prints the first, last and lowest loss of each corpus, and writes the figure of --svg."""
    folder = resolve_run(run)
    found = curves_of(folder)
    if svg is not None:
        write("--svg", svg, found.svg())
    if as_json:
        print(json.dumps({"run": str(folder), **found.facts()}))
        return
    console.print(found)
    if svg is not None:
        console.print(Text(f" written to {svg}"), soft_wrap=True)
