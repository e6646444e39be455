"""The command line. Verbs import what they need when they run: most need neither torch nor Ray."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.dependencies import ScheduleError

# ClickException, the base of all mistakes in options; typer brings click along but does not export it.
_ClickException: Any = typer.BadParameter.__mro__[2]
_INTERRUPTED = 130  # what some versions of typer return for a KeyboardInterrupt; others raise Abort

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)
data = typer.Typer(help="Builds and inspects token shards.", no_args_is_help=True)
app.add_typer(data, name="data")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [a.b=value ...]", help="YAML file (default: the quickstart); overrides."),
]
Address = Annotated[
    str | None,
    typer.Option(metavar="URL", help="The cluster's dashboard (default: RAY_ADDRESS, else http://127.0.0.1:8265)."),
]
Run = Annotated[str, typer.Argument(help="A run's folder, or its name under runs/.")]
Timeout = Annotated[float, typer.Option(min=0.01, help="Longest wait for the answer, in seconds.")]
JobId = Annotated[str, typer.Argument(metavar="ID", help="A job that `pentad jobs` lists.")]


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line and returns the exit status; a user's mistake is one sentence on stderr."""
    try:
        result = app(arguments, prog_name="pentad", standalone_mode=False)
        sys.stdout.flush()
        status = result if isinstance(result, int) else 0
        return _fail("interrupted", status) if status == _INTERRUPTED else status
    except PentadError as error:
        return _fail(str(error), 1)
    except ScheduleError as error:
        sentence, _, grid = str(error).partition("\n")
        return _fail(sentence, 1, grid)
    except _ClickException as error:
        return _fail(error.format_message(), 2)
    except typer.Abort:
        return _fail("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        _mute()
        return 1
    except OSError as error:  # what no one nearer could name: a full or failing stdout
        _mute()
        return _fail(f"the system refuses to go on: {error}", 1)


def _tell(expected: bool) -> None:
    if expected:
        from pentad.orchestrator.config.version import release

        print(f"pentad {release()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Trains large language models on a Ray cluster from explicit per-rank programs."""


@app.command()
def train(words: Words = None, as_json: Json = False) -> None:
    """Trains; with no CONFIG: the quickstart, on GPUs if there are some, else on CPUs."""
    from pentad.orchestrator.config.config import load

    config = load(*_split(words))
    from pentad.workers.data.sources import open_data

    length, cache = config.batch.sequence_length, config.data.cache
    # Looked at before anything is started or written.
    corpus = open_data(config.data.path, config.model.vocab, length, cache, verify=True)
    if config.cluster.address == "local":
        from pentad.orchestrator.planning.fit import refuse_unfit

        refuse_unfit(config, _device(config.cluster.device))
    from pentad.orchestrator.monitoring.display import ending
    from pentad.orchestrator.run.driver import train as run

    console = Console(stderr=as_json)
    summary = run(config, console=console, as_json=as_json, fingerprint=corpus.fingerprint)
    if as_json:
        print(json.dumps(summary))
    else:
        ending(console, summary)


@app.command()
def plan(
    words: Words = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Where it would run (default: as found here).")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="List the meshes of so many GPUs that fit, the quickest first.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.001, help="GiB of a device (default: as found here, else those of an H200).")
    ] = None,
    as_json: Json = False,
) -> int:
    """Shows what would run: mesh, memory, traffic and predicted time; status 1 if it does not fit."""
    from pentad.orchestrator.config.config import load
    from pentad.orchestrator.planning.fit import room_of

    config = load(*_split(words))
    if gpus is not None:
        from pentad.orchestrator.cli.show_meshes import show_meshes

        return show_meshes(config, gpus, room_of("cuda", memory), Console(), as_json=as_json)
    from pentad.orchestrator.cli.show_plan import show_plan

    place = _device(config.cluster.device if device is None else device)
    return show_plan(config, place, room_of(place, memory), Console(), as_json=as_json)


_SCHEDULES = (
    "gpipe, 1f1b, 1f1b-eager, seq-1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zb-1p, zb-2p, interleaved-zb, zb-v, "
    "v-half, v-min, dualpipe, dualpipev; auto, the quickest of them and beyond; FILE.py:FUNCTION, one of your own; or "
    "FILE.csv or FILE.arrow, as --csv and --arrow write them."
)


