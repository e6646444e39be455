"""What the planner says of activations is what the layers keep, to the byte: every family, every axis, every mode.

Other ranks are played: what would come from them has the right shape, and its values matter to no one here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from plans import MODEL, plan_of

from pentad.orchestrator.activations import shares_of
from pentad.schedules.model import Experts, Latent
from pentad.schedules.plan import Plan
from pentad.workers import context_exchange, context_gather, context_ring, dispatch, experts, mixture, tensor_ranks
from pentad.workers.bank import banks_of
from pentad.workers.context import Context
from pentad.workers.context_blocks import Block
from pentad.workers.dispatch import Site
from pentad.workers.inner import Inner
from pentad.workers.parameters import DTYPES, create
from pentad.workers.stage import Stage
from pentad.workers.tensor_ranks import TensorRanks
from pentad.workers.turns import Coming, Turns, here
from pentad.workers.turns import alone as at_once

MIXED = Experts(count=4, active=2, ffn=12, auxiliary=0.1)
DEEP = Experts(count=8, active=3, ffn=12, shared=8, score="sigmoid", groups=2, active_groups=1, bias_rate=0.01, dense=1)
LATENT = Latent(rank=6, query_rank=10, plain=8, rotary=4, value=6)
SMALL = replace(MODEL, layers=4, hidden=32, heads=16, kv_heads=8)  # several heads a rank, whatever shares them out
FAMILIES = {
    "llama": SMALL,
    "qwen3": replace(SMALL, qk_norm=True, head_size=6),
    "mixtral": replace(SMALL, experts=MIXED),
    "deepseek": replace(SMALL, experts=DEEP, latent=LATENT),
    "deepseek, further tokens": replace(SMALL, experts=DEEP, latent=LATENT, predicted=2),
    "deepseek-lite": replace(SMALL, experts=DEEP, latent=replace(LATENT, query_rank=0)),
}
MODES = ("none", "selective", "full")


class Group(NamedTuple):
    """A group of which the others are not there."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 1


def passed(group: Any, sent: torch.Tensor, room: torch.Tensor) -> Coming[torch.Tensor]:
    """A step of a ring in which what is sent comes back."""
    return here(room.copy_(sent))


