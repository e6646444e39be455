"""Schedules by name: which generator, which placement of stages on ranks, which (ranks, microbatches) it allows."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pentad.schedules.dualpipe import dualpipe
from pentad.schedules.errors import PentadError
from pentad.schedules.instruction import Unit
from pentad.schedules.one_f_one_b import gpipe, one_f_one_b
from pentad.schedules.program import Program
from pentad.schedules.zb_v import zb_v
from pentad.schedules.zero_bubble import zb_h1, zb_h2

LARGEST = 10**6  # ranks x microbatches
Generator = Callable[[int, int, int], Iterator[Unit]]
Placement = Callable[[int, int], tuple[int, ...]]


def one_stage(rank: int, ranks: int) -> tuple[int, ...]:
    return (rank,)


def mirrored(rank: int, ranks: int) -> tuple[int, ...]:
    """A stage and its mirror, each on two ranks."""
    return rank, ranks - 1 - rank


def v_shaped(rank: int, ranks: int) -> tuple[int, ...]:
    """Two of twice as many stages, down and up again."""
    return rank, 2 * ranks - 1 - rank


@dataclass(frozen=True)
class Entry:
    """A generator (rank, ranks, microbatches) -> compute units of that rank, and its placement (rank, ranks) -> stages.

    `chunks` is the number of parts that a rank's own layers are cut into.
    """

    generate: Generator
    placement: Placement = one_stage
    chunks: int = 1


CATALOGUE = {
    "gpipe": Entry(gpipe),
    "1f1b": Entry(one_f_one_b),
    "zb-h1": Entry(zb_h1),
    "zb-h2": Entry(zb_h2),
    "zb-v": Entry(zb_v, v_shaped, chunks=2),
    "dualpipe": Entry(dualpipe, mirrored),
}


def entry(name: str) -> Entry:
    """Raises PentadError naming the nearest schedule when there is none of that name."""
    if name not in CATALOGUE:
        near = difflib.get_close_matches(name, CATALOGUE, n=1, cutoff=0.4)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise PentadError(f"schedule.name is {name!r}{hint}, but the schedules are: {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


def generate(name: str, ranks: int, microbatches: int) -> Program:
    """The compute order of a schedule on `ranks` pipeline ranks. Raises PentadError on sizes it does not allow."""
    found = entry(name)
    if ranks < 1:
        raise PentadError(f"schedule {name}: ranks (mesh.pp) is {ranks}, but at least 1 is needed")
    if microbatches < 1:
        raise PentadError(f"schedule {name}: microbatches is {microbatches}, but at least 1 is needed")
    if ranks * microbatches > LARGEST:
        text = f"ranks x microbatches is {ranks} x {microbatches}, but at most {LARGEST} are compiled at once"
        raise PentadError(f"schedule {name}: {text}")
    if found.placement is mirrored:
        _check_bidirectional(name, ranks, microbatches)
    streams = tuple(tuple(found.generate(rank, ranks, microbatches)) for rank in range(ranks))
    placement = tuple(found.placement(rank, ranks) for rank in range(ranks))
    return Program(name, streams, placement, microbatches, found.chunks)


def _check_bidirectional(name: str, ranks: int, microbatches: int) -> None:
    if ranks % 2:
        text = f"ranks (mesh.pp) is {ranks}, but it must be even: each rank mirrors another"
        raise PentadError(f"schedule {name}: {text}")
    if microbatches % 2:
        text = f"microbatches is {microbatches}, but it must be even: half enter at each end"
        raise PentadError(f"schedule {name}: {text}")
    if microbatches < 2 * ranks:
        text = f"microbatches is {microbatches}, but it must be at least 2 x ranks (mesh.pp) = {2 * ranks}"
        raise PentadError(f"schedule {name}: {text}")
