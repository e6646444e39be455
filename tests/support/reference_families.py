"""Every family in one process, straight from the global names, in torch's own words with autograd and for any dtype:
what Hugging Face's classes are held against, and then every mesh. No line of it is shared with what it checks.

B sequences of S tokens, H hidden, N query heads, M key-value heads, D width of a query, E experts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pentad.schedules.spec.model import MLA, Experts, ModelShape, RopeScaling

Tensors = dict[str, Tensor]


class Losses(NamedTuple):
    """Parts of a loss, weighted already: `loss` is their sum."""

    main: Tensor
    balance: Tensor
    predicted: Tensor


class Routes(NamedTuple):
    """Where a layer's tokens [T] went."""

    scores: Tensor  # [T, E], probabilities or sigmoids
    chosen: Tensor  # [T, active]
    weights: Tensor  # [T, active], what the outputs of the chosen ones are multiplied by


def forward(shape: ModelShape, tensors: Tensors, tokens: Tensor) -> Tensor:
    """Logits [B, S, V] of the next tokens."""
    hidden, _ = _hidden(shape, tensors, tokens)
    return hidden @ _head(shape, tensors).T


def predictions(shape: ModelShape, tensors: Tensors, tokens: Tensor, targets: Tensor) -> list[Tensor]:
    """Logits [B, S - K - 1, V] of each predicted layer K: of the positions i for which targets[i + K + 1], the token
    that it predicts, is known."""
    hidden, _ = _hidden(shape, tensors, tokens)
    found = _predicted(shape, tensors, hidden, targets)
    known = [each[:, : targets.shape[1] - number - 1] for number, (each, _) in enumerate(found)]
    return [each @ _head(shape, tensors).T for each in known]


