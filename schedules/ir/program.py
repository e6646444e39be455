"""A training step as data: one instruction stream per pipeline rank, immutable and hashed, stored as an Arrow table."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa

from pentad.schedules.ir import arrow
from pentad.schedules.ir.arrow import SCHEMA, VERSION
from pentad.schedules.ir.arrow_file import file_bytes, read_table
from pentad.schedules.ir.columns import Columns, Stream, key_columns, pack
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Key
from pentad.schedules.ir.lookup import IS_COMPUTE, IS_FORWARD, Lookup
from pentad.schedules.ir.regular_files import regular_file

__all__ = ["SCHEMA", "VERSION", "Program", "Stream", "index_of"]


@dataclass(frozen=True, repr=False)
class Program:
    """What every pipeline rank does in one step.

    `streams[rank]` is a tuple of instructions and `placement[rank]` the stages that the rank holds (a DualPipe rank
    holds a stage and its mirror). `chunks` is the number of model chunks that a rank's own layers are split into.
    Replicas along the other axes of the mesh run the same streams, so ranks here are pipeline ranks.

    With `slices` above 1, the sequences of a microbatch go through the pipeline in that many slices, and the
    `microbatch` of an instruction is microbatch x slices + slice (Seq1F1B, arXiv 2406.03488).

    `units[stage]` is the number of units that a pipeline stage is cut into (empty: one each); what `placement` and the
    instructions call a stage is then a unit (passes/units.py), and `chunks` counts units. `sizes[unit]` has the
    elements that a rank holds of its parameters, by kind: of weights and, where these differ, of gradients. ZeRO lays
    out memory by them (passes/zero_buffers.py; empty: all are equal). With `logits_in_w`, the W of the last unit
    computes logits and so reads its parameters.

    A `forward_only` program evaluates: it has no backwards and no optimizer step, and ends with LOSS.
    """

    name: str
    streams: Sequence[Stream]
    placement: tuple[tuple[int, ...], ...]
    microbatches: int
    chunks: int = 1
    slices: int = 1
    forward_only: bool = False
    units: tuple[int, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()
    logits_in_w: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.streams, Columns):
            object.__setattr__(self, "streams", pack(self.streams))

    def __repr__(self) -> str:
        sizes = f"{self.ranks} ranks, {self.stages} stages, {self.microbatches} microbatches"
        return f"<Program {self.name}: {sizes}, hash {self.hash[:12]}>"

    @property
    def columns(self) -> Columns:
        """The streams as arrays."""
        return cast(Columns, self.streams)

    @property
    def ranks(self) -> int:
        return len(self.streams)

    @property
    def total_slices(self) -> int:
        """The number of slices in all microbatches: how many times each stage runs forward."""
        return self.microbatches * self.slices

    @cached_property
    def stages(self) -> int:
        return 1 + max(stage for stages in self.placement for stage in stages)

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """The pipeline stage of every unit."""
        counts = self.units or (1,) * self.stages
        return tuple(stage for stage, count in enumerate(counts) for _ in range(count))

    @cached_property
    def _holders(self) -> dict[int, tuple[int, ...]]:
        holders: dict[int, tuple[int, ...]] = {}
        for rank, stages in enumerate(self.placement):
            for stage in dict.fromkeys(stages):
                holders[stage] = (*holders.get(stage, ()), rank)
        return holders

    def holders(self, stage: int) -> tuple[int, ...]:
        """Pipeline ranks that hold the parameters of a stage."""
        return self._holders.get(stage, ())

    @cached_property
    def lookup(self) -> Lookup:
        """Finds rows of the columns by key."""
        return Lookup(self.columns, self.placement, self.stages, self.total_slices)

    @cached_property
    def compute_rank(self) -> dict[tuple[int, int], int]:
        """(stage, microbatch) -> the rank that computes it."""
        columns = self.columns
        rows = columns.rows_of(IS_FORWARD)
        stage, mb, rank = (column[rows].tolist() for column in (columns.stage, columns.microbatch, columns.rank))
        return dict(zip(zip(stage, mb, strict=True), rank, strict=True))

    @cached_property
    def positions(self) -> tuple[dict[Key, int], ...]:
        """By rank: key -> index of its action in the stream; the first one where a key appears twice."""
        return tuple(map(index_of, self.streams))

    @cached_property
    def names(self) -> tuple[dict[Key, str], ...]:
        """By rank: what drawings and timelines call each instruction."""
        return tuple({key: str(key) for key in index} for index in self.positions)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of everything but the name; equal programs have equal hashes."""
        sizes = (VERSION, self.placement, self.microbatches, self.chunks, self.slices, self.columns.groups)
        rest = ("forward_only",) * self.forward_only + ("units", *self.units) * bool(self.units)
        rest += ("sizes", *self.sizes) * bool(self.sizes) + ("logits_in_w",) * self.logits_in_w
        digest = hashlib.sha256(repr((*sizes, *rest)).encode())
        for column in self.columns.arrays():
            digest.update(column.tobytes())
        return digest.hexdigest()

    def compute(self) -> Program:
        """The compute order: only compute instructions, without peers, slots and waits."""
        columns = self.columns
        rows = columns.rows_of(IS_COMPUTE)
        order = key_columns(np.searchsorted(rows, columns.rank_offsets), *columns.keys(rows))
        return self.with_streams(replace(order, is_second=columns.is_second[rows]))

    def with_streams(self, streams: Sequence[Stream]) -> Program:
        return replace(self, streams=streams)

    def to_arrow(self) -> pa.Table:
        placement = ";".join(",".join(map(str, stages)) for stages in self.placement)
        meta = {"version": VERSION, "name": self.name, "placement": placement}
        meta |= {"microbatches": str(self.microbatches), "chunks": str(self.chunks)}
        meta |= {"slices": str(self.slices)} if self.slices != 1 else {}
        meta |= {"forward_only": "true"} if self.forward_only else {}
        meta |= {"units": ",".join(map(str, self.units))} if self.units else {}
        meta |= {"sizes": ";".join(",".join(map(str, each)) for each in self.sizes)} if self.sizes else {}
        meta |= {"logits_in_w": "true"} if self.logits_in_w else {}
        return arrow.to_table(self.columns).replace_schema_metadata(meta)

    @staticmethod
    def from_arrow(table: pa.Table) -> Program:
        """Raises PentadError when the table is not a program of this version."""
        if (table.schema.metadata or {}).get(b"version") != VERSION.encode() or not table.schema.equals(SCHEMA):
            raise PentadError(
                f"the Arrow table has the columns {table.schema.names}: expected a program, version {VERSION}"
            )
        try:
            program = _from_table(table)
            valid = program.to_arrow().equals(table) and not any(column.null_count for column in table.columns)
        except (ArithmeticError, LookupError, TypeError, ValueError, PentadError):
            valid = False
        if not valid:
            raise PentadError(
                "the Arrow table has the columns of a program but invalid rows: expected what `save` writes"
            )
        return program

    def to_bytes(self) -> bytes:
        return file_bytes(self.to_arrow())

    @staticmethod
    def from_bytes(data: bytes) -> Program:
        """Raises PentadError when `data` is not a program."""
        return Program.from_arrow(read_table(data))

    def __reduce__(self) -> tuple:
        return Program.from_bytes, (self.to_bytes(),)  # Ray ships the Arrow table

    def save(self, path: Path) -> None:
        path.write_bytes(self.to_bytes())

    @staticmethod
    def load(path: Path) -> Program:
        """Raises PentadError when the file is not one that `save` wrote."""
        regular_file(path)
        try:
            program = Program.from_bytes(path.read_bytes())
            _check_sizes(program)
            return program
        except (OSError, PentadError) as error:
            raise PentadError(f"{path} is not a readable program: {error}") from None


