"""Schedules by name: generator, placement of stages on ranks, allowed sizes and accepted options."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

from pentad.schedules.generators import custom, torch_csv
from pentad.schedules.generators.dualpipe import dualpipe, dualpipe_v
from pentad.schedules.generators.one_f_one_b import gpipe, interleaved, one_f_one_b
from pentad.schedules.generators.v_blocks import most_saved_by_v_half, most_saved_by_v_min, v_half, v_min
from pentad.schedules.generators.zb_auto import most_saved, zb_1p, zb_2p
from pentad.schedules.generators.zb_h import zb_h1, zb_h2
from pentad.schedules.generators.zb_v import zb_v
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Action
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.schedule_spec import ScheduleOptions, ScheduleSpec

MAX_SIZE = 10**6  # ranks x microbatches x chunks x slices
NO_OPTIONS = ScheduleOptions()


def looped(rank: int, spec: ScheduleSpec) -> tuple[int, ...]:
    """Every `ranks`-th stage."""
    return tuple(range(rank, spec.stages, spec.ranks))


def mirrored(rank: int, spec: ScheduleSpec) -> tuple[int, ...]:
    """A stage and its mirror; two ranks hold each stage."""
    return rank, spec.ranks - 1 - rank


def v_shaped(rank: int, spec: ScheduleSpec) -> tuple[int, ...]:
    """Two stages: the first half of the model goes down the ranks, the second half back up."""
    return rank, 2 * spec.ranks - 1 - rank


def _dualpipe_size(spec: ScheduleSpec) -> str:
    if spec.ranks % 2:
        return f"ranks (mesh.pp) is {spec.ranks}: expected an even number"
    if spec.microbatches % 2:
        return f"microbatches is {spec.microbatches}: expected an even number"
    return _dualpipe_v_size(spec)


def _dualpipe_v_size(spec: ScheduleSpec) -> str:
    if spec.microbatches < 2 * spec.ranks:
        return f"microbatches is {spec.microbatches}: expected at least 2 x ranks (mesh.pp) = {2 * spec.ranks}"
    return ""


def _interleaved_size(spec: ScheduleSpec) -> str:
    least = min(spec.ranks, spec.microbatches)  # a smaller group does not fill the pipeline
    return f"group is {spec.group}: expected at least {least}" if spec.group < least else ""


@dataclass(frozen=True)
class Entry:
    """`generate(spec)` gives the compute order of every rank, `placement(rank, spec)` its stages.

    `summary` describes the schedule in one line, and `paper` is where it was published. `accepts` names its options,
    `chunks` and `slices` are its defaults, and `refusal` says what is wrong with a size, or is empty. For a schedule
    planned from costs, `most_saved` bounds the microbatches of activations that any rank saves.
    """

    generate: Callable[[ScheduleSpec], Sequence[Stream]]
    summary: str = ""
    paper: str = ""
    placement: Callable[[int, ScheduleSpec], tuple[int, ...]] = looped
    chunks: int = 1
    slices: int = 1
    accepts: frozenset[str] = frozenset()
    refusal: Callable[[ScheduleSpec], str] = lambda spec: ""
    most_saved: Callable[[ScheduleSpec], float] | None = None


def _per_rank(generate: Callable[[int, int, int], Iterator[Action]], spec: ScheduleSpec) -> Sequence[Stream]:
    return tuple(tuple(generate(rank, spec.ranks, spec.microbatches)) for rank in range(spec.ranks))


_INTERLEAVED = frozenset({"chunks", "group"})
_PLANNED = frozenset({"costs", "memory_limit"})
_ZERO_BUBBLE = "Qi et al. 2023, arXiv 2401.10241"
_CONTROLLABLE_MEMORY = "Qi et al. 2024, arXiv 2405.15362"
_DEEPSEEK_V3 = "DeepSeek-AI 2024, arXiv 2412.19437"
CATALOGUE = {
    "gpipe": Entry(gpipe, "all forwards, then all backwards", "Huang et al. 2019, arXiv 1811.06965"),
    "1f1b": Entry(
        one_f_one_b,
        "alternates forward and backward, so that rank r holds at most ranks - r microbatches",
        "Narayanan et al. 2021, arXiv 2006.09503",
    ),
    "1f1b-eager": Entry(
        interleaved,
        "1F1B with about twice as many forwards first, to hide transfers",
        "Zhuang et al. 2023, arXiv 2211.05322",
    ),
    "seq-1f1b": Entry(
        one_f_one_b,
        "1F1B on slices of the sequences: less memory and a smaller bubble",
        "Sun et al. 2024, arXiv 2406.03488",
        slices=4,
        accepts=frozenset({"slices"}),
    ),
    "interleaved": Entry(
        interleaved,
        "1F1B on several chunks per rank: a smaller bubble for more transfers and memory",
        "Narayanan et al. 2021, arXiv 2104.04473",
        chunks=2,
        accepts=_INTERLEAVED,
        refusal=_interleaved_size,
    ),
    "looped-bfs": Entry(
        gpipe,
        "all microbatches through one chunk before the next: gathers and reductions once per chunk",
        "Lamy-Poirier 2022, arXiv 2211.05953",
        chunks=2,
        accepts=frozenset({"chunks"}),
    ),
    "zb-h1": Entry(zb_h1, "1F1B with W deferred into the bubble, in 1F1B's memory", _ZERO_BUBBLE),
    "zb-h2": Entry(
        zb_h2, "more forwards first: no bubble without a barrier, for up to twice 1F1B's memory", _ZERO_BUBBLE
    ),
    "zb-1p": Entry(
        zb_1p,
        "zero bubble planned for given costs, within 1F1B's memory by default",
        _ZERO_BUBBLE,
        accepts=_PLANNED,
        most_saved=lambda spec: most_saved(spec, spec.ranks),
    ),
    "zb-2p": Entry(
        zb_2p,
        "zero bubble planned for given costs, within twice 1F1B's memory by default",
        _ZERO_BUBBLE,
        accepts=_PLANNED,
        most_saved=lambda spec: most_saved(spec, 2 * spec.ranks),
    ),
    "interleaved-zb": Entry(
        zb_h1,
        "interleaved, with W deferred into the bubble",
        _ZERO_BUBBLE,
        chunks=2,
        accepts=_INTERLEAVED,
        refusal=_interleaved_size,
    ),
    "zb-v": Entry(zb_v, "zero bubble on two chunks placed as a V, in 1F1B's memory", _ZERO_BUBBLE, v_shaped, chunks=2),
    "v-half": Entry(
        v_half,
        "two chunks placed as a V, in about half of 1F1B's memory",
        _CONTROLLABLE_MEMORY,
        v_shaped,
        chunks=2,
        accepts=frozenset({"costs"}),
        most_saved=most_saved_by_v_half,
    ),
    "v-min": Entry(
        v_min,
        "two chunks placed as a V, in about a third of 1F1B's memory",
        _CONTROLLABLE_MEMORY,
        v_shaped,
        chunks=2,
        accepts=frozenset({"costs"}),
        most_saved=most_saved_by_v_min,
    ),
    "dualpipe": Entry(
        partial(_per_rank, dualpipe),
        "microbatches from both ends, forward and backward interleaved; each stage on two ranks",
        _DEEPSEEK_V3,
        mirrored,
        refusal=_dualpipe_size,
    ),
    "dualpipev": Entry(
        partial(_per_rank, dualpipe_v),
        "DualPipe folded into a V: each stage on one rank",
        _DEEPSEEK_V3,
        v_shaped,
        chunks=2,
        refusal=_dualpipe_v_size,
    ),
}
FILE_SUFFIXES = (".csv", ".arrow")
SAVED = Entry(lambda spec: ())  # a file with one of FILE_SUFFIXES
CUSTOM = Entry(lambda spec: (), accepts=frozenset({"chunks"}))  # FILE.py:FUNCTION


def entry(name: str) -> Entry:
    """The entry of a schedule. Raises PentadError, naming the nearest one, if there is none of that name."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    if ":" in name:
        return CUSTOM
    if name.endswith(FILE_SUFFIXES):
        return SAVED
    if name.endswith(".py"):
        raise PentadError(f"schedule.name is {name!r}: expected FILE.py:FUNCTION, such as '{name}:my_schedule'")
    near = difflib.get_close_matches(name, CATALOGUE, n=1, cutoff=0.4)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise PentadError(f"schedule.name is {name!r}: expected one of {', '.join(CATALOGUE)}{hint}")


