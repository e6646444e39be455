"""Rank processes in one gloo world that run an expert layer, and what one process makes of the same with autograd."""

from __future__ import annotations

import faulthandler
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from closeness import relative_error
from pool import Pool

from pentad.schedules.spec.model import Experts
from pentad.workers.model import experts
from pentad.workers.model.weight_grad import accumulate
from pentad.workers.parallel import expert_parallel
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.parallel.expert_parallel import DispatchMode

State = dict[str, torch.Tensor]


class Case(NamedTuple):
    """`tokens` [ranks, T, H] of each rank and the gradients of what becomes of them; whole weights, where 'bias' may be
    one of."""

    shape: Experts
    state: State
    tokens: torch.Tensor
    gradients: torch.Tensor
    way: DispatchMode = "all_to_all"
    scale: float = 0.25
    remake: bool = False


class Answer(NamedTuple):
    """Of one rank; gradients of experts are of those that it has. `came` tokens were sent to it."""

    mixed: torch.Tensor
    dnormed: torch.Tensor
    gradients: State
    load: torch.Tensor
    came: int


def drawn(shape: Experts, ranks: int, tokens: int, hidden: int = 6, bias: torch.Tensor | None = None) -> State:
    """Weights, tokens and gradients from a seed of their own."""
    generator = torch.Generator().manual_seed(3)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    found = {
        "router": normal(shape.num_experts, hidden),
        "gate_up": normal(shape.num_experts, 2 * shape.intermediate_size, hidden) / 2,
        "down": normal(shape.num_experts, hidden, shape.intermediate_size) / 2,
    }
    if shape.shared_intermediate_size:
        found["shared_gate_up"] = normal(2 * shape.shared_intermediate_size, hidden) / 2
        found["shared_down"] = normal(hidden, shape.shared_intermediate_size) / 2
    if bias is not None:
        found["bias"] = bias.to(torch.float64)
    return found | {"tokens": normal(ranks, tokens, hidden), "gradients": normal(ranks, tokens, hidden)}


def case_of(shape: Experts, ranks: int, tokens: int, bias: torch.Tensor | None = None, **options: Any) -> Case:
    state = drawn(shape, ranks, tokens, bias=bias)
    return Case(shape, state, state.pop("tokens"), state.pop("gradients"), **options)


def run_rank(case: Case, rank: int, ranks: int, group: dist.ProcessGroup | None) -> Answer:
    """F, B and W of one rank."""
    shape, normed = case.shape, case.tokens[rank].clone()
    site, held = expert_parallel.ExpertParallelGroup(group, rank, case.way), shape.num_experts // ranks
    mine = slice(rank * held, (rank + 1) * held)
    parts = {k: v[mine].contiguous() if k in ("gate_up", "down") else v for k, v in case.state.items()}
    w, g = bound(parts)
    mixed, kept, remade = run_to_completion(experts.forward(w, shape, normed, case.state.get("bias"), site))
    if case.remake:
        remade = experts.remade(w, normed, kept)
    dnormed, work = run_to_completion(
        experts.backward(w, g, shape, normed, kept, remade, case.gradients[rank], scale=case.scale)
    )
    accumulate(work)
    gradients = {name: each for name, each in g._asdict().items() if each is not None}
    return Answer(mixed, dnormed, gradients, kept.routed.load, len(normed if kept.tokens is None else kept.tokens))