def _check_sizes(program: Program) -> None:
    """Raises PentadError for numbers that do not match the streams: allocations are sized by them."""
    columns, held = program.columns, {stage for stages in program.placement for stage in stages}
    if held != set(range(len(held))):
        raise PentadError(f"its placement holds the stages {str(sorted(held))[:60]}: expected 0 to {len(held) - 1}")
    for name in ("microbatches", "chunks", "slices"):
        if not 1 <= getattr(program, name) <= columns.rows:
            found = f"{name} is {getattr(program, name)}"
            raise PentadError(f"{found}: expected 1 to {columns.rows}, the number of its instructions")
    limits = {"stage": program.stages, "peer": program.ranks, "microbatch": max(program.total_slices, columns.rows)}
    for name, limit in limits.items():
        numbers = getattr(columns, name)
        if len(wrong := numbers[(numbers < -1) | (numbers >= limit)]):
            raise PentadError(f"an instruction has {name} {wrong[0]}: expected -1 to {limit - 1}")
    if program.units and (min(program.units) < 1 or sum(program.units) != program.stages):
        raise PentadError(
            f"units is {str(program.units)[:60]}: expected positive numbers whose sum is {program.stages}"
        )
    kinds = {len(each) for each in program.sizes}
    if program.sizes and (len(program.sizes) != program.stages or len(kinds) > 1 or min(map(min, program.sizes)) < 0):
        found = f"sizes is {str(program.sizes)[:60]}"
        raise PentadError(f"{found}: expected as many counts of elements for each of {program.stages} stages")


def _from_table(table: pa.Table) -> Program:
    meta = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    placement = tuple(tuple(map(int, stages.split(","))) for stages in meta["placement"].split(";"))
    streams = arrow.from_table(table, len(placement))
    sizes = int(meta["microbatches"]), int(meta["chunks"]), int(meta.get("slices", "1"))
    units = tuple(map(int, meta["units"].split(","))) if "units" in meta else ()
    kinds = tuple(tuple(map(int, each.split(","))) for each in meta["sizes"].split(";")) if "sizes" in meta else ()
    flags = {name: name in meta for name in ("forward_only", "logits_in_w")}
    return Program(meta["name"], streams, placement, *sizes, units=units, sizes=kinds, **flags)


def index_of(stream: Stream) -> dict[Key, int]:
    """Key -> index of its action in the stream; the first one where a key appears twice."""
    indices: dict[Key, int] = {}
    for index, action in enumerate(stream):
        for part in action.parts:
            indices.setdefault(part.key, index)
    return indices
