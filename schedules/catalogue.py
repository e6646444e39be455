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
from pentad.schedules.zero_bubble import zb_h1, zb_h2

Generator = Callable[[int, int, int], Iterator[Unit]]


@dataclass(frozen=True)
class Entry:
    """A generator (rank, ranks, microbatches) -> compute units of that rank, and its constraints."""

    generate: Generator
    bidirectional: bool = False


CATALOGUE = {
    "gpipe": Entry(gpipe),
    "1f1b": Entry(one_f_one_b),
    "zb-h1": Entry(zb_h1),
    "zb-h2": Entry(zb_h2),
    "dualpipe": Entry(dualpipe, bidirectional=True),
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
    if found.bidirectional:
        _check_bidirectional(name, ranks, microbatches)
    streams = tuple(tuple(found.generate(rank, ranks, microbatches)) for rank in range(ranks))
    mirrored = tuple((rank, ranks - 1 - rank) for rank in range(ranks))
    placement = mirrored if found.bidirectional else tuple((rank,) for rank in range(ranks))
    return Program(name, streams, placement, microbatches)


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
