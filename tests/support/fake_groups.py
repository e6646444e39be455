"""Stages whose process groups have one rank: data from other ranks has the right shape and arbitrary values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from plans import MODEL, plan_of
from small_models import GEMMA

from pentad.schedules.spec.model import MLA, Experts, ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.workers.model import moe
from pentad.workers.model.stage import Stage
from pentad.workers.parallel import async_ops, cp_ring, cp_ulysses, expert_parallel, row_exchange, tensor_parallel
from pentad.workers.parallel.async_ops import AsyncResult, Task, ready
from pentad.workers.parallel.context_parallel import ContextParallelGroup
from pentad.workers.parallel.document_mask import Block
from pentad.workers.parallel.expert_parallel import ExpertParallelGroup
from pentad.workers.parallel.process_groups import LayerGroups
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import create_parameters

MIXTRAL = Experts(num_experts=4, top_k=2, intermediate_size=12, aux_loss_coef=0.1)
DEEPSEEK = Experts(
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
SMALL = replace(MODEL, layers=4, hidden=32, heads=16, kv_heads=8)  # several heads per rank on every mesh
FAMILIES = {
    "llama": SMALL,
    "qwen3": replace(SMALL, qk_norm="head", head_dim=6),
    "qwen2": replace(SMALL, qkv_bias=True),
    "mistral": replace(SMALL, sliding_window=3, layer_types=("sliding_attention", "full_attention")),
    "olmo2": replace(SMALL, qk_norm="all_heads", norms="after"),
    "gemma2": replace(SMALL, **GEMMA, attn_logit_softcapping=0.5, final_logit_softcapping=1.5),
    "gpt-oss": replace(
        SMALL,
        experts=replace(MIXTRAL, aux_loss_coef=0.0),
        hidden_act="clamped_silu",
        qkv_bias=True,
        out_bias=True,
        expert_biases=True,
        attention_sinks=True,
    ),
    "mixtral": replace(SMALL, experts=MIXTRAL),
    "deepseek": replace(SMALL, experts=DEEPSEEK, mla=LATENT),
    "deepseek with mtp": replace(SMALL, experts=DEEPSEEK, mla=LATENT, mtp_layers=2),
    "deepseek without q_lora": replace(SMALL, experts=DEEPSEEK, mla=replace(LATENT, q_lora_rank=0)),
}


class FakeGroup(NamedTuple):
    """Stands for a process group; this is rank 1."""

    ranks: int
    axis: str

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 1


def in_tiles(model: ModelSpec) -> ModelSpec:
    """The model with operands of whole tiles of 128, even on two tensor ranks."""
    mla, sizes = model.mla, {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    if mla is not None:
        mla = replace(mla, q_lora_rank=256 * bool(mla.q_lora_rank), **sizes)
    experts = model.experts and replace(model.experts, intermediate_size=256)
    return replace(model, hidden=128, heads=8, kv_heads=4, head_dim=64, ffn=256, mla=mla, experts=experts)


def pass_on(ring: Any, sent: torch.Tensor, buffer: torch.Tensor) -> AsyncResult[torch.Tensor]:
    """A step of a ring: this rank receives what it sends."""
    return ready(buffer.copy_(sent))


def all_gather(full: torch.Tensor, part: torch.Tensor, group: Any, async_op: bool = False) -> None:
    full.copy_(part.repeat(full.shape[0] // part.shape[0], *[1] * (part.dim() - 1)))


def reduce_scatter(part: torch.Tensor, full: torch.Tensor, group: Any, async_op: bool = False) -> None:
    part.copy_(full[: part.shape[0]])


def exchange(group: Any, sent: list[torch.Tensor], joined: Any) -> AsyncResult[list[torch.Tensor]]:
    return ready([joined(each.clone()) for each in sent])


def make_dispatcher(
    experts: torch.Tensor, local: int, ep: ExpertParallelGroup, tokens: tuple[int, ...] = ()
) -> Task[expert_parallel.Dispatcher]:
    yield from ()
    if ep.group is None:
        return expert_parallel.LocalDispatcher()
    return expert_parallel.AllGatherDispatcher(ep)


def fake_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes layers communicate without other ranks."""
    monkeypatch.setattr(cp_ring, "pass_on", pass_on)
    replace_collectives(monkeypatch, all_gather, reduce_scatter)
    monkeypatch.setattr(cp_ulysses, "_exchange", exchange)
    monkeypatch.setattr(moe, "make_dispatcher", make_dispatcher)
    monkeypatch.setattr(row_exchange.dist, "all_reduce", lambda load, group, async_op=False, op=None: None)


def replace_collectives(monkeypatch: pytest.MonkeyPatch, all_gather: Any, reduce_scatter: Any) -> None:
    monkeypatch.setattr(async_ops, "all_gather", all_gather)
    monkeypatch.setattr(async_ops, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(tensor_parallel, "reduce_scatter", reduce_scatter)


def make_stage(plan: Plan, index: int) -> Stage:
    """A stage, on the first rank that holds it."""
    device, mesh = torch.device("cpu"), plan.mesh
    rank = next(rank for rank in range(mesh.size) if index in plan.stages_of(rank))
    shards = [shard for shard in plan.param_shards_of(rank) if shard.stage == index]
    parameters = {shard: create_parameters(plan, shard, device, rank=rank) for shard in shards}
    stage = Stage(plan, index, make_param_buffers(plan, rank, index, parameters), rank)
    sizes = {"tp": mesh.tp, "cp": mesh.cp, "ep": mesh.ep}
    tp, cp, ep = (FakeGroup(size, axis) if size > 1 else None for axis, size in sizes.items())
    groups: Any = (
        TensorParallelGroup(tp, mesh.tp),  # type: ignore[arg-type]
        ContextParallelGroup(cp, mesh.cp, 1 if mesh.cp > 1 else 0, method=plan.cp_method),  # type: ignore[arg-type]
        ExpertParallelGroup(ep, mesh.ep, 0, mode="all_gather"),  # type: ignore[arg-type]
    )
    stage.join(LayerGroups(*groups))
    return stage


def storages(nested: object) -> Iterator[torch.UntypedStorage]:
    """Storages of all nested tensors and autograd graphs, except document boundaries, which layers share."""
    if isinstance(nested, torch.Tensor):
        yield nested.untyped_storage()
        yield from _graph_storages(nested.grad_fn)
    elif isinstance(nested, tuple | list) and not isinstance(nested, Block):
        for each in nested:
            yield from storages(each)


def _graph_storages(node: Any) -> Iterator[torch.UntypedStorage]:
    if node is not None:
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        yield from (each.untyped_storage() for each in saved if isinstance(each, torch.Tensor))
        for before, _ in node.next_functions:
            yield from _graph_storages(before)


def nbytes(nested: object, *excluded: torch.Tensor | None) -> int:
    """Bytes of all distinct storages, except those of `excluded`."""
    without = {each.untyped_storage().data_ptr() for each in excluded if each is not None}
    found = {each.data_ptr(): each.nbytes() for each in storages(nested)}
    return sum(size for address, size in found.items() if address not in without)


def stage_plan(corpus: str, family: str, mode: str, **axes: Any) -> Plan:
    """Three stages of a family, one microbatch."""
    return plan_of("gpipe", 1, 3, 1, corpus, model=FAMILIES[family], recompute=mode, **axes)