@app.command()
def schedule(
    name: Annotated[str, typer.Argument(help=_SCHEDULES)],
    ranks: Annotated[int, typer.Option(help="Pipeline ranks.")],
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")],
    chunks: Annotated[int | None, typer.Option(help="Parts that a rank's layers are cut into.")] = None,
    group: Annotated[int | None, typer.Option(help="Microbatches of an interleaved group.")] = None,
    slices: Annotated[int | None, typer.Option(help="Parts that sequences are cut into.")] = None,
    costs: Annotated[str, typer.Option(help="F,B,W of one microbatch on a whole rank.")] = "1,1,1",
    comm: Annotated[float, typer.Option(help="Cost of one transfer of a microbatch.")] = 0.0,
    memory_limit: Annotated[float | None, typer.Option(help="Most activations a rank may keep.")] = None,
    recompute: Annotated[
        str | None, typer.Option(metavar="STAGES", help="Stages that compute forwards again: all, or such as 0,2.")
    ] = None,
    keep: Annotated[float | None, typer.Option(help="Most activations on a device; others wait on the host.")] = None,
    zero: Annotated[int | None, typer.Option(help="Stage of ZeRO, for two replicas.")] = None,
    gathered: Annotated[int | None, typer.Option(help="Most stages of a rank that are whole at once (ZeRO 3).")] = None,
    prefetch: Annotated[int | None, typer.Option(help="Compute units that a gather begins ahead of its use.")] = None,
    post_validation: Annotated[
        bool, typer.Option("--post-validation", help="Let a step run ahead of its global norm.")
    ] = False,
    grid: Annotated[bool, typer.Option("--grid", help="Print the grid (the default without another output).")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a figure.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write an interactive page.")] = None,
    beside: Annotated[str | None, typer.Option(metavar="NAME", help="Another schedule, drawn on the page too.")] = None,
    arrow: Annotated[Path | None, typer.Option(help="Write the program as an Arrow file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the compute order for torch.distributed.pipelining.")] = None,
    what_if: Annotated[bool, typer.Option("--what-if", help="Tell what bounds a step and what would help.")] = False,
    as_json: Json = False,
) -> None:
    """Builds, proves, simulates and draws a program. Needs no torch, Ray or GPU."""
    from pentad.orchestrator.cli.show_schedule import Outputs, Request, show_schedule

    given = {"--svg": svg, "--html": html, "--arrow": arrow, "--csv": csv}
    files = {option: path for option, path in given.items() if path is not None}
    sizes = name, ranks, microbatches, chunks, group, costs, comm, memory_limit, slices
    request = Request(*sizes, recompute, keep, zero, gathered, prefetch, post_validation)
    show_schedule(request, Outputs(files, grid, what_if, as_json, beside), Console())


@app.command()
def timeline(
    run: Annotated[str, typer.Argument(help="A run's folder, or its name under runs/.")],
    html: Annotated[Path | None, typer.Option(help="Write an interactive page.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace that opens in Perfetto (.json.gz).")] = None,
    as_json: Json = False,
) -> None:
    """Compares a run's last measured step with its program simulated at the measured costs."""
    from pentad.orchestrator.cli.show_run import show_timeline

    show_timeline(run, Console(), html=html, trace=trace, as_json=as_json)


@app.command()
def status(
    run: Run,
    watch: Annotated[bool, typer.Option("--watch", help="Show each change until the run is over.")] = False,
    timeout: Timeout = 5.0,
    as_json: Json = False,
) -> None:
    """Shows what a run and each of its ranks do now; of a run that is over, how it ended."""
    from pentad.orchestrator.cli.show_status import show_status

    show_status(run, Console(), watch=watch, as_json=as_json, timeout_seconds=timeout)


@app.command()
def pause(run: Run, timeout: Timeout = 60.0, as_json: Json = False) -> None:
    """Pauses a live run after the steps under way; it keeps its ranks and their memory."""
    _ask(run, "pause", timeout, as_json)


@app.command()
def resume(run: Run, timeout: Timeout = 60.0, as_json: Json = False) -> None:
    """Lets a paused run go on."""
    _ask(run, "resume", timeout, as_json)


@app.command()
def checkpoint(run: Run, timeout: Timeout = 600.0, as_json: Json = False) -> None:
    """Saves a live run, and waits until the checkpoint is whole."""
    _ask(run, "checkpoint", timeout, as_json)


@app.command()
def abort(run: Run, timeout: Timeout = 60.0, as_json: Json = False) -> None:
    """Ends a live run now, without a checkpoint."""
    _ask(run, "abort", timeout, as_json)


@app.command()
def submit(
    words: Words = None,
    address: Address = None,
    name: Annotated[str | None, typer.Option(help="The job's ID (default: run.name and a suffix).")] = None,
    follow: Annotated[bool, typer.Option(help="Print the job's log until it ends; Ctrl-C leaves it running.")] = True,
    as_json: Json = False,
) -> int:
    """Submits what `train` would run as a job of a Ray cluster; run.folder and data.path are places there."""
    from pentad.orchestrator.config.config import load

    config = load(*_split(words))
    from pentad.orchestrator.cli.show_jobs import show_submit

    return show_submit(config, address, name, followed=follow, as_json=as_json)


@app.command()
def jobs(address: Address = None, as_json: Json = False) -> int:
    """Lists the runs that were submitted to a Ray cluster."""
    from pentad.orchestrator.cli.show_jobs import show_jobs

    return show_jobs(address, Console(), as_json=as_json)


@app.command()
def logs(
    job: JobId,
    address: Address = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends; Ctrl-C leaves it.")] = False,
    as_json: Json = False,
) -> int:
    """Prints the log of a submitted run."""
    from pentad.orchestrator.cli.show_jobs import show_logs

    return show_logs(job, address, followed=follow, as_json=as_json)


@app.command()
def stop(job: JobId, address: Address = None, as_json: Json = False) -> int:
    """Stops a submitted run: it finishes its step, saves a checkpoint and ends; submitted again, it goes on."""
    from pentad.orchestrator.cli.show_jobs import show_stop

    return show_stop(job, address, as_json=as_json)


@app.command(name="import-hf")
def import_hf(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="config.json and safetensors files.")],
    out: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    as_json: Json = False,
) -> None:
    """Turns a Hugging Face model into a checkpoint of step 0 and a model section."""
    from pentad.orchestrator.cli.show_hf import show_import

    show_import(source, out, as_json=as_json)


