"""Listed plans take as long as the plan of their command, whatever the search compared on the way."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.memory.variants import Variants
from pentad.orchestrator.planning.estimate import simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory, device_memory, fit_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.search.search import search_space
from pentad.orchestrator.search.space import Order, space_of
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.plan import Plan
from pentad.schedules.verify.check import check

SIZES = ("layers=4", "hidden=256", "heads=4", "kv_heads=4", "ffn=768", "vocab=1024")
WORDS = (
    *(f"model.{each}" for each in SIZES),
    *("batch.global_batch_size=16", "batch.sequence_length=512", "mesh.pp=1", "schedule.name=1f1b"),
    *("cluster.device=cuda", "cluster.gpu=NVIDIA H200"),
)


def test_a_plan_that_takes_longer_than_it_was_compared_with_is_listed_where_it_belongs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans are compared without evaluation, which may leave no room for CUDA graphs."""
    config = load(None, WORDS)
    space = replace(space_of(config, 4), meshes=(Mesh(dp=4), Mesh(dp=2, pp=2), Mesh(pp=4)), orders=(Order("1f1b"),))
    room, compared = device_memory("cuda", 139), Variants.seconds
    plain = search_space(config, space, room).choices

    def flattered(variants: Variants, plan: Plan) -> float:
        return compared(variants, plan) / (8 if plan.mesh == plain[-1].plan.mesh else 1)

    monkeypatch.setattr(Variants, "seconds", flattered)
    found = search_space(config, space, room).choices
    assert len(plain) == 3 and [each.plan for each in found] == [each.plan for each in plain]
    assert [each.seconds for each in found] == [simulated_seconds(each.plan) for each in found]


EVALUATION, WITHOUT = (), ("data.holdout=0", "eval.every=0")
ALWAYS = ((EVALUATION, 0.02), (WITHOUT, 0.05), (WITHOUT, 100.0))  # cases of evaluation and spare memory


@pytest.mark.parametrize(
    ("words", "spare"),
    [
        pytest.param(*case, marks=[] if case in ALWAYS else [pytest.mark.slow])
        for case in product((EVALUATION, WITHOUT), (0.02, 0.05, 100.0))
    ],
)
def test_what_is_listed_is_the_plan_of_its_configuration_and_proved(
    words: tuple[str, ...], spare: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it is listed as it was compared, without being made anew; including its recomputation and offloading."""
    config, proved = load(None, [*WORDS, *words]), list[Program]()

    def noted(program: Program, **given: int) -> None:
        proved.append(program)
        check(program, **given)

    for module in ("schedules.compiler", "orchestrator.search.search"):
        monkeypatch.setattr(f"pentad.{module}.check", noted)
    room = DeviceMemory(int((0.1 + spare) * 2**30), "of a test")
    meshes, orders = (Mesh(dp=4), Mesh(dp=2, pp=2), Mesh(pp=4)), (Order("1f1b"), Order("zb-h1"))
    space = replace(space_of(config, 4), meshes=meshes, orders=orders)
    found = search_space(config, space, room).choices
    assert found
    for each in found:
        trained = [program for program in proved if not program.forward_only]
        assert sum(program is each.plan.program for program in trained) == 1
        assert each.plan == make_plan(each.config, "cuda", memory=room)
        assert each.seconds == simulated_seconds(each.plan) and each.bytes == fit_of(each.plan, room).needed
