"""Helpers shared by test_memory_passes.py and other tests."""

from __future__ import annotations

from pentad.schedules.ir.instruction import Instruction, Key
from pentad.schedules.ir.program import Program


def drop(program: Program, rank: int, key: Key) -> Program:
    streams = list(program.streams)
    streams[rank] = tuple(
        u._replace(waits=tuple(w for w in u.waits if w != key)) if isinstance(u, Instruction) else u
        for u in streams[rank]
        if u.key != key
    )
    return program.with_streams(tuple(streams))
