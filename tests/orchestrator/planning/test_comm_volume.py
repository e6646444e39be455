"""What the planner says that ranks send is what they send: counted where layers call for it, and in programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_cases import FAMILIES, Group, exchanged, gathered, made, passed, scattered
from plans import MODEL, TILE, plan_of

from pentad.orchestrator.planning.activation_memory import piece_of
from pentad.orchestrator.planning.comm_volume import Flow, Flows, flows, layer_flows, stage_flows, traffic
from pentad.orchestrator.planning.hardware import NODE, crosses
from pentad.schedules.spec import plan as plan_module
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.plan import ALIGNMENT, ParamShard, Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.spec.tensors import num_parameters
from pentad.workers.parallel import cp_all_gather, cp_ring, cp_ulysses, expert_parallel, tensor_parallel
from pentad.workers.parallel.async_ops import AsyncResult, run_to_completion


@pytest.fixture
def log(alone: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Flows]:
    """All that layers send, from here on; products have tiles."""
    found, caches = Flows(), (stage_flows, layer_flows)

    def pass_on(group: Group, sent: torch.Tensor, room: torch.Tensor) -> AsyncResult[torch.Tensor]:
        found.add("cp", "ring", 1, sent.nbytes)
        return passed(group, sent, room)

    def tell(axis: Any, kind: str, do: Any) -> Any:
        def call(to: torch.Tensor, part: torch.Tensor, group: Any, async_op: bool = False) -> None:
            found.add(axis, kind, 1, abs(to.nbytes - part.nbytes))
            do(to, part, group)

        return call

    def exchange(group: Group, sent: list[torch.Tensor], laid: Any) -> AsyncResult[list[torch.Tensor]]:
        found.add("cp", "exchange", 1, sum(each.nbytes for each in sent) * (group.size() - 1) // group.size())
        return exchanged(group, sent, laid)

    monkeypatch.setattr(cp_ring, "pass_on", pass_on)
    monkeypatch.setattr(cp_ulysses, "_exchange", exchange)
    for module, axis in ((cp_all_gather, "cp"), (expert_parallel, "ep")):
        monkeypatch.setattr(module, "all_gather", tell(axis, "gather", gathered))
        monkeypatch.setattr(module, "reduce_scatter", tell(axis, "scatter", scattered))
    monkeypatch.setattr(tensor_parallel, "all_gather", tell("tp", "gather", gathered))
    monkeypatch.setattr(tensor_parallel, "reduce_scatter", tell("tp", "scatter", scattered))
    monkeypatch.setattr(plan_module, "TILE", TILE)
    for cache in caches:
        cache.cache_clear()
    yield found
    for cache in caches:
        cache.cache_clear()


def test_few_tokens_are_one_tile_and_many_have_tiles() -> None:
    assert [plan_module.num_tiles(tokens) for tokens in (1, 8191, 8192, 16383, 16384, 65536)] == [1, 1, 1, 1, 2, 8]


AXES = [{"tp": 2}, {"tp": 4}, {"cp": 2}, {"cp": 2, "cp_method": "all_gather"}, {"cp": 2, "cp_method": "ulysses", "tp": 2}]


@pytest.mark.parametrize(
    ("mode", "axes"), [*(("none", axes) for axes in AXES), ("selective", AXES[0]), ("full", AXES[0])]
)
@pytest.mark.parametrize("family", ["llama", "deepseek", "deepseek, further tokens"])
def test_layers_send_what_is_planned(log, corpus, family, mode, axes):
    for index in range(3):
        check(log, plan_of("gpipe", 1, 3, 1, corpus, model=FAMILIES[family], recompute=mode, **axes), index)


@pytest.mark.parametrize("axes", [{"ep": 2}, {"ep": 4, "tp": 2}])
@pytest.mark.parametrize("family", ["mixtral", "deepseek"])
def test_experts_send_what_is_planned(log, corpus, family, axes):
    plan = plan_of("gpipe", 1, 3, 1, corpus, model=replace(FAMILIES[family], vocab=300), **axes)
    check(log, plan, 1, device="cuda")


def check(log: Flows, plan: Plan, index: int, device: str = "cpu") -> None:
    """F, RECOMPUTE and B of a stage, one after the other."""
    stage = made(plan, index)
    tokens = torch.arange(plan.slice_tokens)
    shape = plan.sequence_parallel_tokens, plan.model.hidden
    received = None if stage.first else torch.randn(shape, dtype=torch.float64)
    dy = None if stage.last else torch.randn(shape, dtype=torch.float64)
    piece, mode = piece_of(plan)._replace(device=device), plan.recompute_mode(index)
    further = tokens.expand(plan.model.mtp_layers, -1) if stage.last else None
    ends = tokens if stage.first else None, tokens if stage.last else None
    steps: list[Any] = [("F", lambda: run_to_completion(stage.forward(0, received, *ends, further)))]
    if mode != "none":
        steps.append(("again" if mode == "full" else "leaves", lambda: stage.recompute(0)))
    steps.append(("B", lambda: run_to_completion(stage.backward_input(0, dy))))
    for when, do in steps:
        log.clear()
        do()
        assert log == stage_flows(plan.model, plan.layers[index], piece, when), when


def test_a_step_is_the_sum_of_its_instructions(corpus: str) -> None:
    plan = plan_of("1f1b", 2, 2, 4, corpus, tp=2, memory_options=MemoryOptions(zero=1))
    found, piece = flows(plan, 0), piece_of(plan)
    once: Counter[Flow] = Counter()
    for when in ("F", "B"):
        once.update({flow: sent.bytes for flow, sent in stage_flows(plan.model, plan.layers[0], piece, when).items()})
    stream = plan.sequence_parallel_tokens * plan.model.hidden * 8
    assert {flow: sent.bytes for flow, sent in found.items() if flow.axis == "tp"} == {
        f: 4 * b for f, b in once.items()
    }
    assert found[Flow("pp", "SEND_F")] == (4, 4 * stream)
    assert {flow.kind: sent.bytes for flow, sent in found.items() if flow.axis == "dp"} == traffic(plan, 0)


@pytest.mark.parametrize("zero", range(4))
def test_a_step_moves_what_the_paper_says(corpus: str, zero: int) -> None:
    """arXiv 1910.02054, section 7: 2N of gradients and weights, 3N where weights are gathered for both directions."""
    plan = plan_of("gpipe", 4, 1, 2, corpus, memory_options=MemoryOptions(zero=zero))
    found = {flow.kind: sent for flow, sent in flows(plan, 0).items()}
    size = plan.num_zero_shards(ParamShard(0)) * plan.zero_shard_size(ParamShard(0))
    assert 0 <= size - num_parameters(MODEL) < 4 * ALIGNMENT, "shards are filled up"
    moved = sum(sent.bytes for sent in found.values()) / 8 / size
    assert moved == pytest.approx(2 * 3 / 4, rel=1e-3)  # (n - 1) / n of 2N; a whole rank is gathered but once
    kinds = {0: {"ALL_REDUCE"}}.get(zero, {"ALL_GATHER", "REDUCE_SCATTER"})
    assert found.keys() == kinds
    assert all(sent.operations == 1 for sent in found.values())


@pytest.mark.parametrize(
    ("mesh", "far"),
    [
        (Mesh(tp=8, pp=2), {"pp"}),
        (Mesh(tp=2, dp=8), {"dp"}),
        (Mesh(tp=4, cp=4, dp=2), {"cp", "dp"}),
        (Mesh(dp=8), set()),
    ],
)
def test_axes_cross_hosts_where_their_ranks_span_more_than_one(mesh, far):
    assert NODE == 8
    assert {axis for axis in ("dp", "pp", "cp", "tp", "ep") if crosses(mesh, axis)} == far
