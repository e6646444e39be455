"""Rank processes in one gloo world that run an MoE sublayer, and a single-process reference with autograd."""

from __future__ import annotations

import faulthandler
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from closeness import relative_error
from gpus import gpu_of
from plans import MODEL
from pool import Pool, answer_orders

from pentad.schedules.spec.model import Experts
from pentad.workers.linear.grouped_linear import GroupedLinear
from pentad.workers.linear.linear import Linear
from pentad.workers.linear.weight_grad import Param, accumulate_wgrads
from pentad.workers.model.layer_context import LayerContext, SequenceContext
from pentad.workers.model.mlp import MLP
from pentad.workers.model.moe import MoE
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.parallel.expert_parallel import DispatchMode, ExpertParallelGroup, ExpertSlots
from pentad.workers.params.param_buffers import Unwritten

State = dict[str, torch.Tensor]
NO_SEQUENCE: Any = SequenceContext(*[None] * 3)  # type: ignore[arg-type]  # an MoE sublayer reads no positions


class Case(NamedTuple):
    """Full weights by name, and every rank's tokens [ranks, T, H] and output gradients; a rank holds only the first
    `held` of its own (None: all)."""

    shape: Experts
    state: State
    tokens: torch.Tensor
    gradients: torch.Tensor
    mode: DispatchMode | Literal["slots"] = "all_to_all"
    scale: float = 0.25
    recompute: bool = False
    held: list[int] | None = None

    def of_rank(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        """The values of a rank's tokens."""
        return values[rank, : None if self.held is None else self.held[rank]]


class Answer(NamedTuple):
    """One rank's results, with the gradients of its local experts."""

    y: torch.Tensor
    dx: torch.Tensor
    gradients: State
    load: torch.Tensor
    received: int  # tokens


def layer_context(shape: Experts, scale: float = 0.0, ep: ExpertParallelGroup | None = None) -> LayerContext:
    return LayerContext(replace(MODEL, experts=shape), True, 0.0, scale, ep=ep or ExpertParallelGroup())


def case_of(shape: Experts, ranks: int, tokens: int, bias: torch.Tensor | None = None, **options: Any) -> Case:
    """Weights, tokens and gradients from a fixed seed."""
    generator, hidden = torch.Generator().manual_seed(3), 6

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    state = {
        "router": normal(shape.num_experts, hidden),
        "gate_up": normal(shape.num_experts, 2 * shape.intermediate_size, hidden) / 2,
        "down": normal(shape.num_experts, hidden, shape.intermediate_size) / 2,
    }
    if shape.shared_intermediate_size:
        state["shared_gate_up"] = normal(2 * shape.shared_intermediate_size, hidden) / 2
        state["shared_down"] = normal(hidden, shape.shared_intermediate_size) / 2
    if bias is not None:
        state["bias"] = bias.to(torch.float64)
    return Case(shape, state, normal(ranks, tokens, hidden), normal(ranks, tokens, hidden), **options)


def run_rank(case: Case, rank: int, ranks: int, group: dist.ProcessGroup | None) -> Answer:
    """Runs F, B and W of one rank."""
    x, local = case.of_rank(rank, case.tokens).clone(), case.shape.num_experts // ranks
    sequence, dy = NO_SEQUENCE._replace(expert_tokens=tuple(case.held or ())), case.of_rank(rank, case.gradients)
    ep = ExpertParallelGroup(group, ranks, rank)
    ep = replace(ep, slots=ExpertSlots(len(x), str(x.device))) if case.mode == "slots" else replace(ep, mode=case.mode)
    context = layer_context(case.shape, case.scale, ep)
    mine = slice(rank * local, (rank + 1) * local)
    moe = bind({k: v[mine].contiguous() if k in ("gate_up", "down") else v for k, v in case.state.items()})
    y, saved, recomputable = run_to_completion(moe.forward(context, sequence, x))
    if case.recompute:
        recomputable = moe.recompute(context, x, saved)
    dx, work = run_to_completion(moe.backward(context, sequence, x, saved, recomputable, dy))
    accumulate_wgrads(work, Unwritten())
    received = len(x if saved.received is None else saved.received)
    return Answer(y, dx, gradients_of(moe), saved.routing.load, received)


def bind(state: State) -> MoE:
    """The sublayer with these weights and zeroed main gradients."""
    wide = torch.float64 if state["router"].dtype == torch.float64 else torch.float32
    state = {name: each.detach() for name, each in state.items()}
    params = {name: Param(each, torch.zeros_like(each, dtype=wide)) for name, each in state.items() if name != "bias"}
    shared = None
    if "shared_down" in params:
        shared = MLP(Linear(params["shared_gate_up"]), Linear(params["shared_down"]), "silu")
    gate_up, down = GroupedLinear(params["gate_up"]), GroupedLinear(params["down"])
    return MoE(params["router"], gate_up, down, shared, "silu", None, state.get("bias"))


def gradients_of(sublayer: MoE) -> State:
    """Main gradients by name."""
    params = {"router": sublayer.router, "gate_up": sublayer.gate_up.param, "down": sublayer.down.param}
    if sublayer.shared is not None:
        params |= {"shared_gate_up": sublayer.shared.gate_up.param, "shared_down": sublayer.shared.down.param}
    return {name: param.gradient for name, param in params.items() if param.gradient is not None}


def reference(case: Case) -> list[Answer]:
    """Runs every expert on every token, with gradients from autograd; each rank's tokens are a microbatch."""
    p = {name: each.clone().requires_grad_(name != "bias") for name, each in case.state.items()}
    tokens, shape, answers = case.tokens.clone().requires_grad_(), case.shape, []
    total = torch.zeros((), dtype=torch.float64)
    for x, dy in ((case.of_rank(rank, tokens), case.of_rank(rank, case.gradients)) for rank in range(len(tokens))):
        logits = x @ p["router"].T
        scores = logits.softmax(-1) if shape.scoring_func == "softmax" else logits.sigmoid()
        biased = scores.detach() + p.get("bias", 0)
        if shape.num_groups > 1:
            grouped = biased.view(len(x), shape.num_groups, -1)
            best = grouped.sort(-1, descending=True).values[..., :2].sum(-1)
            least = best.sort(-1, descending=True).values[:, shape.topk_groups - 1]
            biased = grouped.masked_fill((best < least[:, None])[..., None], -torch.inf).view(len(x), -1)
        chosen = torch.zeros_like(scores).scatter(1, biased.topk(shape.top_k).indices, 1.0)
        weights = scores * chosen
        if shape.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for expert in range(shape.num_experts):
            result = _gated_mlp(x, p["gate_up"][expert], p["down"][expert])
            y = y + shape.routed_scaling_factor * weights[:, expert, None] * result
        if shape.shared_intermediate_size:
            y = y + _gated_mlp(x, p["shared_gate_up"], p["shared_down"])
        shares = scores if shape.scoring_func == "softmax" else scores / scores.sum(-1, keepdim=True)
        balance = shape.aux_loss_coef * shape.num_experts / shape.top_k * (chosen.mean(0) * shares.mean(0)).sum()
        squares = shape.router_z_loss_coef * logits.logsumexp(-1).square().mean()
        total = total + (y * dy).sum() + case.scale * len(x) * (balance + squares)
        answers.append((y.detach(), chosen.sum(0).long()))
    total.backward()
    gradients = {name: each.grad for name, each in p.items() if each.grad is not None}
    assert tokens.grad is not None
    dx = [case.of_rank(rank, tokens.grad) for rank in range(len(tokens))]
    return [Answer(y, each, gradients, load, 0) for (y, load), each in zip(answers, dx, strict=True)]


def _gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (F.silu(gate) * up) @ down.T


def check(case: Case, answers: list[Answer]) -> None:
    """Compares everything to 1e-10: gradients of replicated weights are summed over ranks, those of experts
    concatenated."""
    expected = reference(case)
    for mine, theirs in zip(answers, expected, strict=True):
        assert relative_error(mine.y, theirs.y) < 1e-10
        assert relative_error(mine.dx, theirs.dx) < 1e-10
        assert torch.equal(mine.load, theirs.load)
    for name, gradient in expected[0].gradients.items():
        parts = [answer.gradients[name] for answer in answers]
        full = torch.cat(parts) if name in ("gate_up", "down") else torch.stack(parts).sum(0)
        assert relative_error(full, gradient) < 1e-10, name


class Ranks(Pool):
    """A pool of processes; a case uses the first ones that it needs. With `device` cuda each has a GPU."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        super().__init__(size, _serve, device)

    def run(self, case: Case) -> list[Answer]:
        """One answer per rank; raises with the traceback of a failing rank."""
        ranks = len(case.tokens)
        self.send([case] * ranks)
        return self.answers(ranks, Answer)


def _serve(end: Connection, rank: int, size: int, device: str, folder: str) -> None:
    torch.set_num_threads(1)
    faulthandler.enable()
    backend = "gloo"
    if device == "cuda":
        backend, device = "nccl", f"cuda:{gpu_of(rank)}"
        torch.cuda.set_device(device)
    else:
        # Also fills fresh memory with NaN, which must not matter. torch's own setter would import torch._inductor.
        torch._C._set_deterministic_algorithms(True)
    store, timeout = f"file://{Path(folder, 'store')}", timedelta(seconds=80)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=timeout)
    groups = {1: None} | {n: dist.new_group(list(range(n)), timeout=timeout) for n in (2, 4) if n <= size}

    def run(case: Case) -> Answer:
        ranks = len(case.tokens)
        return _to_device(run_rank(_to_device(case, device), rank, ranks, groups[ranks]), "cpu")

    answer_orders(end, run)
    dist.destroy_process_group()


def _to_device(value: Any, device: str) -> Any:
    """Moves a named tuple with all its tensors, including those in dicts, to a device."""
    if isinstance(value, tuple):
        return type(value)(*(_to_device(each, device) for each in value))
    if isinstance(value, dict):
        return {name: each.to(device) for name, each in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value
