"""The command line. Commands import what they need when they run: most need neither torch nor Ray."""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from errno import ENAMETOOLONG
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from pentad.orchestrator.cli.arguments import (
    MOST_GPUS,
    Address,
    Json,
    Run,
    ScheduleArguments,
    Timeout,
    Words,
    split_words,
)
from pentad.orchestrator.cli.commands.calibrate import calibrate
from pentad.orchestrator.cli.commands.checkpoint import checkpoint
from pentad.orchestrator.cli.commands.data import data
from pentad.orchestrator.cli.commands.doctor import doctor
from pentad.orchestrator.cli.commands.hugging_face import convert, export_hf, import_hf
from pentad.orchestrator.cli.commands.pictures import curves, page, timeline
from pentad.orchestrator.cli.commands.plan import plan
from pentad.orchestrator.cli.commands.sweep import sweep
from pentad.orchestrator.cli.commands.verify import verify
from pentad.orchestrator.cli.usage_errors import usage_sentence
from pentad.schedules.ir.errors import PentadError, ScheduleError, printable, shortened

# ClickException, the base of all usage errors; typer bundles click but does not export it.
_ClickException: Any = typer.BadParameter.__mro__[2]
_INTERRUPTED = 130  # some versions of typer return it for a KeyboardInterrupt; others raise Abort

app = typer.Typer(
    pretty_exceptions_enable=False, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}
)
app.add_typer(data, name="data")
app.add_typer(checkpoint, name="checkpoint")
_began = time.monotonic()  # start of the command


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line and returns the exit status; a user's mistake is one sentence on stderr."""
    global _began
    _began = time.monotonic()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # a character that the terminal lacks must not end a command
    try:
        result = app(arguments, prog_name="pentad", standalone_mode=False)
        sys.stdout.flush()
        status = result if isinstance(result, int) else 0
        return _fail("interrupted", status) if status == _INTERRUPTED else status
    except PentadError as error:
        for sentence in error.sentences:
            _fail(sentence, 1)
        return 1
    except ScheduleError as error:
        sentence, _, grid = str(error).partition("\n")
        return _fail(sentence, 1, grid)
    except _ClickException as error:
        words = sys.argv[1:] if arguments is None else arguments
        return _fail(usage_sentence(error, typer.main.get_command(app), words), 2)
    except typer.Abort:
        return _fail("interrupted", _INTERRUPTED)
    except OSError as error:
        if error.errno == ENAMETOOLONG:
            return _fail(shortened(f"'{error.filename}' is too long: expected the path of a file or a folder"), 1)
        if error.filename is not None:
            reason = f"'{error.filename}' cannot be read or written ({error.strerror})"
            return _fail(shortened(f"{reason}: expected one that can"), 1)
        _mute()  # stdout is full, failing or closed
        return 1 if isinstance(error, BrokenPipeError) else _fail(f"I/O error: {error}", 1)


