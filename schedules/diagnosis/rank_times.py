"""Seconds of every rank by op and stage, one step after another: few enough numbers to keep for many steps.

Besides the ops of instructions there are DATA, what the host waited for the loader, and HOST, what could have run and
had not been issued.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from pentad.schedules.diagnosis.attribution import LayerWait, Measured
from pentad.schedules.ir.arrow_file import read_table, require_no_nulls, require_range
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.timeline import LONGEST_SECONDS
from pentad.schedules.spec.mesh import Axis, Mesh

DATA, HOST_OP = "DATA", "HOST"
INNER_AXES: tuple[Axis, ...] = ("tp", "cp", "ep")


class RankTime(NamedTuple):
    """A rank's `seconds` in all instructions of an op on a stage (-1: none) in a step. In compute, `waited` of them
    passed in communication inside layers."""

    step: int
    rank: int
    op: str
    stage: int
    seconds: float
    waited: float = 0.0


_TYPES = [pa.int64(), pa.int32(), pa.string(), pa.int32(), pa.float64(), pa.float64()]
SCHEMA = pa.schema(list(zip(RankTime._fields, _TYPES, strict=True)))


def to_arrow(times: Iterable[RankTime]) -> pa.Table:
    rows = list(times)
    columns = zip(*rows, strict=True) if rows else ([] for _ in SCHEMA)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def save(times: Iterable[RankTime], path: Path) -> None:
    table = to_arrow(times)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def load(path: Path) -> tuple[RankTime, ...]:
    """Raises PentadError if `save` did not write the file."""
    try:
        table = read_table(path.read_bytes())
        if not table.schema.equals(SCHEMA):
            raise PentadError(f"its columns are {table.schema.names}: expected {SCHEMA.names}")
        require_no_nulls(table)
        for name, low in {"step": 0, "rank": 0, "stage": -1, "seconds": 0.0, "waited": 0.0}.items():
            require_range(table, name, low, LONGEST_SECONDS)
    except (OSError, PentadError) as error:
        raise PentadError(f"{path} is not a readable table of rank times: {error}") from None
    return tuple(map(RankTime._make, zip(*(table.column(name).to_pylist() for name in SCHEMA.names), strict=True)))


def measured_of(times: Iterable[RankTime], mesh: Mesh, began: dict[int, float] | None = None) -> Measured:
    """What `attribute` takes besides the spans, from the times of one step.

    A peer that is late keeps the others waiting in every collective of the layer, and itself waits least: what the
    shortest wait of the group exceeds is waiting for a late peer.
    """
    data, waited = dict[int, float](), dict[tuple[int, str, int], float]()
    for each in times:
        if each.op == DATA:
            data[each.rank] = each.seconds
        if each.waited:
            waited[each.rank, each.op, each.stage] = each.waited
    total, late = dict[int, float](), dict[int, float]()
    for (rank, op, stage), seconds in waited.items():
        group = mesh.group(INNER_AXES, rank)
        shortest = min(waited.get((other, op, stage), 0.0) for other in group)
        total[rank] = total.get(rank, 0.0) + seconds
        late[rank] = late.get(rank, 0.0) + seconds - shortest
    layers = {rank: LayerWait(seconds, late[rank]) for rank, seconds in total.items()}
    return Measured(began or {}, data, layers)
