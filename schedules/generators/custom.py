"""Custom schedules: a generator function in the user's Python file, named as in 'path/my.py:my_schedule'.

`docs/custom-schedule.md` builds one step by step.
"""

from __future__ import annotations

import inspect
import operator
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from functools import partial
from typing import Any

from pentad.schedules.generators.user_file import SCHEDULE, describe_error, load_function, user_error
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COMPUTE, Action, Instruction, Op, Overlap, instructions_of, parse
from pentad.schedules.ir.program import Program, Stream

MAX_STAGES = 256  # per rank: no model has as many layers
EXPECTED = "F(stage, microbatch), B, W or BW, or text such as '2F0'"


F = partial(Instruction, Op.F)  # forward: F(stage, microbatch)
B = partial(Instruction, Op.B)  # backward for the input
W = partial(Instruction, Op.W)  # backward for the weights
BW = partial(Instruction, Op.BW)  # both in one


def program(text: str, ranks: int, microbatches: int, chunks: int | None = None) -> Program:
    """The compute order of the function that `text` names.

    The function takes (rank, ranks, microbatches) and optionally `chunks`; it yields the compute instructions of one
    rank. Without `chunks` its own default is used, or 1. A rank holds the stages that it runs, in order of appearance.
    Raises PentadError when there is no such function, when it fails, does not end or yields anything else, and when its
    stages do not make the given `chunks` per rank (1 if two ranks hold a stage).
    """
    generate = _bind(text, load_function(text), {} if chunks is None else {"chunks": chunks})
    with redirect_stdout(sys.stderr):
        streams = tuple(_stream(text, rank, microbatches, generate(rank, ranks, microbatches)) for rank in range(ranks))
    made = with_inferred_placement(text, streams, microbatches, lambda rank, at: f"rank {rank} at position {at}")
    if chunks not in (None, made.chunks):
        raise user_error(text, f"chunks is {chunks}: expected {made.chunks}, from the stages that it runs")
    return made


def with_inferred_placement(
    name: str, streams: tuple[Stream, ...], microbatches: int, describe: Callable[[int, int], str]
) -> Program:
    """A program whose ranks hold the stages that they run. `describe(rank, index)` names a place in a stream.

    Raises PentadError when no rank runs some stage below the last one.
    """
    placement = tuple(tuple(dict.fromkeys(part.stage for part in instructions_of(stream))) for stream in streams)
    held = [stage for stages in placement for stage in stages]
    stages = set(held)
    if stages != set(range(len(stages))):
        last, missing = max(stages), min(set(range(len(stages))) - stages)
        rank = next(rank for rank, own in enumerate(placement) if last in own)
        index = next(at for at, action in enumerate(streams[rank]) if last in [part.stage for part in action.parts])
        found = f"{describe(rank, index)} runs stage {last}, but nothing runs stage {missing}"
        raise user_error(name, f"{found}: expected every stage from 0 to the last one")
    chunks = max(len(stages) // len(streams), 1) if len(held) == len(stages) else 1
    return Program(name, streams, placement, microbatches, chunks)


def _bind(text: str, function: Callable[..., Any], options: dict[str, int]) -> Callable[[int, int, int], Iterator[Any]]:
    """What the function yields for (rank, ranks, microbatches); its exceptions become PentadErrors."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise user_error(text, f"its parameters are unknown: expected a function {SCHEDULE.parameters}") from None
    parameter = signature.parameters.get("chunks")
    if parameter is None:
        options = {}
    elif parameter.default is inspect.Parameter.empty:
        options = {"chunks": 1} | options
    try:
        signature.bind(rank=0, ranks=1, microbatches=1, **options)
    except TypeError:
        found = f"its parameters are ({', '.join(signature.parameters)})"
        raise user_error(text, f"{found}: expected {SCHEDULE.parameters} and optionally chunks") from None

    def generate(rank: int, ranks: int, microbatches: int) -> Iterator[Any]:
        count = 0
        try:
            result = function(rank=rank, ranks=ranks, microbatches=microbatches, **options)
            if isinstance(result, Iterable):
                for value in result:
                    yield value
                    count += 1
        except (Exception, SystemExit) as error:
            raise user_error(text, f"rank {rank} at position {count} raises {describe_error(text, error)}") from None
        if not isinstance(result, Iterable):
            found = f"rank {rank} returns {reprlib.repr(result)}"
            raise user_error(text, f"{found}: expected a generator (is there no yield?)")

    return generate


def _stream(text: str, rank: int, microbatches: int, values: Iterator[Any]) -> Stream:
    actions: list[Action] = []
    stages: set[int] = set()
    for value in values:
        try:
            actions.append(_action(value))
        except ValueError as error:
            found = f"rank {rank} at position {len(actions)} yields {_shown(value)}"
            raise user_error(text, f"{found}: expected {error}") from None
        stages.update(part.stage for part in actions[-1].parts)
        most = 8 * microbatches * (len(stages) + 1) + 64
        if len(actions) > most:
            sizes = f"{microbatches} microbatches of {len(stages)} stage{'s' * (len(stages) > 1)}"
            raise user_error(text, f"rank {rank} yields more than {most} instructions for {sizes}: expected an end")
        if len(stages) > MAX_STAGES:
            raise user_error(text, f"rank {rank} yields more than {MAX_STAGES} stages: expected an end")
    if not actions:
        raise user_error(text, f"rank {rank} yields nothing: expected the instructions of at least one stage")
    return tuple(actions)


def _action(value: Any) -> Action:
    """Raises ValueError with what is expected."""
    try:
        action = parse(value) if isinstance(value, str) else value
    except PentadError:
        raise ValueError(EXPECTED) from None
    if isinstance(action, Instruction):
        return _compute(action)
    if isinstance(action, Overlap) and all(isinstance(part, Instruction) for part in action):
        return Overlap(_compute(action.forward), _compute(action.backward))
    raise ValueError(EXPECTED)


def _compute(part: Instruction) -> Instruction:
    if part.op not in COMPUTE or part[3:] != Instruction(Op.F)[3:]:
        raise ValueError(f"{EXPECTED} (the compiler adds all other instructions and fields)")
    try:
        stage, microbatch = operator.index(part.stage), operator.index(part.microbatch)  # NumPy integers too
    except TypeError:
        raise ValueError("a stage and a microbatch that are integers") from None
    if min(stage, microbatch) < 0:
        raise ValueError("a stage and a microbatch of at least 0")
    return Instruction(Op(part.op), stage, microbatch)


def _shown(value: Any) -> str:
    """A compute instruction as the user wrote it."""
    if isinstance(value, Instruction):
        return f"{value.op}({value.stage!r}, {value.microbatch!r})" if value.op in COMPUTE else str(value)
    return reprlib.repr(value)