@app.command(name="export-hf")
def export_hf(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint's folder, or a run: its newest one.")],
    out: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Of the weights.")] = "float32",
    max_shard_size: Annotated[float, typer.Option(min=0.000001, help="Largest file, in GB.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Turns a checkpoint into a Hugging Face model, whatever mesh saved it."""
    from pentad.orchestrator.cli.show_hf import show_export

    show_export(checkpoint, out, dtype, max_shard_size, as_json=as_json)


@data.command()
def build(
    source: Annotated[Path, typer.Argument(help="A text, JSONL or Parquet file, or a folder of them.")],
    out: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    vocab: Annotated[int, typer.Option(help="Size of the tokenizer to train.")] = 2**15,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json to use instead of training one.")] = None,
    field: Annotated[str, typer.Option(help="The field that holds the text, in JSONL and Parquet.")] = "text",
    as_json: Json = False,
) -> None:
    """Turns text into token shards."""
    from pentad.workers.data.build import build_corpus

    log = Console(stderr=True, highlight=False, markup=False)
    corpus = build_corpus(source, out, tokenizer=tokenizer, vocab=vocab, field=field, progress=log.print)
    facts = {"path": str(out), "tokens": corpus.tokens, "documents": corpus.documents, "vocab_size": corpus.vocab_size}
    if as_json:
        print(json.dumps({**facts, "fingerprint": corpus.fingerprint}))
    else:
        print(f"{out}: {corpus.tokens:,} tokens in {corpus.documents:,} documents, vocabulary of {corpus.vocab_size:,}")


@data.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A folder that `pentad data build` wrote.")],
    samples: Annotated[int, typer.Option(min=0, help="Sequences to show as text.")] = 2,
    as_json: Json = False,
) -> None:
    """Verifies token shards and shows what is in them."""
    from pentad.workers.data.build import inspect_corpus

    facts = inspect_corpus(path, samples, length=64, seed=0)
    if as_json:
        print(json.dumps(facts))
        return
    print(f"{path}: {facts['tokens']:,} tokens in {facts['documents']:,} documents, {len(facts['shards'])} shards")
    print(f"vocabulary of {facts['vocab_size']:,}, fingerprint {facts['fingerprint'][:12]}, verified")
    for number, text in enumerate(facts["samples"]):
        print(f"\n--- sequence {number}\n{_printable(text)}")


def _ask(run: str, verb: str, timeout: float, as_json: bool) -> None:
    from pentad.orchestrator.cli.show_status import ask

    ask(run, verb, Console(), as_json=as_json, timeout_seconds=timeout)


def _device(asked: str) -> str:
    """What 'auto' stands for here. torch would tell too, but takes seconds to import."""
    found = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    return found if asked == "auto" else asked


def _split(words: list[str] | None) -> tuple[Path | None, list[str]]:
    """The config file, if one is given, and the overrides: the words with a '='."""
    files = [word for word in words or () if "=" not in word]
    if len(files) > 1:
        raise typer.BadParameter(f"CONFIG is given twice, {files[0]!r} and {files[1]!r}: expected one file")
    return Path(files[0]) if files else None, [word for word in words or () if "=" in word]


def _printable(text: str) -> str:
    """Text that moves no cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _mute() -> None:
    """What stdout still holds is not written at exit: it would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(sentence: str, status: int, drawing: str = "") -> int:
    if sentence:
        print(f"pentad: {' '.join(sentence.split())}", file=sys.stderr)
    if drawing:
        print(drawing, file=sys.stderr)
    return status


if __name__ == "__main__":  # how a submitted job begins
    sys.exit(main())