def _print_version(requested: bool) -> None:
    if requested:
        from pentad.orchestrator.config.version import release

        print(f"pentad {release()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train large language models on a Ray cluster from explicit per-rank programs."""


@app.command()
def train(words: Words = None, as_json: Json = False) -> None:
    """Train a model.

    Without CONFIG, trains the quickstart's model, on this machine's GPUs if it has any, else on CPUs.
    """
    from pentad.orchestrator.api.configs import config_to_train

    config, note = config_to_train(*split_words(words))
    from pentad.orchestrator.api.training import run_displayed

    console = Console(quiet=as_json)
    summary = run_displayed(config, console, note, began=_began)
    if as_json:
        print(json.dumps(summary))
    else:
        from pentad.orchestrator.monitoring.display import print_summary

        print_summary(console, summary)


app.command()(plan)


@app.command()
def init(
    out: Annotated[Path | None, Argument(metavar="OUT", help="A new file (default: stdout).")] = None,
    model: Annotated[
        str, Option(metavar="NAME|DIR", help="A published size, such as llama-8b, or a Hugging Face model's folder.")
    ] = "llama-8b",
    gpus: Annotated[
        int | None, Option(min=1, max=MOST_GPUS, help="GPUs to train on (default: this machine's, else 8).")
    ] = None,
    data: Annotated[str, Option(metavar="PATH", help="A corpus that `pentad data build` wrote.")] = "builtin:pydoc",
    sequence_length: Annotated[int | None, Option(min=1, help="Tokens per sequence (default: 4096).")] = None,
    global_batch_size: Annotated[int | None, Option(min=1, help="Sequences per step (default: 2^20 tokens).")] = None,
    memory: Annotated[
        float | None, Option(min=0.001, help="GiB per GPU (default: this machine's, else an H200's).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a commented configuration for a model and a number of GPUs, with the fastest mesh that fits."""
    from pentad.orchestrator.api.starting_config import starting_config
    from pentad.orchestrator.cli.show_search import show_init
    from pentad.orchestrator.planning.fit import device_memory
    from pentad.orchestrator.planning.hardware import NODE_GPUS, gpu_name, local_gpus

    device, gpus = device_memory("cuda", memory, gpu=gpu_name()), gpus or local_gpus() or NODE_GPUS
    found = starting_config(model, gpus, device, data=data, length=sequence_length, sequences=global_batch_size)
    show_init(found, out, as_json=as_json)


@app.command()
def schedule(**arguments: Any) -> None:
    """Build, prove, simulate and draw the program of a schedule.

    Needs no torch, Ray or GPU.
    """
    from pentad.orchestrator.cli.show_schedule import show_schedule

    show_schedule(ScheduleArguments(**arguments), Console())


schedule.__signature__ = inspect.signature(ScheduleArguments, eval_str=True)  # type: ignore[attr-defined]


app.command()(timeline)
app.command()(curves)
app.command()(page)
app.command()(verify)
app.command()(doctor)
app.command()(calibrate)
app.command()(sweep)


@app.command()
def status(
    run: Run,
    address: Address = None,
    watch: Annotated[bool, Option("--watch", help="Show each change until the run ends.")] = False,
    timeout: Timeout = 5.0,
    as_json: Json = False,
) -> None:
    """Show what a run and its ranks are doing, or how it ended."""
    from pentad.orchestrator.cli.resolve import folder_of
    from pentad.orchestrator.cli.show_status import show_status

    show_status(folder_of(run, address), Console(), watch=watch, as_json=as_json, timeout_seconds=timeout)


def _add_request(verb: str, text: str) -> None:
    @app.command(verb, help=text)
    def request(run: Run, address: Address = None, timeout: Timeout = 60.0, as_json: Json = False) -> None:
        from pentad.orchestrator.cli.resolve import folder_of
        from pentad.orchestrator.cli.show_status import show_request

        show_request(folder_of(run, address), verb, Console(), as_json=as_json, timeout_seconds=timeout)


_add_request("pause", "Pause a live run after the steps in flight. Its ranks stay, with their memory.")
_add_request("resume", "Resume a paused run.")
_add_request("abort", "End a live run now, without a checkpoint.")


@app.command()
def stop(run: Run, address: Address = None, timeout: Timeout = 600.0, as_json: Json = False) -> int:
    """End a live run after the steps in flight, with a checkpoint from which the same command resumes it."""
    from pentad.orchestrator.cli.resolve import find_run

    found = find_run(run, address)
    if isinstance(found, Path):
        from pentad.orchestrator.cli.show_status import show_request

        show_request(found, "stop", Console(), as_json=as_json, timeout_seconds=timeout)
        return 0
    from pentad.orchestrator.cli.show_jobs import show_stop

    return show_stop(*found, as_json=as_json)


@app.command()
def logs(
    run: Run,
    address: Address = None,
    follow: Annotated[bool, Option("--follow", help="Keep printing until the run ends; Ctrl-C detaches.")] = False,
    as_json: Json = False,
) -> int:
    """Print the steps and events of a run, or the log of a submitted job."""
    from pentad.orchestrator.cli.resolve import find_run

    found = find_run(run, address)
    if isinstance(found, Path):
        from pentad.orchestrator.cli.show_log import show_run_log

        show_run_log(found, followed=follow, as_json=as_json)
        return 0
    from pentad.orchestrator.cli.show_jobs import show_logs

    return show_logs(*found, followed=follow, as_json=as_json)


@app.command()
def runs(
    folder: Annotated[Path, Option(help="The folder of the runs (run.folder).")] = Path("runs"), as_json: Json = False
) -> None:
    """List the runs in a folder, newest first: state, step, loss and time of the last step."""
    from pentad.orchestrator.cli.show_lists import show_runs

    show_runs(folder, Console(), as_json=as_json)


@app.command()
def schedules(as_json: Json = False) -> None:
    """List the schedules with their placement, chunks, slices, options and papers."""
    from pentad.orchestrator.cli.show_lists import show_schedules

    show_schedules(Console(), as_json=as_json)


@app.command()
def submit(
    words: Words = None,
    address: Address = None,
    name: Annotated[str | None, Option(help="The job's ID (default: run.name and a suffix).")] = None,
    follow: Annotated[bool, Option(help="Print the job's log until it ends; Ctrl-C detaches.")] = True,
    as_json: Json = False,
) -> int:
    """Submit a training run to a Ray cluster as a job.

    run.folder and data.path are paths on the cluster.
    """
    from pentad.orchestrator.config.config import load

    config = load(*split_words(words))
    from pentad.orchestrator.cli.show_jobs import show_submit

    return show_submit(config, address, name, followed=follow, as_json=as_json)


@app.command()
def jobs(address: Address = None, as_json: Json = False) -> int:
    """List the runs submitted to a Ray cluster."""
    from pentad.orchestrator.cli.show_jobs import show_jobs

    return show_jobs(address, Console(), as_json=as_json)


@app.command(name="eval")
def evaluate(
    checkpoint: Annotated[
        str,
        Argument(
            metavar="CHECKPOINT",
            help="A checkpoint's folder; or a run or an imported model, for its newest checkpoint.",
        ),
    ],
    overrides: Annotated[
        list[str] | None, Argument(metavar="a.b=value", help="Overrides of the run's configuration.")
    ] = None,
    data: Annotated[
        list[str] | None, Option(metavar="PATH", help="A corpus, or NAME=PATH; may be repeated (default: the run's).")
    ] = None,
    sequences: Annotated[int | None, Option(min=1, help="Sequences of each corpus (default: as in the run).")] = None,
    as_json: Json = False,
) -> None:
    """Show the loss and perplexity of a checkpoint.

    Evaluates on the mesh of its run, unless an override gives another.
    """
    from pentad.orchestrator.monitoring.display import Display, print_evaluation
    from pentad.orchestrator.monitoring.runfolder import find_checkpoint
    from pentad.orchestrator.run.evaluate import eval_config
    from pentad.orchestrator.run.evaluate import evaluate as run

    path, changes = split_words(overrides)
    if path is not None:
        raise typer.BadParameter(f"{path} is no override: expected section.key=VALUE")
    found = find_checkpoint(checkpoint, "CHECKPOINT")
    config = eval_config(found, data or (), sequences, changes)
    console = Console(quiet=as_json)
    with Display(console, config.run.name, config.run.steps, _began) as display:
        rows = run(config, found, display)
    if as_json:
        keys = ("data", "loss", "perplexity", "tokens", "sequences")
        facts = {"checkpoint": str(found.folder), "step": found.step, "seconds": rows[0]["seconds"]}
        print(json.dumps({**facts, "evaluations": [{key: row[key] for key in keys} for row in rows]}))
    else:
        print_evaluation(console, str(found.folder), rows)


app.command(name="import-hf")(import_hf)
app.command(name="export-hf")(export_hf)
app.command()(convert)


def _join_lines(group: typer.Typer) -> None:
    """Typer keeps the line breaks of docstrings, which fit the sources and not the terminal."""
    for command in group.registered_commands:
        text = command.help or inspect.getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    for each in group.registered_groups:
        if each.typer_instance is not None:
            _join_lines(each.typer_instance)


_join_lines(app)


def _mute() -> None:
    """Discards what stdout has buffered, as flushing it would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(sentence: str, status: int, drawing: str = "") -> int:
    if sentence:
        print(f"pentad: {' '.join(printable(sentence).split())}", file=sys.stderr)
    if drawing:
        print(printable(drawing), file=sys.stderr)
    return status


if __name__ == "__main__":  # the entry point of a submitted job
    sys.exit(main())
