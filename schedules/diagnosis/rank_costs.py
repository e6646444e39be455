"""The costs of instructions on the ranks of a pipeline, from every rank's times in some steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.ir.instruction import RECEIVES
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.timeline import COMPUTE
from pentad.schedules.spec.mesh import Mesh


def costs_of_ranks(program: Program, mesh: Mesh, steps: Iterable[Sequence[RankTime]]) -> Costs | None:
    """Costs from the medians of these steps, without time for which ranks were starved: each stage costs what it does
    on the fastest rank that holds it, and a pipeline rank's `slowdown` is how many times as long its slowest replica
    takes. None if the time of an op is missing."""
    counts = [
        Counter((part.op.value, part.stage) for action in stream for part in action.parts) for stream in program.streams
    ]
    seconds = dict[tuple[int, str, int], list[float]]()  # by rank, op and stage: of each step
    for each in (each for step in steps for each in step):
        seconds.setdefault((each.rank, each.op, each.stage), []).append(each.seconds - each.starved)
    work = [dict[tuple[str, int], float]() for _ in range(mesh.size)]  # of one instruction, by rank
    for (rank, op, stage), values in seconds.items():
        if count := counts[mesh.coordinates(rank).pp][op, stage]:
            work[rank][op, stage] = median(values) / count
    least = dict[tuple[str, int], float]()
    for its in work:
        least |= {key: min(value, least.get(key, value)) for key, value in its.items()}

    def of(op: str) -> tuple[float, ...]:
        """Seconds by stage; a BW counts as half B and half W."""
        half = 0.5 if op in ("B", "W") else 0.0
        return tuple(least.get((op, stage), half * least.get(("BW", stage), 0.0)) for stage in range(program.stages))

    forward, backward, weight, recompute = map(of, ("F", "B", "W", "RECOMPUTE"))
    if not all((*forward, *backward, *weight)):
        return None
    slowdown = [1.0] * program.ranks
    for rank, its in enumerate(work):
        pp = mesh.coordinates(rank).pp
        total = {key: count for key, count in counts[pp].items() if key[0] in COMPUTE and key in its}
        usual = sum(count * least[key] for key, count in total.items())
        slowdown[pp] = max(slowdown[pp], sum(count * its[key] for key, count in total.items()) / usual)
    transfers = [seconds for (op, _), seconds in least.items() if op in RECEIVES]
    return Costs(
        *(forward, backward, weight),
        transfer=median(transfers) if transfers else 0.0,
        slowdown=tuple(slowdown),
        recompute=recompute if any(recompute) else (),
    )
