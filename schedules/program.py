"""A step as data: one instruction stream a pipeline rank, immutable, hashed, an Arrow table on disk and on the wire."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from pentad.schedules.errors import PentadError
from pentad.schedules.instruction import COMPUTE, Instruction, Key, Op, Overlap, Unit, parse_key, units_of

Stream = tuple[Unit, ...]
VERSION = "1"
SCHEMA = pa.schema(
    [
        ("rank", pa.int32()),
        ("index", pa.int32()),  # position in the stream; the halves of an overlapped pair share it
        ("op", pa.string()),
        ("stage", pa.int32()),
        ("microbatch", pa.int32()),
        ("lane", pa.string()),
        ("peer", pa.int32()),
        ("group", pa.string()),
        ("slot", pa.int32()),
        ("waits", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True)
class Program:
    """What every pipeline rank does in one step.

    `streams[rank]` is a tuple of instructions; `placement[rank]` the stages that rank holds (a DualPipe rank holds a
    stage and its mirror); `chunks` the number of parts that a rank's own layers are cut into; `slices` the number of
    equal parts that a microbatch's sequences are cut into. What an instruction calls its microbatch is a piece:
    microbatch x slices + slice. Replicas along the other axes of the mesh run the same streams, so ranks here are
    pipeline ranks.
    """

    name: str
    streams: tuple[Stream, ...]
    placement: tuple[tuple[int, ...], ...]
    microbatches: int
    chunks: int = 1
    slices: int = 1

    @property
    def ranks(self) -> int:
        return len(self.streams)

    @cached_property
    def stages(self) -> int:
        return 1 + max(stage for stages in self.placement for stage in stages)

    @property
    def pieces(self) -> int:
        return self.microbatches * self.slices

    def holders(self, stage: int) -> tuple[int, ...]:
        """Pipeline ranks that hold a stage's parameters."""
        return tuple(rank for rank, stages in enumerate(self.placement) if stage in stages)

    @cached_property
    def home(self) -> dict[tuple[int, int], int]:
        """(stage, microbatch) -> the rank that runs it."""
        return {
            (part.stage, part.microbatch): rank
            for rank, stream in enumerate(self.streams)
            for part in units_of(stream)
            if part.op is Op.F
        }

    @cached_property
    def positions(self) -> tuple[dict[Key, int], ...]:
        """`index_of` every stream."""
        return tuple(map(index_of, self.streams))

    @cached_property
    def hash(self) -> str:
        """SHA-256 over placement and streams; equal programs have equal hashes."""
        digest = hashlib.sha256(repr((VERSION, self.placement, self.microbatches, self.chunks, self.slices)).encode())
        for stream in self.streams:
            digest.update("\n".join(map(str, stream)).encode() + b"\0")
        return digest.hexdigest()

    def compute(self) -> Program:
        """The same program with compute instructions only."""
        streams = tuple(tuple(bare(unit) for unit in s if unit.parts[0].op in COMPUTE) for s in self.streams)
        return self.with_streams(streams)

    def with_streams(self, streams: tuple[Stream, ...]) -> Program:
        return Program(self.name, streams, self.placement, self.microbatches, self.chunks, self.slices)

    def to_arrow(self) -> pa.Table:
        rows = [
            (rank, index, part.op.value, part.stage, part.microbatch, part.lane, part.peer, part.group, part.slot,
             [str(key) for key in part.waits])
            for rank, stream in enumerate(self.streams)
            for index, unit in enumerate(stream)
            for part in unit.parts
        ]  # fmt: skip
        columns = list(zip(*rows, strict=True)) or [()] * len(SCHEMA)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
        placement = ";".join(",".join(map(str, stages)) for stages in self.placement)
        meta = {"version": VERSION, "name": self.name, "placement": placement}
        meta |= {"microbatches": str(self.microbatches), "chunks": str(self.chunks), "slices": str(self.slices)}
        return pa.table(arrays, schema=SCHEMA).replace_schema_metadata(meta)

    @staticmethod
    def from_arrow(table: pa.Table) -> Program:
        """Raises PentadError when the table is not a program of this version."""
        if (table.schema.metadata or {}).get(b"version") != VERSION.encode() or not table.schema.equals(SCHEMA):
            raise PentadError(f"the Arrow table is not a program of version {VERSION}: columns {table.schema.names}")
        try:
            program = _read(table)
            whole = program.to_arrow().equals(table) and not any(column.null_count for column in table.columns)
        except (ArithmeticError, LookupError, TypeError, ValueError, PentadError):
            whole = False
        if not whole:
            raise PentadError("the Arrow table has the columns of a program, but its rows are not those of one")
        return program

    def to_bytes(self) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, self.to_arrow().schema) as writer:
            writer.write_table(self.to_arrow())
        return sink.getvalue().to_pybytes()

    @staticmethod
    def from_bytes(data: bytes) -> Program:
        """Raises PentadError when these are not the bytes of a program."""
        try:
            table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
            table.validate(full=True)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise PentadError(f"{len(data)} bytes are not a program (Arrow file): {error}") from None
        return Program.from_arrow(table)

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


def _read(table: pa.Table) -> Program:
    meta = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    placement = tuple(tuple(map(int, stages.split(","))) for stages in meta["placement"].split(";"))
    streams: list[list[list[Instruction]]] = [[] for _ in placement]
    columns = [column.to_pylist() for column in table.columns]
    for rank, index, op, stage, mb, _, peer, group, slot, waits in zip(*columns, strict=True):
        part = Instruction(Op(op), stage, mb, peer, group, slot, tuple(map(parse_key, waits)))
        if index == len(streams[rank]):
            streams[rank].append([part])
        else:
            streams[rank][index].append(part)
    units = tuple(tuple(Overlap(*u) if len(u) == 2 else u[0] for u in stream) for stream in streams)
    sizes = int(meta["microbatches"]), int(meta["chunks"]), int(meta.get("slices", "1"))
    return Program(meta["name"], units, placement, *sizes)


def bare(unit: Unit) -> Unit:
    """A compute unit without what lowering added."""
    parts = [Instruction(*part.key) for part in unit.parts]
    return Overlap(*parts) if len(parts) == 2 else parts[0]


def index_of(stream: Stream) -> dict[Key, int]:
    """Key -> position in the stream; the first one where a key appears twice."""
    found: dict[Key, int] = {}
    for index, unit in enumerate(stream):
        for part in unit.parts:
            found.setdefault(part.key, index)
    return found
