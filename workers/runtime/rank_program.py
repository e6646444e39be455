"""What one rank runs of a program, and what the executor looks up in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from pentad.schedules.ir.instruction import SENDS, Key, Op, instructions_of
from pentad.schedules.ir.program import Stream
from pentad.schedules.passes.optimizer_pass import last_reductions
from pentad.schedules.passes.send_lifetimes import ended_sends
from pentad.schedules.spec.plan import Plan


@dataclass(frozen=True)
class RankProgram:
    """One rank's stream of program `number` of the plan, and what the executor looks up in it. The rows of a batch fill
    `microbatches` microbatches; the program may have more."""

    number: int
    microbatches: int
    stream: Stream
    forward_only: bool
    sources: dict[Key, Key]
    sent: frozenset[Key]  # whose results are sent
    ended_sends: dict[Key, tuple[Key, ...]]
    last_reductions: frozenset[Key]

    @staticmethod
    def of(plan: Plan, number: int, rank: int) -> RankProgram:
        """The stream of a rank of the mesh in program `number` of the plan."""
        program = plan.programs[number]
        pp = plan.mesh.coordinates(rank).pp
        stream, microbatches = program.streams[pp], min(program.microbatches, plan.batch.microbatches)
        sources = resolve_inputs(stream)
        sent = frozenset(source for key, source in sources.items() if key.op in SENDS)
        given = number, microbatches, stream, program.forward_only, sources, sent, ended_sends(program, pp)
        return RankProgram(*given, last_reductions(stream))


class IssuedStep(NamedTuple):
    """The program of a step, the data source of each row of its global batch, and the row in each slot (see
    `Batch`)."""

    program: RankProgram
    row_sources: np.ndarray
    rows_by_slot: np.ndarray

    def by_row(self, by_slot: torch.Tensor) -> torch.Tensor:
        """Reorders [batch size] values from slots to rows."""
        found = torch.empty_like(by_slot)
        found[torch.from_numpy(self.rows_by_slot)] = by_slot
        return found


def resolve_inputs(stream: Stream) -> dict[Key, Key]:
    """Maps every compute instruction and send that has an input to the instruction of the stream that produces it: a
    receive, or this rank's own compute of the neighbouring stage. The ends of the model have no input."""
    keys, found = {part.key for part in instructions_of(stream)}, {}
    for part in instructions_of(stream):
        _, stage, index = part.key
        candidates: tuple[Key, ...] = ()
        if part.op is Op.F:
            candidates = Key(Op.RECV_F, stage, index), Key(Op.F, stage - 1, index)
        elif part.op in (Op.B, Op.BW):
            candidates = Key(Op.RECV_B, stage, index), Key(Op.B, stage + 1, index), Key(Op.BW, stage + 1, index)
        elif part.op in SENDS:
            candidates = part.waits[:1]
        source = next((key for key in candidates if key in keys), None)
        if source is not None:
            found[part.key] = source
    return found
