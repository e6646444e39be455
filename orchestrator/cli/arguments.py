"""The arguments and options that commands share, and those of `pentad schedule`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from pentad.orchestrator.cli.completion import SCHEDULE_NAMES, config_words, run_names, schedule_names

MOST_GPUS = 2**14  # whose meshes are compared in seconds
Words = Annotated[
    list[str] | None,
    Argument(
        metavar="CONFIG|a.b=value",
        help="A YAML file (default: the quickstart), then overrides.",
        autocompletion=config_words,
    ),
]
Address = Annotated[
    str | None,
    Option(metavar="URL", help="The cluster's dashboard (default: RAY_ADDRESS, else http://127.0.0.1:8265)."),
]
Run = Annotated[
    str,
    Argument(
        metavar="RUN",
        help="A run's folder, its name under runs/, or the ID of a submitted job.",
        autocompletion=run_names,
    ),
]
Folder = Annotated[
    str, Argument(metavar="RUN", help="A run's folder, or its name under runs/.", autocompletion=run_names)
]
Timeout = Annotated[float, Option(min=0.01, help="Seconds to wait for an answer.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object on stdout.")]
_SCHEDULES = (
    f"{', '.join(SCHEDULE_NAMES)}; auto: the fastest of these, or a faster one; FILE.py:FUNCTION: one of your own; "
    "FILE.csv or FILE.arrow: a file that --csv or --arrow wrote."
)


@dataclass(frozen=True)
class ScheduleArguments:
    """What to build and at which costs, and what to write and print."""

    name: Annotated[str, Argument(metavar="NAME", help=_SCHEDULES, autocompletion=schedule_names)]
    ranks: Annotated[int, Option(help="Pipeline ranks.")]
    microbatches: Annotated[int, Option(help="Microbatches per step.")]
    chunks: Annotated[int | None, Option(help="Chunks (stages) per rank.")] = None
    group: Annotated[int | None, Option(help="Microbatches per group, in interleaved schedules.")] = None
    slices: Annotated[int | None, Option(help="Slices per sequence.")] = None
    costs: Annotated[str, Option(help="Costs F,B,W of one microbatch on a whole rank.")] = "1,1,1"
    comm: Annotated[float, Option(help="Cost of sending a microbatch to the next stage.")] = 0.0
    memory_limit: Annotated[float | None, Option(help="Activations that a rank may keep, in microbatches.")] = None
    recompute: Annotated[
        str | None, Option(metavar="STAGES", help="Stages to recompute: 'all', or a list such as 0,2.")
    ] = None
    max_resident: Annotated[float | None, Option(help="Microbatches to keep on the GPU; others are offloaded.")] = None
    zero: Annotated[int | None, Option(help="ZeRO stage, with two data-parallel replicas.")] = None
    max_gathered: Annotated[int | None, Option(help="Stages that a rank may have gathered at once (ZeRO-3).")] = None
    prefetch: Annotated[int | None, Option(help="How many compute actions ahead a gather starts.")] = None
    post_validation: Annotated[
        bool, Option("--post-validation", help="Start a step before the last one's norm is known.")
    ] = False
    grid: Annotated[bool, Option("--grid", help="Print the grid (default: if it fits and no file is written).")] = False
    svg: Annotated[Path | None, Option(help="Write a figure.")] = None
    html: Annotated[Path | None, Option(help="Write an interactive page.")] = None
    beside: Annotated[
        str | None,
        Option(metavar="NAME", help="Another schedule to draw on the same page.", autocompletion=schedule_names),
    ] = None
    arrow: Annotated[Path | None, Option(help="Write the program as an Arrow file.")] = None
    csv: Annotated[Path | None, Option(help="Write the compute order for torch.distributed.pipelining.")] = None
    what_if: Annotated[bool, Option("--what-if", help="Show what limits a step and what would shorten it.")] = False
    as_json: Json = False

    @property
    def files(self) -> dict[str, Path]:
        return files_by_option(svg=self.svg, html=self.html, arrow=self.arrow, csv=self.csv)


def files_by_option(**paths: Path | None) -> dict[str, Path]:
    """The files to write, by the name of their option."""
    return {f"--{name}": path for name, path in paths.items() if path is not None}


def split_words(words: list[str] | None) -> tuple[Path | None, list[str]]:
    """The config file, if one is given, and the overrides, which contain '='."""
    files = [word for word in words or () if "=" not in word]
    if len(files) > 1:
        raise typer.BadParameter(f"CONFIG is given twice, {files[0]!r} and {files[1]!r}: expected one file")
    return Path(files[0]) if files else None, [word for word in words or () if "=" in word]