def spec_of(
    name: str, ranks: int, microbatches: int, options: ScheduleOptions = NO_OPTIONS, costs: Costs | None = None
) -> ScheduleSpec:
    """Raises PentadError for sizes that the schedule does not allow and for options that it does not accept."""
    found = entry(name)
    _check_options(name, found, options)
    for key, size in {"ranks (mesh.pp)": ranks, "microbatches": microbatches}.items():
        if size < 1:
            raise PentadError(f"{key} is {size}: expected at least 1 for schedule {name}")
    chunks, slices = options.chunks or found.chunks, options.slices or found.slices
    sizes = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks, "slices": slices}
    if prod(sizes.values()) > MAX_SIZE:
        keys, values = " x ".join(sizes), " x ".join(map(str, sizes.values()))
        raise PentadError(f"{keys} is {values}: expected at most {MAX_SIZE} for schedule {name}")
    group = (options.group or ranks) if "group" in found.accepts else microbatches
    spec = ScheduleSpec(**sizes, group=min(group, microbatches), costs=costs, memory_limit=options.memory_limit)
    if refusal := found.refusal(spec):
        raise PentadError(f"{refusal} for schedule {name}")
    return spec


def generate(
    name: str, ranks: int, microbatches: int, options: ScheduleOptions = NO_OPTIONS, costs: Costs | None = None
) -> Program:
    """The compute order of a schedule on `ranks` pipeline ranks.

    Besides the names of CATALOGUE: FILE.py:FUNCTION is a user's generator, FILE.csv the format of
    torch.distributed.pipelining, FILE.arrow a saved program. Raises PentadError as `spec_of` does, and when the user's
    function or file is not a schedule of these sizes.
    """
    found, spec = entry(name), spec_of(name, ranks, microbatches, options, costs)
    if found is CUSTOM:
        return custom.program(name, ranks, microbatches, options.chunks)
    if found is SAVED:
        return _read(name, ranks, microbatches)
    placement = tuple(found.placement(rank, spec) for rank in range(ranks))
    return Program(name, found.generate(spec), placement, microbatches, spec.chunks, spec.slices)


def _read(name: str, ranks: int, microbatches: int) -> Program:
    order = torch_csv.read(Path(name)) if name.endswith(".csv") else Program.load(Path(name)).compute()
    for key, found, expected in (("ranks", order.ranks, ranks), ("microbatches", order.microbatches, microbatches)):
        if found != expected:
            raise PentadError(f"schedule {name}: the file has {found} {key}: expected {expected}")
    return order


def _check_options(name: str, found: Entry, options: ScheduleOptions) -> None:
    for option, value in options._asdict().items():
        fixed = {"chunks": found.chunks, "slices": found.slices}.get(option)
        if value is None or value == fixed:
            continue
        if option not in found.accepts:
            expected = f"{fixed} for schedule {name}" if fixed else f"none (schedule {name} has no such option)"
            raise PentadError(f"{option} is {value:g}: expected {expected}")
        if not value >= 1:  # also refuses NaN
            raise PentadError(f"{option} is {value:g}: expected at least 1 for schedule {name}")
