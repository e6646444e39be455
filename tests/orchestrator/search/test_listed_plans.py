"""What a search lists takes as long as the plan of its command, whatever was compared on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.memory.variants import Variants
from pentad.orchestrator.planning.estimate import simulated_seconds
from pentad.orchestrator.planning.fit import device_memory
from pentad.orchestrator.search.search import search_space
from pentad.orchestrator.search.space import Order, space_of
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.plan import Plan


def test_a_plan_that_takes_longer_than_it_was_compared_with_is_listed_where_it_belongs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Evaluation may leave no room for CUDA graphs: plans are compared without it."""
    sizes = ("layers=4", "hidden=256", "heads=4", "kv_heads=4", "ffn=768", "vocab=1024")
    words = (*(f"model.{each}" for each in sizes), "batch.global_batch_size=16", "batch.sequence_length=512")
    config = load(None, [*words, "mesh.pp=1", "schedule.name=1f1b", "cluster.device=cuda", "cluster.gpu=NVIDIA H200"])
    space = replace(space_of(config, 4), meshes=(Mesh(dp=4), Mesh(dp=2, pp=2), Mesh(pp=4)), orders=(Order("1f1b"),))
    room, compared = device_memory("cuda", 139), Variants.seconds
    plain = search_space(config, space, room).choices

    def flattered(variants: Variants, plan: Plan) -> float:
        return compared(variants, plan) / (8 if plan.mesh == plain[-1].plan.mesh else 1)

    monkeypatch.setattr(Variants, "seconds", flattered)
    found = search_space(config, space, room).choices
    assert len(plain) == 3 and [each.plan for each in found] == [each.plan for each in plain]
    assert [each.seconds for each in found] == [simulated_seconds(each.plan) for each in found]