def reference(case: Case) -> list[Answer]:
    """Every expert works on every token, and autograd makes the gradients, each rank's tokens being a microbatch."""
    p = {name: each.clone().requires_grad_(name != "bias") for name, each in case.state.items()}
    tokens, shape, answers = case.tokens.clone().requires_grad_(), case.shape, []
    total = torch.zeros((), dtype=torch.float64)
    for x, dmixed in zip(tokens, case.gradients, strict=True):
        products = x @ p["router"].T
        scores = products.softmax(-1) if shape.scoring_func == "softmax" else products.sigmoid()
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
        mixed = torch.zeros_like(x)
        for expert in range(shape.num_experts):
            made = _network(x, p["gate_up"][expert], p["down"][expert])
            mixed = mixed + shape.routed_scaling_factor * weights[:, expert, None] * made
        if shape.shared_intermediate_size:
            mixed = mixed + _network(x, p["shared_gate_up"], p["shared_down"])
        shares = scores if shape.scoring_func == "softmax" else scores / scores.sum(-1, keepdim=True)
        balance = shape.aux_loss_coef * shape.num_experts / shape.top_k * (chosen.mean(0) * shares.mean(0)).sum()
        total = total + (mixed * dmixed).sum() + case.scale * len(x) * balance
        answers.append((mixed.detach(), chosen.sum(0).long()))
    total.backward()
    gradients = {name: each.grad for name, each in p.items() if each.grad is not None}
    assert tokens.grad is not None
    return [Answer(mixed, dx, gradients, load, 0) for (mixed, load), dx in zip(answers, tokens.grad, strict=True)]


def _network(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (F.silu(gate) * up) @ down.T


def check(case: Case, found: list[Answer]) -> None:
    """Everything to 1e-10; what ranks hold together is the sum, what they hold apart the whole."""
    expected = reference(case)
    for mine, there in zip(found, expected, strict=True):
        assert relative_error(mine.mixed, there.mixed) < 1e-10
        assert relative_error(mine.dnormed, there.dnormed) < 1e-10
        assert torch.equal(mine.load, there.load)
    for name, gradient in expected[0].gradients.items():
        parts = [answer.gradients[name] for answer in found]
        whole = torch.cat(parts) if name in ("gate_up", "down") else torch.stack(parts).sum(0)
        assert relative_error(whole, gradient) < 1e-10, name


def bound(parts: State) -> tuple[experts.Weights, experts.Weights]:
    """Weights by name, detached, and zeros as wide as gradients are."""
    wide = torch.float64 if parts["router"].dtype == torch.float64 else torch.float32
    w: list[Any] = [parts[name].detach() if name in parts else None for name in experts.Weights._fields]
    g: list[Any] = [None if each is None else torch.zeros_like(each, dtype=wide) for each in w]
    return experts.Weights(*w), experts.Weights(*g)


class Ranks:
    """Processes, of which the first so many run a case, each with a GPU where `device` is cuda."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.pool = Pool(size, _serve, device)

    def run(self, case: Case) -> list[Answer]:
        """An answer a rank; raises with a rank's traceback when one fails."""
        ranks = len(case.tokens)
        self.pool.order([case] * ranks)
        return self.pool.answers(ranks, Answer)

    def stop(self) -> None:
        self.pool.stop()


def _serve(end: Connection, rank: int, size: int, device: str, folder: str) -> None:
    torch.set_num_threads(1)
    faulthandler.enable()
    backend = "gloo"
    if device == "cuda":
        backend, device = "nccl", f"cuda:{rank}"
        torch.cuda.set_device(rank)
    else:
        # fills memory that nobody has written with NaN, which must not matter
        torch.use_deterministic_algorithms(True)
    meeting, patience = f"file://{Path(folder, 'meeting')}", timedelta(seconds=80)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size, timeout=patience)
    groups = {1: None} | {n: dist.new_group(list(range(n)), timeout=patience) for n in (2, 4) if n <= size}
    while True:
        try:
            case = end.recv()
        except EOFError:
            dist.destroy_process_group()
            return
        try:
            ranks = len(case.tokens)
            end.send(_moved(run_rank(_moved(case, device), rank, ranks, groups[ranks]), "cpu"))
        except BaseException:
            end.send(traceback.format_exc())


def _moved(nested: Any, device: str) -> Any:
    """A named tuple with all its tensors, those in dicts too, on a device."""

    def there(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: each.to(device) for name, each in value.items()}
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return type(nested)(*map(there, nested))
