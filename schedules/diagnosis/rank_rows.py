"""Rank times as the rows of a heat map."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.draw.heat_map import RankRow, svg_heat_map
from pentad.schedules.draw.palette import ordered_ops
from pentad.schedules.simulate.timeline import COMPUTE
from pentad.schedules.spec.mesh import LAYER_AXES, Mesh

SHOWN = (*COMPUTE, "STEP")  # ops whose time depends on the rank's own speed


def svg_rank_times(times: Sequence[RankTime], mesh: Mesh, *, title: str) -> str:
    """The SVG text of a figure that compares every rank of a mesh with those that hold the same stages; '' if no rank
    has such peers, or there are no times."""
    times = [each for each in times if each.rank < mesh.size and each.op in SHOWN]
    peers = {rank: mesh.group(("dp", *LAYER_AXES), rank) for rank in range(mesh.size)}
    if not times or len(peers[0]) == 1:
        return ""
    work: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))  # by step, then rank
    by_op: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))  # all steps
    for each in times:
        by_op[each.op][each.rank].append(each.own)
        if each.op in COMPUTE:
            work[each.step][each.rank] += each.own
    steps = sorted(work)
    by_step = [_differences(work[step], peers) for step in steps]
    ops = ordered_ops(set(by_op))
    medians = [_differences({rank: median(own) for rank, own in by_op[op].items()}, peers) for op in ops]
    rows = [
        RankRow(
            f"rank {rank} ({mesh.coordinates(rank)})",
            [found.get(rank) for found in by_step],
            [found.get(rank) for found in medians],
        )
        for rank in range(mesh.size)
    ]
    return svg_heat_map(rows, steps, ops, title=title)


def _differences(values: dict[int, float], peers: dict[int, tuple[int, ...]]) -> dict[int, float]:
    """How far each rank's value is from the median of its peers, as a share of the median; ranks without peers are left
    out."""
    found = dict[int, float]()
    for rank, value in values.items():
        others = [values[peer] for peer in peers[rank] if peer != rank and peer in values]
        if others and (usual := median(others)) > 0:
            found[rank] = value / usual - 1
    return found
