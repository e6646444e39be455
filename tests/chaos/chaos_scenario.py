"""Seed -> a run and its faults. Every combination of fault, point, schedule and mesh occurs once in as many consecutive
seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from random import Random

FAULTS = (
    *("kill", "stop", "two at once", "node lost", "partition", "slow rank", "driver killed", "head killed"),
    *("SIGTERM", "node drains", "disk full", "torn checkpoint", "flipped byte", "store down"),
    *("lost message", "late message", "duplicated message", "failed save"),
)
POINTS = (
    *("placing", "loading", "connecting", "before F", "within F", "after F", "within B", "within W", "before NORM"),
    *("before STEP", "saving", "recovering", "idle", "end"),
)
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe")
_EXPERTS = tuple(f"model.experts.{each}" for each in ("num_experts=4", "top_k=2", "intermediate_size=16"))
MESHES = (
    ("mesh.pp=2",),
    ("mesh.pp=4",),
    ("mesh.dp=2", "mesh.pp=2"),
    ("mesh.dp=2", "mesh.pp=2", "zero.stage=1"),
    ("mesh.dp=2", "mesh.pp=2", "zero.stage=3"),
    ("mesh.pp=2", "mesh.tp=2"),
    ("mesh.pp=2", "mesh.cp=2"),
    ("mesh.pp=2", "mesh.ep=2", "model.family=mixtral", *_EXPERTS),
    ("mesh.dp=2", "mesh.pp=2", "mesh.tp=2"),
)
CELLS = len(FAULTS) * len(POINTS) * len(SCHEDULES) * len(MESHES)
_STRIDE = 7919  # a prime that divides no axis, so that consecutive seeds differ in everything


@dataclass(frozen=True)
class Fault:
    """One of FAULTS, which happens when one of POINTS is reached for the `nth` time from step `step` on."""

    kind: str
    point: str
    step: int
    nth: int


@dataclass(frozen=True)
class Scenario:
    """`nodes`: of each bundle. Lost ones are replaced after `replaced_after` seconds; None: never."""

    seed: int
    schedule: str
    mesh: tuple[str, ...]
    overrides: tuple[str, ...]
    steps: int
    nodes: tuple[str, ...]
    replaced_after: float | None
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        faults = "; ".join(f"{f.kind} at {f.point}, step {f.step}, number {f.nth}" for f in self.faults)
        where = f"{self.schedule} on {' '.join(self.mesh)}, {' '.join(self.overrides)}, nodes {' '.join(self.nodes)}"
        return f"seed {self.seed}: {where}, replaced after {self.replaced_after} s: {faults}"


@lru_cache(1)
def cells() -> list[tuple[str, str, str, tuple[str, ...]]]:
    return list(product(FAULTS, POINTS, SCHEDULES, MESHES))


def scenario(seed: int) -> Scenario:
    kind, point, schedule, mesh = cells()[seed * _STRIDE % CELLS]
    random, steps = Random(seed), 8
    ranks = 8 if mesh == MESHES[-1] else 2 if mesh == MESHES[0] else 4
    overrides = [
        f"checkpoint.every={random.choice((0, 2, 3))}",
        f"elastic.replicate_every={random.choice((0, 0, 1, 3))}",
        f"elastic.min_ranks={random.choice((0, ranks // 2))}",
        f"checkpoint.keep={random.choice((1, 2))}",
    ]
    if overrides[2] == "elastic.min_ranks=0":
        overrides.pop(2)
    overrides.append(f"elastic.driver_lease={Random(-1 - seed).choice((0, 30, 120))}")
    least = 2 if "mesh.tp=2" in mesh else 1  # tp ranks share a node
    size = max(least, random.choice((ranks // 2, ranks // 4)))
    nodes = tuple(f"node{bundle // size}" for bundle in range(ranks))
    first = Fault(kind, point, random.randrange(steps), random.randrange(ranks * 2))
    faults = [first]
    if point in ("placing", "loading", "connecting", "recovering"):
        faults[0] = replace(first, nth=random.randrange(ranks))
        if point == "recovering" or random.random() < 0.5:  # during the recovery from a kill
            where = random.choice(("within F", "within B", "before NORM"))
            faults = [Fault("kill", where, random.randrange(1, steps), random.randrange(4)), faults[0]]
    if kind in ("torn checkpoint", "flipped byte"):  # force a recovery that reads it
        faults.append(Fault(random.choice(("driver killed", "two at once")), "before NORM", 0, random.randrange(2)))
    while random.random() < 0.3:
        kind, point = random.choice(FAULTS), random.choice(POINTS)
        faults.append(Fault(kind, point, random.randrange(steps), random.randrange(ranks)))
    return Scenario(
        *(seed, schedule, mesh, tuple(overrides), steps, nodes),
        random.choice((None, 0.5, 3.0)),
        tuple(faults),
    )
