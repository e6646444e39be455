"""What a plan's ranks send each other in a step, for the page's picture of the mesh."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pentad.orchestrator.planning.comm_volume import comm_volume
from pentad.schedules.ir.instruction import SENDS, instructions_of
from pentad.schedules.spec.plan import Plan


def data_flow(plan: Plan) -> dict[str, Any]:
    """The planned `sends` of every pipeline rank to others in its pipeline, and its `collectives` along each other
    axis, each with their count and bytes per step."""
    sends, collectives = [], []
    for pp, stream in enumerate(plan.program.streams):
        volume = comm_volume(plan, plan.mesh.move(0, pp=pp))
        each = {kind: found.bytes // found.operations for (axis, kind), found in volume.items() if axis == "pp"}
        counts = Counter((part.op, part.peer) for part in instructions_of(stream) if part.op in SENDS)
        for (op, peer), count in sorted(counts.items()):
            sends.append({"from": pp, "to": peer, "op": op.value, "count": count, "bytes": count * each[op.value]})
        for (axis, kind), found in sorted(volume.items()):
            if axis != "pp":
                facts = {"axis": axis, "kind": kind, "count": found.operations, "bytes": found.bytes}
                collectives.append({"pp": pp, **facts})
    return {"sends": sends, "collectives": collectives}