def loss(shape: ModelShape, tensors: Tensors, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of `targets` [B, S], plus the balance loss and that of the predicted layers."""
    return torch.stack(losses(shape, tensors, tokens, targets)).sum()


def losses(shape: ModelShape, tensors: Tensors, tokens: Tensor, targets: Tensor) -> Losses:
    """The balance loss is a sum over all layers with experts, predicted ones too, each over all tokens given; the loss
    of a predicted layer is its sum over B S, though it predicts fewer (arXiv 2412.19437, eq. 24)."""
    hidden, routes = _hidden(shape, tensors, tokens)
    head = _head(shape, tensors)
    main = F.cross_entropy((hidden @ head.T).flatten(0, 1), targets.flatten())
    ahead = main.new_zeros(())
    for number, (each, more) in enumerate(_predicted(shape, tensors, hidden, targets)):
        expected = targets[:, number + 1 :]
        logits, expected = (each[:, : expected.shape[1]] @ head.T).flatten(0, 1), expected.flatten()
        ahead = ahead + F.cross_entropy(logits, expected, reduction="sum") / targets.numel()
        routes += more
    balances = [balance(shape.experts, each) for each in routes if shape.experts is not None]
    even = torch.stack(balances).sum() if balances else main.new_zeros(())
    weight = shape.experts.aux_loss_coef if shape.experts is not None else 0.0
    return Losses(main, weight * even, shape.mtp_loss_weight / max(1, shape.mtp_layers) * ahead)


def routes(shape: ModelShape, tensors: Tensors, tokens: Tensor, targets: Tensor) -> list[Routes]:
    """Of every layer with experts, predicted ones last."""
    hidden, found = _hidden(shape, tensors, tokens)
    return found + [each for _, more in _predicted(shape, tensors, hidden, targets) for each in more]


def balance(experts: Experts, routes: Routes) -> Tensor:
    """E times the sum over experts of (share of choices that fell on it) x (its mean probability); 1 where even
    (arXiv 2101.03961, 2.2, with a token's choices counted as a part of it each)."""
    share = F.one_hot(routes.chosen, experts.num_experts).sum((0, 1)) / routes.chosen.numel()
    probability = routes.scores / routes.scores.sum(-1, keepdim=True)
    return experts.num_experts * (share.to(probability.dtype) * probability.mean(0)).sum()


def load(experts: Experts, routes: Routes) -> Tensor:
    """How many of the choices fell on each expert [E]: what its bias moves by the sign of."""
    return F.one_hot(routes.chosen, experts.num_experts).sum((0, 1))


def route(experts: Experts, router: Tensor, bias: Tensor | None, x: Tensor) -> Routes:
    """The experts of tokens x [T, H]; the bias has a say in who is chosen, and none in the weights."""
    products = x @ router.T
    scores = products.softmax(-1) if experts.scoring_func == "softmax" else products.sigmoid()
    expected = scores.detach() + (0.0 if bias is None else bias)
    if experts.num_groups > 1:
        grouped = expected.unflatten(-1, (experts.num_groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1).topk(experts.topk_groups, -1).indices
        open_to = torch.zeros_like(grouped[..., 0]).scatter(-1, best, 1.0).bool()
        expected = grouped.masked_fill(~open_to[..., None], -math.inf).flatten(-2)
    chosen = expected.topk(experts.top_k, -1).indices
    weights = scores.gather(-1, chosen)
    if experts.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routes(scores, chosen, weights * experts.routed_scaling_factor)


def rope_table(shape: ModelShape, length: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) [length, pairs], float64."""
    width = shape.mla.qk_rope_head_dim if shape.mla is not None else shape.qk_head_dim
    turn = torch.tensor(
        [_frequency(shape.rope_theta, width, i, shape.rope_scaling) for i in range(width // 2)], dtype=torch.float64
    )
    angle = torch.arange(length, dtype=torch.float64)[:, None] * turn
    by = shape.rope_scaling.attention_factor if shape.rope_scaling is not None else 1.0
    return by * angle.cos(), by * angle.sin()


def _frequency(theta: float, width: int, pair: int, scaling: RopeScaling | None) -> float:
    plain = theta ** (-2 * pair / width)
    if scaling is None:
        return plain
    long = plain / scaling.factor
    if scaling.rope_type == "llama3":
        wave = 2 * math.pi / plain
        if wave < scaling.original_max_position_embeddings / scaling.high_freq_factor:
            return plain
        if wave > scaling.original_max_position_embeddings / scaling.low_freq_factor:
            return long
        part = (scaling.original_max_position_embeddings / wave - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        return (1 - part) * long + part * plain
    ends = [
        width * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.high_freq_factor, scaling.low_freq_factor)
    ]
    low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), width - 1)
    part = min(1.0, max(0.0, (pair - low) / (high - low if high > low else 0.001)))
    return part * long + (1 - part) * plain


def _hidden(shape: ModelShape, t: Tensors, tokens: Tensor) -> tuple[Tensor, list[Routes]]:
    """The normed residual stream [B, S, H] at the end, and the routes of layers with experts."""
    x, routes = t["embedding"][tokens], list[Routes]()
    for layer in range(shape.layers):
        x, more = _layer(shape, t, layer, x)
        routes += more
    return _norm(x, t["norm"], shape.norm_eps), routes


def _behind(targets: Tensor, count: int) -> Tensor:
    """The tokens `count` behind the targets, 0 beyond the end of a sequence."""
    return torch.cat([targets[:, count:], targets.new_zeros(len(targets), count)], 1)


def _predicted(shape: ModelShape, t: Tensors, hidden: Tensor, targets: Tensor) -> list[tuple[Tensor, list[Routes]]]:
    """Of each predicted layer its normed stream, and its routes. It gets the normed stream of the layer before it, of
    positions that have the next token, and that token."""
    found, eps = [], shape.norm_eps
    for number in range(shape.mtp_layers):
        at = f"predicted.{number}"
        token = t["embedding"][_behind(targets, number)]
        before = _norm(hidden, t[f"{at}.hidden_norm"], eps)
        joined = torch.cat([_norm(token, t[f"{at}.embedding_norm"], eps), before], -1) @ t[f"{at}.join"].T
        x, routes = _layer(shape, t, shape.layers + number, joined)
        hidden = _norm(x, t[f"{at}.norm"], eps)
        found.append((hidden, routes))
    return found


def _layer(shape: ModelShape, t: Tensors, layer: int, x: Tensor) -> tuple[Tensor, list[Routes]]:
    at, experts = f"layers.{layer}", shape.experts
    normed = _norm(x, t[f"{at}.attention_norm"], shape.norm_eps)
    attention = _attention if shape.mla is None else _latent_attention
    x = x + attention(shape, t, f"{at}.attention", normed)
    normed = _norm(x, t[f"{at}.mlp_norm"], shape.norm_eps)
    if experts is None or layer < experts.first_k_dense:
        return x + _gated(normed, t[f"{at}.mlp.gate_up"], t[f"{at}.mlp.down"]), []
    y, routes = _mixture(experts, t, at, normed.flatten(0, 1))
    return x + y.view_as(x), [routes]


def _mixture(experts: Experts, t: Tensors, at: str, x: Tensor) -> tuple[Tensor, Routes]:
    routes = route(experts, t[f"{at}.experts.router"], t.get(f"{at}.experts.bias"), x)
    share = torch.zeros_like(routes.scores).scatter(-1, routes.chosen, routes.weights)  # [T, E]
    out = torch.zeros_like(x)
    for expert in range(experts.num_experts):
        gate_up, down = t[f"{at}.experts.gate_up"][expert], t[f"{at}.experts.down"][expert]
        out = out + share[:, expert, None] * _gated(x, gate_up, down)
    if experts.shared_intermediate_size:
        out = out + _gated(x, t[f"{at}.shared.gate_up"], t[f"{at}.shared.down"])
    return out, routes


def _attention(shape: ModelShape, t: Tensors, at: str, x: Tensor) -> Tensor:
    n, m, d = shape.heads, shape.kv_heads, shape.qk_head_dim
    q, k, v = (x @ t[f"{at}.qkv"].T).unflatten(-1, (n + 2 * m, d)).transpose(1, 2).split([n, m, m], 1)
    if shape.qk_norm:
        q = _norm(q, t[f"{at}.query_norm"], shape.norm_eps)
        k = _norm(k, t[f"{at}.key_norm"], shape.norm_eps)
    q, k = _rotate(shape, q), _rotate(shape, k)
    k, v = (each.repeat_interleave(n // m, 1) for each in (k, v))
    return _mix(shape, q, k, v) @ t[f"{at}.out"].T


def _latent_attention(shape: ModelShape, t: Tensors, at: str, x: Tensor) -> Tensor:
    latent, eps = shape.mla, shape.norm_eps
    assert isinstance(latent, MLA)
    queries = x
    if latent.q_lora_rank:
        queries = _norm(x @ t[f"{at}.query_down"].T, t[f"{at}.query_norm"], eps)
    q = (queries @ t[f"{at}.query"].T).unflatten(-1, (shape.heads, -1)).transpose(1, 2)
    plain, turned = q.split([latent.qk_nope_head_dim, latent.qk_rope_head_dim], -1)
    down, key = (x @ t[f"{at}.latent"].T).split([latent.kv_lora_rank, latent.qk_rope_head_dim], -1)
    up = _norm(down, t[f"{at}.latent_norm"], eps) @ t[f"{at}.keys_values"].T
    k, v = up.unflatten(-1, (shape.heads, -1)).transpose(1, 2).split([latent.qk_nope_head_dim, latent.v_head_dim], -1)
    shared = _rotate(shape, key[:, None]).expand(-1, shape.heads, -1, -1)
    scaled = torch.cat([plain, _rotate(shape, turned)], -1), torch.cat([k, shared], -1)
    return _mix(shape, *scaled, v) @ t[f"{at}.out"].T


def _mix(shape: ModelShape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [B, N, S, D]; heads side by side, [B, S, N x value width]."""
    sharpness = (shape.rope_scaling.softmax_factor if shape.rope_scaling is not None else 1.0) / math.sqrt(
        shape.qk_head_dim
    )
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (sharpness * (q @ k.transpose(-1, -2))).masked_fill(later, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def _rotate(shape: ModelShape, x: Tensor) -> Tensor:
    """[B, heads, S, D]: pair i is (x[i], x[i + D/2])."""
    cos, sin = (each.to(x) for each in rope_table(shape, x.shape[2]))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _gated(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (F.silu(gate) * up) @ down.T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _head(shape: ModelShape, t: Tensors) -> Tensor:
    return t["embedding" if shape.tie_word_embeddings else "head"]
