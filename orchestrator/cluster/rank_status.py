"""What a rank is doing, from its progress file and its instruction streams."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from pentad.schedules.ir.instruction import Action
from pentad.schedules.spec.plan import Plan
from pentad.workers.lanes.progress_file import Progress, read_progress
from pentad.workers.runtime.telemetry import GpuState

Streams = tuple[tuple[Action, ...], ...]  # one rank's, by program of the plan


class Status(NamedTuple):
    """What a rank is doing: `counter` is the index in its stream (-1 between steps), `instruction` that instruction's
    text ('' between steps), and `age` the seconds since it began. `program` is the index, in the plan's programs, of
    the one whose stream it runs; in an evaluation `counter` counts the actions of all rounds. `gpu` is a recent reading
    of its GPU. `leaving` is the notice that its process is about to end, `node_leaving` that its node is; '' without
    one. `waits` and `axis` are as in Progress. `chunks` grows while its process writes, commits or reads a checkpoint.
    """

    generation: int
    step: int
    instruction: str
    age: float
    counter: int = -1
    gpu: GpuState | None = None
    program: int = 0
    leaving: str = ""
    node_leaving: str = ""
    waits: int = -1
    axis: str = ""
    chunks: int = 0


def streams_of(plan: Plan, rank: int) -> Streams:
    """The stream that a rank of the mesh runs in each program of the plan."""
    return tuple(program.streams[plan.mesh.coordinates(rank).pp] for program in plan.programs)


def read_status(progress_file: Path, streams: Streams) -> Status:
    """The status in a progress file of this host, even of a process that is gone."""
    return status_of(read_progress(progress_file), streams)


def status_of(state: Progress, streams: Streams) -> Status:
    stream, age = streams[state.program], time.monotonic() - state.since
    text = instruction_text(stream[state.counter % len(stream)]) if state.counter >= 0 else ""
    where = state.step, text, age, state.counter
    return Status(state.generation, *where, program=state.program, waits=state.waits, axis=state.axis)


def instruction_text(action: Action) -> str:
    """The text of an action without its dependencies, such as '2SEND_F0>3' or '(1F4+2BW0)'."""
    texts = [str(part).partition(" after ")[0] for part in action.parts]
    return texts[0] if len(texts) == 1 else f"({'+'.join(texts)})"
