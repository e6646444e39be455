"""Schedules by name: generator, placement of stages on ranks, sizes allowed and options taken."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pentad.schedules.generators import custom, torch_csv
from pentad.schedules.generators.dualpipe import dualpipe, dualpipe_v
from pentad.schedules.generators.interleaved import interleaved, interleaved_zb, looped_bfs
from pentad.schedules.generators.one_f_one_b import eager_one_f_one_b, gpipe, one_f_one_b
from pentad.schedules.generators.seq_1f1b import seq_1f1b
from pentad.schedules.generators.v_blocks import v_half, v_min
from pentad.schedules.generators.zb_auto import zb_1p, zb_2p
from pentad.schedules.generators.zb_v import zb_v
from pentad.schedules.generators.zero_bubble import zb_h1, zb_h2
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Unit
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.schedule_spec import Options, ScheduleSpec

LARGEST = 10**6  # ranks x microbatches x chunks x slices
NONE = Options()
Streams = Sequence[Stream]


def looped(rank: int, shape: ScheduleSpec) -> tuple[int, ...]:
    """Every `ranks`-th stage."""
    return tuple(range(rank, shape.stages, shape.ranks))


def mirrored(rank: int, shape: ScheduleSpec) -> tuple[int, ...]:
    """A stage and its mirror, each on two ranks."""
    return rank, shape.ranks - 1 - rank


def v_shaped(rank: int, shape: ScheduleSpec) -> tuple[int, ...]:
    """Two of twice as many stages, down and up again."""
    return rank, 2 * shape.ranks - 1 - rank


def _any_size(shape: ScheduleSpec) -> str:
    return ""


def _bidirectional(shape: ScheduleSpec) -> str:
    if shape.ranks % 2:
        return f"ranks (mesh.pp) is {shape.ranks}, but it must be even: each rank mirrors another"
    if shape.microbatches % 2:
        return f"microbatches is {shape.microbatches}, but it must be even: half enter at each end"
    return _two_a_rank(shape)


def _two_a_rank(shape: ScheduleSpec) -> str:
    if shape.microbatches < 2 * shape.ranks:
        least = 2 * shape.ranks
        return f"microbatches is {shape.microbatches}, but it must be at least 2 x ranks (mesh.pp) = {least}"
    return ""


def _whole_groups(shape: ScheduleSpec) -> str:
    if shape.group < min(shape.ranks, shape.microbatches):
        least = min(shape.ranks, shape.microbatches)
        return f"group is {shape.group}, but a group of fewer than {least} microbatches leaves ranks without work"
    return ""


@dataclass(frozen=True)
class Entry:
    """`generate(shape)` gives the compute units of every rank, `placement(rank, shape)` its stages.

    `chunks` is the number of parts that a rank's own layers are cut into (unless the schedule takes that as an option),
    `slices` is what sequences are cut into where it is not asked, `takes` names the options it has, and `refusal` says
    what is wrong with a size, in a few words.
    """

    generate: Callable[[ScheduleSpec], Streams]
    placement: Callable[[int, ScheduleSpec], tuple[int, ...]] = looped
    chunks: int = 1
    slices: int = 1
    takes: frozenset[str] = frozenset()
    refusal: Callable[[ScheduleSpec], str] = _any_size


def _of_sizes(generate: Callable[[int, int, int], Iterator[Unit]], shape: ScheduleSpec) -> Streams:
    return tuple(tuple(generate(rank, shape.ranks, shape.microbatches)) for rank in range(shape.ranks))


def _of_shape(generate: Callable[[int, ScheduleSpec], Iterator[Unit]], shape: ScheduleSpec) -> Streams:
    return tuple(tuple(generate(rank, shape)) for rank in range(shape.ranks))


_TURNS = frozenset({"chunks", "group"})
CATALOGUE = {
    "gpipe": Entry(partial(_of_sizes, gpipe)),
    "1f1b": Entry(partial(_of_sizes, one_f_one_b)),
    "1f1b-eager": Entry(partial(_of_sizes, eager_one_f_one_b)),
    "seq-1f1b": Entry(partial(_of_shape, seq_1f1b), slices=4, takes=frozenset({"slices"})),
    "interleaved": Entry(interleaved, chunks=2, takes=_TURNS, refusal=_whole_groups),
    "looped-bfs": Entry(looped_bfs, chunks=2, takes=frozenset({"chunks"})),
    "zb-h1": Entry(partial(_of_sizes, zb_h1)),
    "zb-h2": Entry(partial(_of_sizes, zb_h2)),
    "zb-1p": Entry(zb_1p, takes=frozenset({"costs", "limit"})),
    "zb-2p": Entry(zb_2p, takes=frozenset({"costs", "limit"})),
    "interleaved-zb": Entry(interleaved_zb, chunks=2, takes=_TURNS, refusal=_whole_groups),
    "zb-v": Entry(zb_v, v_shaped, chunks=2),
    "v-half": Entry(v_half, v_shaped, chunks=2, takes=frozenset({"costs"})),
    "v-min": Entry(v_min, v_shaped, chunks=2, takes=frozenset({"costs"})),
    "dualpipe": Entry(partial(_of_sizes, dualpipe), mirrored, refusal=_bidirectional),
    "dualpipev": Entry(partial(_of_sizes, dualpipe_v), v_shaped, chunks=2, refusal=_two_a_rank),
}
FILES = (".csv", ".arrow")
FILED = Entry(lambda shape: ())
OWN = Entry(lambda shape: (), takes=frozenset({"chunks"}))


def entry(name: str) -> Entry:
    """Raises PentadError naming the nearest schedule when there is none of that name."""
    if name not in CATALOGUE:
        near = difflib.get_close_matches(name, CATALOGUE, n=1, cutoff=0.4)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise PentadError(f"schedule.name is {name!r}{hint}, but the schedules are: {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


def shape_of(
    name: str, ranks: int, microbatches: int, asked: Options = NONE, costs: Costs | None = None
) -> ScheduleSpec:
    """What a schedule is to be made for. Raises PentadError on sizes it does not allow and options it does not take."""
    found = OWN if ":" in name else FILED if name.endswith(FILES) else entry(name)
    _refuse_options(name, found, asked)
    for what, size in {"ranks (mesh.pp)": ranks, "microbatches": microbatches}.items():
        if size < 1:
            raise PentadError(f"schedule {name}: {what} is {size}, but at least 1 is needed")
    chunks, slices = asked.chunks or found.chunks, asked.slices or found.slices
    if ranks * microbatches * chunks * slices > LARGEST:
        text = f"ranks x microbatches is {ranks} x {microbatches}" + f", with {chunks} chunks each" * (chunks > 1)
        text += f", in {slices} slices each" * (slices > 1)
        raise PentadError(f"schedule {name}: {text}, but at most {LARGEST} are compiled at once")
    turn = (asked.group or ranks) if "group" in found.takes else microbatches
    shape = ScheduleSpec(ranks, microbatches, chunks, min(turn, microbatches), costs, asked.memory_limit, slices)
    if refusal := found.refusal(shape):
        raise PentadError(f"schedule {name}: {refusal}")
    return shape


def generate(name: str, ranks: int, microbatches: int, asked: Options = NONE, costs: Costs | None = None) -> Program:
    """The compute order of a schedule on `ranks` pipeline ranks; FILE.py:FUNCTION names one of the user's own, FILE.csv
    one in the form of torch.distributed.pipelining, FILE.arrow the one of a saved program.

    Raises PentadError as `shape_of` does, and when the user's function or file is no schedule of these sizes.
    """
    shape = shape_of(name, ranks, microbatches, asked, costs)
    if ":" in name:
        return custom.program(name, shape)
    if name.endswith(FILES):
        return _from_file(name, ranks, microbatches)
    found = entry(name)
    placement = tuple(found.placement(rank, shape) for rank in range(ranks))
    return Program(name, found.generate(shape), placement, microbatches, shape.chunks, shape.slices)


def _from_file(name: str, ranks: int, microbatches: int) -> Program:
    read = torch_csv.read(Path(name)) if name.endswith(".csv") else Program.load(Path(name)).compute()
    for what, found, expected in (("ranks", read.ranks, ranks), ("microbatches", read.microbatches, microbatches)):
        if found != expected:
            raise PentadError(f"schedule {name}: the file has {found} {what}: expected {expected}")
    return read


def _refuse_options(name: str, found: Entry, asked: Options) -> None:
    for option, value in asked._asdict().items():
        if value is None or (option in ("chunks", "slices") and value == getattr(found, option)):
            continue
        if option not in found.takes:
            if option == "chunks":
                has = f"has {found.chunks} chunk{'s' * (found.chunks > 1)} a rank: expected {found.chunks}"
            else:
                has = f"does not take it: expected no {_NAMES[option]}"
            raise PentadError(f"{_NAMES[option]} is {value:g}, but schedule {name} {has}")
        if value < 1:
            raise PentadError(f"schedule {name}: {_NAMES[option]} is {value:g}, but at least 1 is needed")


_NAMES = {"chunks": "chunks", "group": "group", "limit": "memory_limit", "slices": "slices"}