def gathered(whole: torch.Tensor, part: torch.Tensor, group: Any, async_op: bool = False) -> None:
    whole.copy_(part.repeat(whole.shape[0] // part.shape[0], *[1] * (part.dim() - 1)))


def scattered(own: torch.Tensor, whole: torch.Tensor, group: Any, async_op: bool = False) -> None:
    own.copy_(whole[: own.shape[0]])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are shared with ranks which are not there."""
    monkeypatch.setattr(context_ring, "pass_on", passed)
    for module in (context_gather, dispatch):
        monkeypatch.setattr(module, "_gather", gathered)
        monkeypatch.setattr(module, "_scatter", scattered)
    monkeypatch.setattr(tensor_ranks, "gather_all", gathered)
    monkeypatch.setattr(tensor_ranks, "scatter_sum", scattered)
    monkeypatch.setattr(context_exchange, "_exchange", exchanged)
    monkeypatch.setattr(experts, "open_route", route)
    monkeypatch.setattr(mixture.dist, "all_reduce", lambda load, group, async_op=False: None)


def exchanged(group: Any, sent: list[torch.Tensor], laid: Any) -> Coming[list[torch.Tensor]]:
    return here([laid(each.clone()) for each in sent])


def route(chosen: torch.Tensor, held: int, group: Any, way: str) -> Turns[dispatch.Route]:
    yield from ()
    return dispatch.Stay() if group is None else dispatch.Gather(group, group.size())


def made(plan: Plan, index: int) -> Stage:
    device, mesh = torch.device("cpu"), plan.mesh
    rank = next(rank for rank in range(mesh.size) if index in plan.stages_of(rank))
    held = {at: create(plan, at, device, rank=rank) for at in plan.shares_of(rank) if at.stage == index}
    stage = Stage(plan, index, banks_of(plan, rank, index, held), rank)
    groups: list[Any] = [Group(size) if size > 1 else None for size in (mesh.tp, mesh.cp, mesh.ep)]
    context = Context(groups[1], mesh.cp, 1 if mesh.cp > 1 else 0, plan.context)
    stage.join(Inner(TensorRanks(groups[0], mesh.tp), context, Site(groups[2], 0, "gather")))
    return stage


def storages(nested: object) -> Iterator[torch.UntypedStorage]:
    """What can be reached, of autograd's graphs as well; where documents begin is every layer's."""
    if isinstance(nested, torch.Tensor):
        yield nested.untyped_storage()
        yield from graphs(nested.grad_fn)
    elif isinstance(nested, tuple | list) and not isinstance(nested, Block):
        for each in nested:
            yield from storages(each)


def graphs(node: Any) -> Iterator[torch.UntypedStorage]:
    if node is not None:
        names = [name for name in dir(node) if name.startswith("_saved_")]
        values = [getattr(node, name) for name in names]
        yield from (each.untyped_storage() for each in values if isinstance(each, torch.Tensor))
        for before, _ in node.next_functions:
            yield from graphs(before)


def size(nested: object, *besides: torch.Tensor | None) -> int:
    """Bytes of all distinct storages but those of `besides`."""
    out = {each.untyped_storage().data_ptr() for each in besides if each is not None}
    found = {each.data_ptr(): each.nbytes() for each in storages(nested)}
    return sum(nbytes for address, nbytes in found.items() if address not in out)


def gradients(stage: Stage) -> list[torch.Tensor]:
    return [bank.whole for bank in stage.banks if bank.whole is not None]


def check(plan: Plan, index: int) -> None:
    """F, RECOMPUTE, B: what is kept after each, without what lies in the slots of transfers."""
    stage, of, mode = made(plan, index), shares_of(plan, index), plan.mode(index)
    tokens = torch.arange(plan.piece_tokens)
    shape = plan.stream_tokens, plan.model.hidden
    dtype = DTYPES[plan.dtype]
    received = None if stage.first else torch.randn(shape).to(dtype)
    starts: list[tuple[int, int]] = [(0, 3)] * plan.batch.rows if plan.packed else []
    fixed = [*gradients(stage), received, tokens]
    further = tokens.expand(plan.model.predicted, -1) if stage.last else None
    ends = tokens if stage.first else None, tokens if stage.last else None
    at_once(stage.forward(0, received, *ends, further, starts))
    saved = of.saved - (0 if stage.first else of.entry)
    said = {"none": saved, "selective": saved - of.leaves, "full": 0}[mode]
    found = size(stage.kept[0][1:], *fixed)
    assert found == said
    if mode != "none":
        stage.recompute(0)
        found = size(stage.kept[0][1:], *fixed)
        assert found == saved
    stays = found - sum(each.nbytes() for each in stage.movable(0))
    assert stays == of.still
    dy = None if stage.last else torch.randn(shape).to(dtype)
    at_once(stage.backward_input(0, dy))
    found = size(stage.deferred[0], *fixed, dy)
    assert found == of.deferred - of.given


CASES: list[tuple[str, dict[str, Any]]] = [*((mode, {}) for mode in MODES), *((mode, {"tp": 2}) for mode in MODES)]
CASES.append(("none", {"tp": 4}))
SHARED: list[dict[str, Any]] = [{"cp": 2, "context": way} for way in ("ring", "gather", "exchange")]


def plan(corpus: str, family: str, mode: str, **axes: Any) -> Plan:
    return plan_of("gpipe", 1, 3, 1, corpus, model=FAMILIES[family], recompute=mode, **axes)


@pytest.mark.parametrize(("mode", "axes"), CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_keeps_what_is_planned(alone, corpus, family, mode, axes):
    for index in range(3):
        check(plan(corpus, family, mode, **axes), index)


@pytest.mark.parametrize("axes", [*SHARED, {"cp": 2, "tp": 2}])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek"])
def test_context_ranks_keep_what_is_planned(alone, corpus, family, packed, axes):
    check(plan(corpus, family, "none", packed=packed, **axes), 1)


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_packed_documents_keep_what_is_planned(alone, corpus, family):
    check(plan(corpus, family, "none", packed=True), 1)


@pytest.mark.parametrize("axes", [{"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 4}, {"ep": 2, "cp": 2}])
@pytest.mark.parametrize("family", ["mixtral", "deepseek"])
def test_experts_keep_what_is_planned(alone, corpus, family, axes):
    check(plan(corpus, family, "none", **axes), 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_narrow_dtypes_keep_what_is_planned(alone, corpus, family, dtype):
    check(plan(corpus, family, "none", dtype=dtype), 1)
