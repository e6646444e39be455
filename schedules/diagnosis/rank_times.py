"""Seconds of every rank by step, op and stage: few enough numbers to keep for many steps.

Besides the ops of instructions there are DATA, the time that the host waited for the loader, and HOST, the time in
which an instruction could have run but had not been issued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from pentad.schedules.diagnosis.attribution import LayerWait, Measured, Starved
from pentad.schedules.diagnosis.step_view import BETWEEN_STAGES, HOST, StepView
from pentad.schedules.ir.arrow_file import file_bytes, read_table, require_no_nulls, require_range, rows_of, table_of
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import RECEIVES, Key
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.regular_files import regular_file
from pentad.schedules.simulate.timeline import COMPUTE, LONGEST_SECONDS, Span, Timeline, attributed_seconds
from pentad.schedules.spec.mesh import LAYER_AXES, Mesh

DATA, HOST_OP = "DATA", "HOST"
MOST_SPANS = 20_000  # the largest step whose waits are told apart, which takes the driver some 0.1 s


class RankTime(NamedTuple):
    """A rank's `seconds` in all instructions of an op on a stage (-1: none) in a step. For compute, `waited` of them
    were spent on communication inside layers, and for `starved` of them, on a CPU rank, the thread was ready to run
    while other processes had the cores. For receives they are the time of the transfers, from when the sender had the
    result, assuming that all took as long as those that compute waited for."""

    step: int
    rank: int
    op: str
    stage: int
    seconds: float
    waited: float = 0.0
    starved: float = 0.0

    @property
    def own(self) -> float:
        """Seconds that the rank itself took."""
        return self.seconds - self.waited - self.starved


class RankWaits(NamedTuple):
    """Seconds that a rank's host waited for the data of a step; and, by op and stage, those that its compute waited for
    communication inside layers and those for which it was `starved` (HOST: between instructions)."""

    rank: int
    data: float
    layers: tuple[tuple[str, int, float], ...] = ()
    starved: tuple[tuple[str, int, float], ...] = ()


_TYPES = [pa.int64(), pa.int32(), pa.string(), pa.int32(), *[pa.float64()] * 3]
SCHEMA = pa.schema(list(zip(RankTime._fields, _TYPES, strict=True)))


def times_of_step(
    program: Program, mesh: Mesh, spans: Sequence[Span], waits: Sequence[RankWaits]
) -> tuple[RankTime, ...]:
    """The times of one step, from its spans. Ranks without spans are missing. Receives and HOST, which are derived from
    the program, are missing for incomplete steps and for those with more than MOST_SPANS spans."""
    step, seconds = spans[0].step, dict[tuple[int, str, int], float]()
    waited = {(each.rank, op, stage): took for each in waits for op, stage, took in each.layers}
    starved = {(each.rank, op, stage): took for each in waits for op, stage, took in each.starved}
    for span, took in attributed_seconds([span for span in spans if span.op in (*COMPUTE, "STEP")]):
        key = span.rank, span.op, span.stage
        seconds[key] = seconds.get(key, 0.0) + took
    seconds |= {(each.rank, DATA, -1): each.data for each in waits}
    if len(spans) <= MOST_SPANS:
        with suppress(PentadError):
            seconds |= _host_and_receives(StepView(program, mesh, Timeline("measured", tuple(spans))))
    found = list[RankTime]()
    for key, took in seconds.items():
        wait = min(took, waited.get(key, 0.0))
        found.append(RankTime(step, *key, took, wait, min(took - wait, starved.get(key, 0.0))))
    return tuple(sorted(found))


def _host_and_receives(view: StepView) -> dict[tuple[int, str, int], float]:
    found = dict[tuple[int, str, int], float]()
    for rank in range(view.mesh.size):
        exposed = dict[Key, list[int]]()  # by the key of a receive without its microbatch
        host = 0
        for busy in view.busy(rank, view.first_start(rank)):
            host += busy.idle.get(HOST, 0)
            if busy.last is not None and busy.last.op in RECEIVES and (length := busy.idle.get(BETWEEN_STAGES)):
                exposed.setdefault(busy.last._replace(microbatch=-1), []).append(length)
        found[rank, HOST_OP, -1] = host / 1e9
        count = Counter(action.key._replace(microbatch=-1) for action in view.stream(rank) if action.key.op in RECEIVES)
        for key, lengths in exposed.items():
            found[rank, key.op.value, key.stage] = count[key] * sum(lengths) / len(lengths) / 1e9
    return found


def to_bytes(times: Iterable[RankTime]) -> bytes:
    """The content of an Arrow file."""
    return file_bytes(table_of(times, SCHEMA))


def save(times: Iterable[RankTime], path: Path) -> None:
    path.write_bytes(to_bytes(times))


def load(path: Path) -> tuple[RankTime, ...]:
    """Raises PentadError if `save` did not write the file."""
    regular_file(path)
    try:
        table = read_table(path.read_bytes())
        if not table.schema.equals(SCHEMA):
            raise PentadError(f"its columns are {table.schema.names}: expected {SCHEMA.names}")
        require_no_nulls(table)
        for name, low in {"step": 0, "rank": 0, "stage": -1, "seconds": 0.0, "waited": 0.0, "starved": 0.0}.items():
            require_range(table, name, low, LONGEST_SECONDS)
    except (OSError, PentadError) as error:
        raise PentadError(f"{path} is not a readable table of rank times: {error}") from None
    return tuple(map(RankTime._make, rows_of(table)))


def measured_of(times: Iterable[RankTime], mesh: Mesh, began: dict[int, float] | None = None) -> Measured:
    """What `attribute` needs besides the spans, from the times of one step.

    A late peer keeps the others waiting in every collective of the layer, and itself waits least: any wait beyond the
    shortest of the group is for a late peer.
    """
    data, waited = dict[int, float](), dict[tuple[int, str, int], float]()
    starved = dict[int, Starved]()
    for each in times:
        compute, between = starved.get(each.rank, Starved())
        if each.op == HOST_OP:
            between += each.starved
        else:
            compute += each.starved
        starved[each.rank] = Starved(compute, between)
        if each.op == DATA:
            data[each.rank] = each.seconds
        if each.waited:
            waited[each.rank, each.op, each.stage] = each.waited
    total, late = dict[int, float](), dict[int, float]()
    for (rank, op, stage), seconds in waited.items():
        group = mesh.group(LAYER_AXES, rank)
        shortest = min(waited.get((other, op, stage), 0.0) for other in group)
        total[rank] = total.get(rank, 0.0) + seconds
        late[rank] = late.get(rank, 0.0) + seconds - shortest
    layers = {rank: LayerWait(seconds, late[rank]) for rank, seconds in total.items()}
    return Measured(began or {}, data, layers, starved)
