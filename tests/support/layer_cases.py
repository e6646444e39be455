"""What test_activation_memory.py shares with other tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from plans import MODEL, plan_of

from pentad.schedules.spec.model import MLA, Experts
from pentad.schedules.spec.plan import Plan
from pentad.workers.model import moe
from pentad.workers.model.stage import Stage
from pentad.workers.parallel import cp_all_gather, cp_ring, cp_ulysses, expert_parallel, tensor_parallel
from pentad.workers.parallel.async_ops import AsyncResult, Task, ready
from pentad.workers.parallel.context_parallel import ContextParallelGroup
from pentad.workers.parallel.cp_blocks import Block
from pentad.workers.parallel.expert_parallel import ExpertParallelGroup
from pentad.workers.parallel.process_groups import LayerGroups
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import create_parameters

MIXED = Experts(num_experts=4, top_k=2, intermediate_size=12, aux_loss_coef=0.1)


DEEP = Experts(
    num_experts=8,
    top_k=3,
    intermediate_size=12,
    shared_intermediate_size=8,
    scoring_func="sigmoid",
    num_groups=2,
    topk_groups=1,
    bias_update_rate=0.01,
    first_k_dense=1,
)


LATENT = MLA(kv_lora_rank=6, q_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)


SMALL = replace(MODEL, layers=4, hidden=32, heads=16, kv_heads=8)  # several heads a rank, whatever shares them out


FAMILIES = {
    "llama": SMALL,
    "qwen3": replace(SMALL, qk_norm=True, head_dim=6),
    "mixtral": replace(SMALL, experts=MIXED),
    "deepseek": replace(SMALL, experts=DEEP, mla=LATENT),
    "deepseek, further tokens": replace(SMALL, experts=DEEP, mla=LATENT, mtp_layers=2),
    "deepseek-lite": replace(SMALL, experts=DEEP, mla=replace(LATENT, q_lora_rank=0)),
}


class Group(NamedTuple):
    """A group of which the others are not there."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 1


def passed(group: Any, sent: torch.Tensor, room: torch.Tensor) -> AsyncResult[torch.Tensor]:
    """A step of a ring in which what is sent comes back."""
    return ready(room.copy_(sent))


def gathered(whole: torch.Tensor, part: torch.Tensor, group: Any, async_op: bool = False) -> None:
    whole.copy_(part.repeat(whole.shape[0] // part.shape[0], *[1] * (part.dim() - 1)))


def scattered(own: torch.Tensor, whole: torch.Tensor, group: Any, async_op: bool = False) -> None:
    own.copy_(whole[: own.shape[0]])


def shared_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are shared with ranks which are not there."""
    monkeypatch.setattr(cp_ring, "pass_on", passed)
    for module in (cp_all_gather, expert_parallel):
        monkeypatch.setattr(module, "all_gather", gathered)
        monkeypatch.setattr(module, "reduce_scatter", scattered)
    monkeypatch.setattr(tensor_parallel, "all_gather", gathered)
    monkeypatch.setattr(tensor_parallel, "reduce_scatter", scattered)
    monkeypatch.setattr(cp_ulysses, "_exchange", exchanged)
    monkeypatch.setattr(moe, "make_dispatcher", route)
    monkeypatch.setattr(moe.dist, "all_reduce", lambda load, group, async_op=False: None)


def exchanged(group: Any, sent: list[torch.Tensor], laid: Any) -> AsyncResult[list[torch.Tensor]]:
    return ready([laid(each.clone()) for each in sent])


def route(chosen: torch.Tensor, held: int, group: Any, way: str) -> Task[expert_parallel.Dispatcher]:
    yield from ()
    return expert_parallel.LocalDispatcher() if group is None else expert_parallel.AllGatherDispatcher(group, group.size())


def made(plan: Plan, index: int) -> Stage:
    device, mesh = torch.device("cpu"), plan.mesh
    rank = next(rank for rank in range(mesh.size) if index in plan.stages_of(rank))
    held = {at: create_parameters(plan, at, device, rank=rank) for at in plan.param_shards_of(rank) if at.stage == index}
    stage = Stage(plan, index, make_param_buffers(plan, rank, index, held), rank)
    groups: list[Any] = [Group(size) if size > 1 else None for size in (mesh.tp, mesh.cp, mesh.ep)]
    context = ContextParallelGroup(groups[1], mesh.cp, 1 if mesh.cp > 1 else 0, plan.cp_method)
    stage.join(LayerGroups(TensorParallelGroup(groups[0], mesh.tp), context, ExpertParallelGroup(groups[2], 0, "all_gather")))
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


def plan(corpus: str, family: str, mode: str, **axes: Any) -> Plan:
    return plan_of("gpipe", 1, 3, 1, corpus, model=FAMILIES[family], recompute=mode, **axes)
