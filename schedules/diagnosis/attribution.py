"""Where the time of each rank's step went: parts in integer nanoseconds that add up to the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pentad.schedules.diagnosis.step_view import BETWEEN_STAGES, COPIES, HOST, LATE, PARAMETERS, StepView
from pentad.schedules.ir.instruction import COMPUTE, Instruction, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.mesh import Mesh, to_mesh_ranks

STARVED = "starved"
PARTS = {
    "compute": "forward, backward and recomputation",
    "inside layers": "communication of tp, cp and ep that compute waits for",
    BETWEEN_STAGES: "activations and gradients on their way between stages",
    PARAMETERS: "gathers of parameters, reductions of gradients and of their norm",
    "schedule bubble": "waiting for other stages, as the schedule has it at these costs",
    LATE: "waiting for other ranks beyond that",
    "optimizer": "the update",
    COPIES: "activations on their way from and to host memory",
    "data": "waiting for the loader",
    STARVED: "ready to run, while other processes had the cores",
    HOST: "between instructions: what could run had not been issued",
}
FIRST_START = 0  # of a step, in nanoseconds


class LayerWait(NamedTuple):
    """Seconds of a step that a rank's compute waited for communication inside layers, and how many of these were spent
    waiting for a late peer."""

    seconds: float = 0.0
    late: float = 0.0


class Starved(NamedTuple):
    """Seconds for which a rank was ready to run while other processes had the cores: during compute, and between
    instructions."""

    compute: float = 0.0
    between: float = 0.0


@dataclass(frozen=True)
class RankStep:
    """One rank's step: nanoseconds for every part in PARTS."""

    rank: int
    parts: dict[str, int]

    @property
    def nanoseconds(self) -> int:
        return sum(self.parts.values())


class Measured(NamedTuple):
    """What is known of a step besides its spans, by rank: when it began (on the timeline's clock; missing: at its first
    start), the seconds that the host waited for data, the waits inside layers, and how long it was starved."""

    began: Mapping[int, float] = {}
    data: Mapping[int, float] = {}
    layers: Mapping[int, LayerWait] = {}
    starved: Mapping[int, Starved] = {}


NOTHING_ELSE = Measured()


def attribute(
    program: Program, mesh: Mesh, timeline: Timeline, costs: Costs, measured: Measured = NOTHING_ELSE
) -> tuple[RankStep, ...]:
    """The parts of one step of a run, by rank of the mesh. `costs` are those of its instructions without waiting:
    simulating the program at them gives each rank's schedule bubble. Raises PentadError if the step is not complete."""
    ideal = StepView(program, mesh, to_mesh_ranks(simulate(program, costs), mesh))
    view = StepView(program, mesh, timeline)
    return tuple(_rank_step(view, ideal, rank, measured) for rank in range(mesh.size))


def mean_parts(steps: tuple[RankStep, ...]) -> dict[str, float]:
    """Seconds by part, on average over the ranks."""
    return {part: sum(step.parts[part] for step in steps) / len(steps) / 1e9 for part in PARTS}


def part_of(part: Instruction) -> str:
    """The part that a compute-lane instruction belongs to."""
    if part.op in COMPUTE or part.op is Op.RECOMPUTE:
        return "compute"
    return PARAMETERS if part.op is Op.FREE else "optimizer"


def _rank_step(view: StepView, ideal: StepView, rank: int, measured: Measured) -> RankStep:
    begin = FIRST_START
    if rank in measured.began:
        begin = min(round((measured.began[rank] - view.zero) * 1e9), view.first_start(rank))
    parts = _sums(view, rank, begin, round(measured.data.get(rank, 0.0) * 1e9))
    bubble = min(parts[LATE], _sums(ideal, rank, FIRST_START, 0)[LATE])
    parts["schedule bubble"], parts[LATE] = bubble, parts[LATE] - bubble
    wait = measured.layers.get(rank, LayerWait())
    seconds = min(parts["compute"], round(wait.seconds * 1e9))
    late = min(seconds, round(wait.late * 1e9))
    parts["compute"] -= seconds
    parts["inside layers"] += seconds - late
    parts[LATE] += late
    starved = measured.starved.get(rank, Starved())
    for part, lost in (("compute", starved.compute), (HOST, starved.between)):
        taken = min(parts[part], round(lost * 1e9))
        parts[part] -= taken
        parts[STARVED] += taken
    return RankStep(rank, parts)


def _sums(view: StepView, rank: int, begin: int, data: int) -> dict[str, int]:
    parts = dict.fromkeys(PARTS, 0)
    for number, busy in enumerate(view.busy(rank, begin)):
        idle = dict(busy.idle)
        if number == 0:  # the loader delivers before the first instruction
            parts["data"] += (waited := min(data, idle.get(HOST, 0)))
            idle[HOST] = idle.get(HOST, 0) - waited
        for kind, length in idle.items():
            parts[kind] += length
        parts[part_of(busy.action.parts[0])] += busy.end - busy.start
    return parts
