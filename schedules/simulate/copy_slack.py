"""How long copies to and from the host may take before compute waits for them, given the deadlines of a program."""

from __future__ import annotations

from typing import NamedTuple

from pentad.schedules.ir.instruction import COMPUTE, Key, Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate

_COPIES = (Op.OFFLOAD, Op.RELOAD)
STEPS = 20  # of the bisection


class _Copy(NamedTuple):
    """A copy that at full length takes `seconds` of its lane, between `release` and `deadline`."""

    release: float
    deadline: float
    seconds: float


def hidden_share(program: Program, costs: Costs) -> list[float]:
    """By rank, the largest share (0 to 1) such that no compute instruction waits if every copy takes that share of its
    time.

    An OFFLOAD may begin after its forward and must end before the instruction that takes over its memory, which in a
    pipeline comes long after; a RELOAD before the backward or the recomputation that reads it. The copies of a lane run
    one after another.
    """
    without = costs.with_offload((0.0,) * program.stages)
    spans = {(span.rank, span.name): span for span in simulate(program, without).spans}
    found = []
    for rank, stream in enumerate(program.streams):
        deadlines = dict[Key, float]()  # the first start of a compute instruction that waits for a copy
        for part in instructions_of(stream):
            for key in part.waits if part.op in COMPUTE or part.op is Op.RECOMPUTE else ():
                if key.op in _COPIES:
                    deadlines.setdefault(key, spans[rank, str(part.key)].start)
        lanes: dict[Op, list[_Copy]] = {op: [] for op in _COPIES}
        for part in instructions_of(stream):
            if part.op in _COPIES:
                release = max(spans[rank, str(key)].end for key in part.waits)
                lanes[part.op].append(_Copy(release, deadlines[part.key], costs.seconds(part)))
        found.append(min(map(_share, lanes.values())))
    return found


def _share(copies: list[_Copy]) -> float:
    if _is_in_time(copies, 1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _is_in_time(copies, middle) else (low, middle)
    return low


def _is_in_time(copies: list[_Copy], share: float) -> bool:
    now = 0.0
    for copy in copies:
        now = max(now, copy.release) + share * copy.seconds
        if now > copy.deadline + 1e-9 * copy.seconds:
            return False
    return True
