"""A step as data: one instruction stream a pipeline rank, immutable, hashed, an Arrow table on disk and on the wire."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast, overload

import numpy as np
import pyarrow as pa

from pentad.schedules.ir import arrow
from pentad.schedules.ir.arrow import SCHEMA, VERSION
from pentad.schedules.ir.columns import CODE, Columns, Stream, pack
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Key, Op
from pentad.schedules.ir.lookup import IS_COMPUTE, IS_REDUCTION, Lookup

__all__ = ["SCHEMA", "VERSION", "Program", "Stream", "Streams", "index_of"]


class Streams(Sequence[Stream]):
    """The streams of all ranks, kept as columns; a rank's is made into instructions when it is first looked at."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._made: list[Stream | None] = [None] * columns.ranks

    def __len__(self) -> int:
        return self.columns.ranks

    @overload
    def __getitem__(self, rank: int) -> Stream: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[Stream, ...]: ...
    def __getitem__(self, rank: int | slice) -> Stream | tuple[Stream, ...]:
        if isinstance(rank, slice):
            return tuple(self[one] for one in range(*rank.indices(len(self))))
        made = self._made[rank]
        if made is None:
            made = self._made[rank] = self.columns.decode(rank % len(self))
        return made

    def __iter__(self) -> Iterator[Stream]:
        return (self[rank] for rank in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Streams):
            return self.columns == other.columns
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True)
class Program:
    """What every pipeline rank does in one step.

    `streams[rank]` is a tuple of instructions; `placement[rank]` the stages that rank holds (a DualPipe rank holds a
    stage and its mirror); `chunks` the number of parts that a rank's own layers are cut into. Replicas along the other
    axes of the mesh run the same streams, so ranks here are pipeline ranks.

    With `slices` above 1 the sequences of a microbatch go through the pipeline in so many pieces, and what an
    instruction calls its microbatch is the piece: microbatch x slices + slice (Seq1F1B, arXiv 2406.03488).
    """

    name: str
    streams: Sequence[Stream]
    placement: tuple[tuple[int, ...], ...]
    microbatches: int
    chunks: int = 1
    slices: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.streams, Streams):
            object.__setattr__(self, "streams", Streams(pack(self.streams)))

    @property
    def columns(self) -> Columns:
        """The streams as arrays."""
        return cast(Streams, self.streams).columns

    @property
    def ranks(self) -> int:
        return len(self.streams)

    @property
    def pieces(self) -> int:
        """What goes through each stage: the slices of all microbatches."""
        return self.microbatches * self.slices

    @cached_property
    def stages(self) -> int:
        return 1 + max(stage for stages in self.placement for stage in stages)

    @cached_property
    def _holders(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for rank, stages in enumerate(self.placement):
            for stage in dict.fromkeys(stages):
                found[stage] = (*found.get(stage, ()), rank)
        return found

    def holders(self, stage: int) -> tuple[int, ...]:
        """Pipeline ranks that hold a stage's parameters."""
        return self._holders.get(stage, ())

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        """By stage, in how many parts its gradients are reduced, if they are."""
        reductions = self.columns.rows_of(IS_REDUCTION)
        most = np.ones(self.stages, int)
        np.maximum.at(most, self.columns.stage[reductions], self.columns.microbatch[reductions] + 1)
        return tuple(most.tolist())

    @cached_property
    def lookup(self) -> Lookup:
        """Rows of the columns by what names them."""
        return Lookup(self.columns, self.placement, self.stages, self.pieces)

    @cached_property
    def home(self) -> dict[tuple[int, int], int]:
        """(stage, microbatch) -> the rank that runs it."""
        columns = self.columns
        at = np.flatnonzero(columns.op == CODE[Op.F])
        stage, mb, rank = (column[at].tolist() for column in (columns.stage, columns.microbatch, columns.rank))
        return dict(zip(zip(stage, mb, strict=True), rank, strict=True))

    @cached_property
    def positions(self) -> tuple[dict[Key, int], ...]:
        """`index_of` every stream."""
        return tuple(map(index_of, self.streams))

    @cached_property
    def hash(self) -> str:
        """SHA-256 over placement and columns; equal programs have equal hashes."""
        sizes = (VERSION, self.placement, self.microbatches, self.chunks, self.slices, self.columns.groups)
        digest = hashlib.sha256(repr(sizes).encode())
        for column in self.columns.arrays():
            digest.update(column.tobytes())
        return digest.hexdigest()

    def compute(self) -> Program:
        """The same program with compute instructions only, without what lowering added to them."""
        columns = self.columns
        rows = columns.rows_of(IS_COMPUTE)
        return self.with_columns(columns.bare(np.searchsorted(rows, columns.first), rows))

    def with_streams(self, streams: Sequence[Stream]) -> Program:
        return replace(self, streams=streams)

    def with_columns(self, columns: Columns) -> Program:
        return replace(self, streams=Streams(columns))

    def to_arrow(self) -> pa.Table:
        placement = ";".join(",".join(map(str, stages)) for stages in self.placement)
        meta = {"version": VERSION, "name": self.name, "placement": placement}
        meta |= {"microbatches": str(self.microbatches), "chunks": str(self.chunks)}
        meta |= {"slices": str(self.slices)} if self.slices != 1 else {}
        return arrow.write(self.columns).replace_schema_metadata(meta)

    @staticmethod
    def from_arrow(told: pa.Table) -> Program:
        """Raises PentadError when the table is not a program of this version."""
        if (told.schema.metadata or {}).get(b"version") != VERSION.encode() or not told.schema.equals(SCHEMA):
            raise PentadError(f"the Arrow table is not a program of version {VERSION}: columns {told.schema.names}")
        try:
            program = _read(told)
            whole = program.to_arrow().equals(told) and not any(column.null_count for column in told.columns)
        except (ArithmeticError, LookupError, TypeError, ValueError, PentadError):
            whole = False
        if not whole:
            raise PentadError("the Arrow table has the columns of a program, but its rows are not those of one")
        return program

    def to_bytes(self) -> bytes:
        sink = pa.BufferOutputStream()
        made = self.to_arrow()
        with pa.ipc.new_file(sink, made.schema) as writer:
            writer.write_table(made)
        return sink.getvalue().to_pybytes()

    @staticmethod
    def from_bytes(data: bytes) -> Program:
        """Raises PentadError when these are not the bytes of a program."""
        try:
            told = pa.ipc.open_file(pa.BufferReader(data)).read_all()
            told.validate(full=True)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise PentadError(f"{len(data)} bytes are not a program (Arrow file): {error}") from None
        return Program.from_arrow(told)

    def __reduce__(self) -> tuple:
        return Program.from_bytes, (self.to_bytes(),)  # the wire format is the Arrow table, wherever Ray copies it

    def save(self, path: Path) -> None:
        path.write_bytes(self.to_bytes())

    @staticmethod
    def load(path: Path) -> Program:
        """Raises PentadError when the file is not one that `save` wrote."""
        try:
            return Program.from_bytes(path.read_bytes())
        except (OSError, PentadError) as error:
            raise PentadError(f"{path} is not a readable program: {error}") from None


def _read(told: pa.Table) -> Program:
    meta = {key.decode(): value.decode() for key, value in told.schema.metadata.items()}
    placement = tuple(tuple(map(int, stages.split(","))) for stages in meta["placement"].split(";"))
    streams = Streams(arrow.read(told, len(placement)))
    sizes = int(meta["microbatches"]), int(meta["chunks"]), int(meta.get("slices", "1"))
    return Program(meta["name"], streams, placement, *sizes)


def index_of(stream: Stream) -> dict[Key, int]:
    """Key -> position in the stream; the first one where a key appears twice."""
    found: dict[Key, int] = {}
    for index, unit in enumerate(stream):
        for part in unit.parts:
            found.setdefault(part.key, index)
    return found
