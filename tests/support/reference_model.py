"""The whole model in one process, in torch's own words with autograd: what every mesh and schedule is held against."""

from __future__ import annotations

import reference_families
import torch
import torch.nn.functional as F

from pentad.schedules.spec.model import ModelShape
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import tensors
from pentad.workers.params.param_init import initial_values

State = dict[str, torch.Tensor]
Trained = tuple[list[float], list[State], list[float], State]  # losses, gradients, norms; last weights


def initial(plan: Plan) -> dict[str, torch.Tensor]:
    """Parameters by global name, float64, requiring gradients."""
    found = [each for each in tensors(plan.model, 0, plan.model.layers) if not each.like]
    return {s.name: initial_values(s, plan.seed).double().requires_grad_() for s in found}


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """[B, heads, S, D]: pairs (i, i + D/2) turned by position * theta^(-2i/D), as complex numbers."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequency
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def _attention(
    x: torch.Tensor, p: dict[str, torch.Tensor], at: str, m: ModelShape, documents: torch.Tensor | None
) -> torch.Tensor:
    rows, length, _ = x.shape
    q, k, v = (x @ p[f"{at}.qkv"].T).split(
        [m.heads * m.qk_head_dim, m.kv_heads * m.qk_head_dim, m.kv_heads * m.qk_head_dim], -1
    )
    q, k, v = (t.view(rows, length, -1, m.qk_head_dim).transpose(1, 2) for t in (q, k, v))
    q, k = _rotate(q, m.rope_theta), _rotate(k, m.rope_theta)
    k, v = (t.repeat_interleave(m.heads // m.kv_heads, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)) / m.qk_head_dim**0.5
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    heads = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
    return heads.transpose(1, 2).reshape(rows, length, -1) @ p[f"{at}.out"].T


def loss(
    p: dict[str, torch.Tensor],
    m: ModelShape,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean cross-entropy of rows [B, S], whose tokens see those of their own number in `documents` [B, S] only."""
    x = F.embedding(inputs, p["embedding"])
    for i in range(m.layers):
        x = x + _attention(
            _norm(x, p[f"layers.{i}.attention_norm"], m.norm_eps), p, f"layers.{i}.attention", m, documents
        )
        gate, up = (_norm(x, p[f"layers.{i}.mlp_norm"], m.norm_eps) @ p[f"layers.{i}.mlp.gate_up"].T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ p[f"layers.{i}.mlp.down"].T
    logits = _norm(x, p["norm"], m.norm_eps) @ p.get("head", p["embedding"]).T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(plan: Plan, batches: list[tuple[torch.Tensor, torch.Tensor]], documents: list | None = None) -> Trained:
    """One step a batch [sequences, S]: losses of the next token, gradients before clipping, norms, and the last
    parameters, with the experts' biases; `documents` [sequences, S] number those of each batch, where they are told
    apart."""
    p, shape = initial(plan), plan.optimizer
    bias = biases(plan)
    decayed = [t for t in p.values() if t.dim() > 1]
    groups = [
        {"params": decayed, "weight_decay": shape.weight_decay},
        {"params": [t for t in p.values() if t.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=1.0, betas=(shape.beta1, shape.beta2), eps=shape.eps)
    losses, gradients, norms = [], [], []
    for step, (inputs, targets) in enumerate(batches):
        for group in adam.param_groups:
            group["lr"] = shape.rate(step)
        if documents is None:
            main, value = families_loss(plan, p | bias, inputs, targets)
        else:
            main = value = loss(p, plan.model, inputs, targets, documents[step])
        adam.zero_grad()
        value.backward()
        losses.append(main.item())
        move(plan, p, bias, inputs, targets)
        found = {name: t.grad for name, t in p.items() if t.grad is not None}
        assert found.keys() == p.keys()
        gradients.append({name: gradient.clone() for name, gradient in found.items()})
        norms.append(torch.stack([gradient.norm() for gradient in found.values()]).norm().item())
        for gradient in found.values():
            gradient *= min(1.0, shape.clip_norm / norms[-1])
        adam.step()
    return losses, gradients, norms, {name: t.detach() for name, t in (p | bias).items()}


def families_loss(
    plan: Plan, p: State, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(of the next token, of all there is): the means over microbatches, in each of which experts are balanced."""
    rows = plan.batch.rows if is_balanced(plan) else len(inputs)
    parts = [
        reference_families.losses(plan.model, p, *each)
        for each in zip(inputs.split(rows), targets.split(rows), strict=True)
    ]
    whole = torch.stack([torch.stack(part) for part in parts]).mean(0)  # [parts of a loss]
    return whole[0], whole.sum()


def is_balanced(plan: Plan) -> bool:
    return plan.model.experts is not None and plan.model.experts.aux_loss_coef > 0


def biases(plan: Plan) -> State:
    """Of experts, by name: zeros at first."""
    experts = plan.model.experts
    if experts is None or not experts.bias_update_rate:
        return {}
    layers = range(experts.first_k_dense, plan.model.layers + plan.model.mtp_layers)
    return {f"layers.{n}.experts.bias": torch.zeros(experts.num_experts, dtype=torch.float64) for n in layers}


def move(plan: Plan, p: State, bias: State, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Biases, towards an even load, by what this step's tokens have visited."""
    experts = plan.model.experts
    if not bias or experts is None:
        return
    with torch.no_grad():
        routes = reference_families.routes(plan.model, p | bias, inputs, targets)
    for each, (name, old) in zip(
        routes, sorted(bias.items(), key=lambda item: int(item[0].split(".")[1])), strict=True
    ):
        load = reference_families.load(experts, each).double()
        bias[name] = old + experts.bias_update_rate * torch.sign(load.mean() - load)
