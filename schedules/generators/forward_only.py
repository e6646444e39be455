"""The compute order of an evaluation: forwards only, on the placement of a training program."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush

from pentad.schedules.ir.instruction import Instruction, Op
from pentad.schedules.ir.program import Program


def forward_only(program: Program) -> Program:
    """Every stage runs F of every microbatch where `program` does, so DualPipe's mirrors share the microbatches as in
    training.

    Greedy list scheduling at equal costs: among the forwards whose input is available, an idle rank runs the one of the
    deepest stage, which frees its input soonest, and of those the first microbatch.
    """
    rank_of, slices = program.compute_rank, program.slices
    streams: list[list[Instruction]] = [[] for _ in range(program.ranks)]
    ready: dict[int, list[tuple[int, int]]] = {}  # by rank, a heap of (-stage, microbatch)
    missing = {at: (at[0] > 0) + (at[1] % slices > 0) for at in rank_of}
    for (stage, microbatch), count in missing.items():
        if count == 0:
            heappush(ready.setdefault(rank_of[stage, microbatch], []), (-stage, microbatch))
    while ready:
        done = []
        for rank in sorted(ready):
            stage, microbatch = heappop(ready[rank])
            streams[rank].append(Instruction(Op.F, -stage, microbatch))
            done.append((-stage, microbatch))
        ready = {rank: waiting for rank, waiting in ready.items() if waiting}
        for stage, microbatch in done:
            following = [(stage + 1, microbatch)] + [(stage, microbatch + 1)] * ((microbatch + 1) % slices > 0)
            for at in filter(missing.__contains__, following):
                missing[at] -= 1
                if missing[at] == 0:
                    heappush(ready.setdefault(rank_of[at], []), (-at[0], at[1]))
    return replace(program, name=f"{program.name}-forward", streams=tuple(map(tuple, streams)), forward_only=True)
