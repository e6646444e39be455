"""Schedules that a user writes: a generator function in a Python file, named as in 'path/my.py:my_schedule'.

`docs/custom-schedule.md` builds one in steps. Positions in a rank's stream count from 0.
"""

from __future__ import annotations

import operator
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from typing import Any

from pentad.schedules.generators.custom_file import function_of, is_chunked, mistake, raised
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COMPUTE, Instruction, Op, Overlap, Unit, parse, units_of
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.spec.schedule_spec import ScheduleSpec

MOST_STAGES = 256  # of one rank: no model has as many layers
WANTED = "F(stage, microbatch), B, W or BW, or text such as '2F0'"


def F(stage: int, microbatch: int) -> Instruction:
    """Forward."""
    return Instruction(Op.F, stage, microbatch)


def B(stage: int, microbatch: int) -> Instruction:
    """Backward for the input."""
    return Instruction(Op.B, stage, microbatch)


def W(stage: int, microbatch: int) -> Instruction:
    """Backward for the weights."""
    return Instruction(Op.W, stage, microbatch)


def BW(stage: int, microbatch: int) -> Instruction:
    """Backward for the input and the weights at once."""
    return Instruction(Op.BW, stage, microbatch)


def program(text: str, shape: ScheduleSpec) -> Program:
    """The compute order of the function that `text` names. Stages are where they run, in order of first appearance.

    `shape.chunks` above 1 must be what comes out: stages a rank, or 1 where two ranks hold a stage. Raises PentadError.
    """
    made = placed(text, load(text)(shape), shape.microbatches, lambda rank, at: f"rank {rank} at position {at}")
    if shape.chunks not in (1, made.chunks):
        raise mistake(text, f"chunks is {shape.chunks}, but its stages make {made.chunks}: expected {made.chunks}")
    return made


def load(text: str) -> Callable[[ScheduleSpec], tuple[Stream, ...]]:
    """The streams, by shape, of the function that `text` = 'path/my.py:my_schedule' names.

    It takes (rank, ranks, microbatches), and `chunks` if it has a parameter of that name, and yields the compute
    instructions of one rank. Raises PentadError when there is no such function; so does what is returned when the
    function fails, does not end, or yields anything else. What the user's code prints goes to stderr.
    """
    function = function_of(text)
    chunked = is_chunked(text, function)

    def streams(shape: ScheduleSpec) -> tuple[Stream, ...]:
        def yielded(rank: int) -> Iterator[Any]:
            sizes = {"rank": rank, "ranks": shape.ranks, "microbatches": shape.microbatches}
            return _yielded(text, function, sizes | ({"chunks": shape.chunks} if chunked else {}))

        with redirect_stdout(sys.stderr):
            return tuple(_stream(text, rank, shape.microbatches, yielded(rank)) for rank in range(shape.ranks))

    return streams


def placed(name: str, streams: tuple[Stream, ...], microbatches: int, where: Callable[[int, int], str]) -> Program:
    """A program whose stages are held by the ranks that run them. `where(rank, position)` names a place in words.

    Raises PentadError when a stage below the last one is run nowhere.
    """
    placement = tuple(tuple(dict.fromkeys(part.stage for part in units_of(stream))) for stream in streams)
    held = [stage for stages in placement for stage in stages]
    stages = set(held)
    if stages != set(range(len(stages))):
        missing = next(stage for stage in range(len(stages)) if stage not in stages)
        rank = next(rank for rank, own in enumerate(placement) if max(own) == max(stages))
        at = next(at for at, unit in enumerate(streams[rank]) if max(stages) in [part.stage for part in unit.parts])
        found = f"{where(rank, at)} runs stage {max(stages)}, but nothing runs stage {missing}"
        raise mistake(name, f"{found}: expected every stage from 0 on")
    chunks = max(len(stages) // len(streams), 1) if len(held) == len(stages) else 1
    return Program(name, streams, placement, microbatches, chunks)


def _yielded(text: str, function: Callable[..., Any], sizes: dict[str, int]) -> Iterator[Any]:
    """What the function yields; what it raises, told."""
    rank, count = sizes["rank"], 0
    try:
        made = function(**sizes)
        if isinstance(made, Iterable):
            for given in made:
                yield given
                count += 1
    except (Exception, SystemExit) as error:
        raise mistake(text, f"rank {rank} at position {count} raises {raised(text, error)}") from None
    if not isinstance(made, Iterable):
        raise mistake(text, f"rank {rank} returns {reprlib.repr(made)}: expected a generator (is there no yield?)")


def _stream(text: str, rank: int, microbatches: int, given: Iterator[Any]) -> Stream:
    units: list[Unit] = []
    stages: set[int] = set()
    for one in given:
        try:
            units.append(_unit(one))
        except ValueError as error:
            said = f"rank {rank} at position {len(units)} yields {_shown(one)}: expected {error}"
            raise mistake(text, said) from None
        stages.update(part.stage for part in units[-1].parts)
        most = 8 * microbatches * (len(stages) + 1) + 64
        if len(units) > most:
            sizes = f"{microbatches} microbatches of {len(stages)} stage{'s' * (len(stages) > 1)}"
            raise mistake(text, f"rank {rank} yields more than {most} instructions for {sizes}: expected an end")
        if len(stages) > MOST_STAGES:
            raise mistake(text, f"rank {rank} yields more than {MOST_STAGES} stages: expected an end")
    if not units:
        raise mistake(text, f"rank {rank} yields nothing: expected the instructions of at least one stage")
    return tuple(units)


def _unit(given: Any) -> Unit:
    """Raises ValueError saying what is expected."""
    try:
        unit = parse(given) if isinstance(given, str) else given
    except PentadError:
        raise ValueError(WANTED) from None
    if isinstance(unit, Instruction):
        return _compute(unit)
    if isinstance(unit, Overlap) and all(isinstance(part, Instruction) for part in unit):
        return Overlap(_compute(unit.forward), _compute(unit.backward))
    raise ValueError(WANTED)


def _compute(part: Instruction) -> Instruction:
    if part.op not in COMPUTE or part[3:] != Instruction(Op.F)[3:]:
        raise ValueError(f"{WANTED}: the compiler adds the rest")
    try:
        stage, microbatch = operator.index(part.stage), operator.index(part.microbatch)  # such as numpy's integers
    except TypeError:
        raise ValueError("a stage and a microbatch that are whole numbers") from None
    if min(stage, microbatch) < 0:
        raise ValueError("a stage and a microbatch of at least 0")
    return Instruction(Op(part.op), stage, microbatch)


def _shown(given: Any) -> str:
    """As the user wrote it, were it a compute instruction."""
    if isinstance(given, Instruction):
        return f"{given.op}({given.stage!r}, {given.microbatch!r})" if given.op in COMPUTE else str(given)
    return reprlib.repr(given)
