"""Every model family in a single process, in plain torch with autograd, from tensors by global name, in any dtype.

Checked against Hugging Face's classes, and then the reference for every mesh and schedule. Shares no code with what it
checks. B sequences of S tokens, H hidden, N query heads, M key-value heads, D head dim, E experts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pentad.schedules.spec.model import MLA, Experts, ModelSpec, RopeScaling

Tensors = dict[str, Tensor]


class Losses(NamedTuple):
    """The parts of a loss, which is their sum, and the mean squared log-sum-exp of the logits, which is not."""

    main: Tensor
    routers: Tensor
    mtp: Tensor
    squared_lse: Tensor


class Routes(NamedTuple):
    """How a layer routed its tokens [T]."""

    scores: Tensor  # [T, E]
    chosen: Tensor  # [T, K]
    weights: Tensor  # [T, K]
    squared_lse: Tensor  # [T], of the logits


def forward(model: ModelSpec, t: Tensors, tokens: Tensor) -> Tensor:
    """Logits [B, S, V] of the next tokens."""
    hidden, _ = _hidden(model, t, tokens, None)
    return _logits(model, t, hidden)


def predictions(model: ModelSpec, t: Tensors, tokens: Tensor, targets: Tensor) -> list[Tensor]:
    """Logits [B, S - K - 1, V] of each MTP layer K, at the positions i whose targets[i + K + 1] exist."""
    hidden, _ = _hidden(model, t, tokens, None)
    layers = enumerate(_mtp(model, t, hidden, targets, None))
    return [each[:, : targets.shape[1] - number - 1] @ _head(model, t).T for number, (each, _) in layers]


def loss(model: ModelSpec, t: Tensors, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
    """The sum of `losses`."""
    return torch.stack(losses(model, t, tokens, targets, documents=documents)[:3]).sum()


def losses(
    model: ModelSpec,
    t: Tensors,
    tokens: Tensor,
    following: Tensor,
    is_target: Tensor | None = None,
    documents: Tensor | None = None,
    count: int = 0,
    sets: Tensor | None = None,
) -> Losses:
    """Cross-entropy of the `following` tokens [B, S], weighted losses of the routers, weighted MTP loss.

    Tokens attend only to tokens with the same index in `documents` [B, S]. Balancing losses and z-losses are sums over
    layers with experts, each over all given tokens; tokens with the same index in `sets` [B, S] are balanced
    separately, and those with a negative index have no such losses. The other losses are sums over the tokens
    `is_target` [B, S], divided by `count` (default: means); so is an MTP loss, although fewer tokens have one (arXiv
    2412.19437, eq. 24).
    """
    is_target = torch.ones_like(tokens, dtype=torch.bool) if is_target is None else is_target
    count, targets = count or int(is_target.sum()), following.masked_fill(~is_target, -100)
    hidden, routes = _hidden(model, t, tokens, documents)
    head = t.get("mtp.head", _head(model, t))
    logits, counted = _logits(model, t, hidden).flatten(0, 1), is_target.flatten()
    main = F.cross_entropy(logits, targets.flatten(), reduction="sum") / count
    squares = logits.logsumexp(-1)[counted].square().sum() / count
    mtp = main.new_zeros(())
    for number, (normed, more) in enumerate(_mtp(model, t, hidden, following, documents)):
        expected = targets[:, number + 1 :]
        if documents is not None:  # nothing is predicted about the next document
            others = documents[:, number + 1 :] != documents[:, : expected.shape[1]]
            expected = expected.masked_fill(others, -100)
        logits = (normed[:, : expected.shape[1]] @ head.T).flatten(0, 1)
        mtp = mtp + F.cross_entropy(logits, expected.flatten(), reduction="sum") / count
        routes += more
    routers = main.new_zeros(())
    if (experts := model.experts) is not None:
        for each in routes:
            for part, share in _parts(each, sets):
                routers = routers + experts.aux_loss_coef * share * balance(experts, part)
                routers = routers + experts.router_z_loss_coef * share * part.squared_lse.mean()
    return Losses(main, routers, model.mtp_loss_weight / max(1, model.mtp_layers) * mtp, squares)


def _parts(routes: Routes, sets: Tensor | None) -> list[tuple[Routes, float]]:
    """(routes of each set of tokens, its share of all tokens)."""
    if sets is None:
        return [(routes, 1.0)]
    masks = [sets.flatten() == index for index in sets[sets >= 0].unique()]
    return [(Routes(*(each[mask] for each in routes)), float(mask.double().mean())) for mask in masks]


def routes(
    model: ModelSpec, t: Tensors, tokens: Tensor, following: Tensor, documents: Tensor | None = None
) -> list[Routes]:
    """Routes of every layer with experts, MTP layers last."""
    hidden, found = _hidden(model, t, tokens, documents)
    return found + [each for _, more in _mtp(model, t, hidden, following, documents) for each in more]


def balance(experts: Experts, routes: Routes) -> Tensor:
    """E sum_e (share of visits of e) (mean probability of e), 1 at an even load (arXiv 2101.03961, section 2.2)."""
    probability = routes.scores / routes.scores.sum(-1, keepdim=True)
    share = load(experts, routes).to(probability.dtype) / routes.chosen.numel()
    return experts.num_experts * (share * probability.mean(0)).sum()


def load(experts: Experts, routes: Routes) -> Tensor:
    """Number of tokens routed to each expert [E]."""
    return F.one_hot(routes.chosen, experts.num_experts).sum((0, 1))


def route(
    experts: Experts, router: Tensor, bias: Tensor | None, x: Tensor, router_bias: Tensor | float = 0.0
) -> Routes:
    """The experts of tokens x [T, H]; `bias` affects the choice, not the weights."""
    logits = x @ router.T + router_bias
    scores = logits.softmax(-1) if experts.scoring_func == "softmax" else logits.sigmoid()
    ranking = scores.detach() + (0.0 if bias is None else bias)
    if experts.num_groups > 1:
        grouped = ranking.unflatten(-1, (experts.num_groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1).topk(experts.topk_groups, -1).indices
        allowed = torch.zeros_like(grouped[..., 0]).scatter(-1, best, 1.0).bool()
        ranking = grouped.masked_fill(~allowed[..., None], -math.inf).flatten(-2)
    chosen = ranking.topk(experts.top_k, -1).indices
    weights = scores.gather(-1, chosen)
    if experts.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routes(scores, chosen, weights * experts.routed_scaling_factor, logits.logsumexp(-1).square())


def rope_table(model: ModelSpec, length: int, *, local: bool = False) -> tuple[Tensor, Tensor]:
    """(cos, sin) [length, pairs], float64; `local`: for layers with a sliding window that have a base of their own."""
    width, scaling = model.mla.qk_rope_head_dim if model.mla is not None else model.qk_head_dim, model.rope_scaling
    theta = model.rope_theta
    if local and model.rope_local_base_freq:
        theta, scaling = model.rope_local_base_freq, None
    frequencies = [_frequency(theta, width, pair, scaling) for pair in range(width // 2)]
    angle = torch.outer(torch.arange(length, dtype=torch.float64), torch.tensor(frequencies, dtype=torch.float64))
    factor = scaling.attention_factor if scaling is not None else 1.0
    return factor * angle.cos(), factor * angle.sin()


def _frequency(theta: float, width: int, pair: int, scaling: RopeScaling | None) -> float:
    plain = theta ** (-2 * pair / width)
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    long, original = plain / scaling.factor, scaling.original_max_position_embeddings
    if scaling.rope_type == "llama3":
        wavelength = 2 * math.pi / plain
        if wavelength < original / scaling.high_freq_factor:
            return plain
        if wavelength > original / scaling.low_freq_factor:
            return long
        part = original / wavelength - scaling.low_freq_factor
        part /= scaling.high_freq_factor - scaling.low_freq_factor
        return (1 - part) * long + part * plain
    ends = [
        width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        for rotations in (scaling.high_freq_factor, scaling.low_freq_factor)
    ]
    if scaling.truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], width - 1)
    part = min(1.0, max(0.0, (pair - low) / (high - low if high > low else 0.001)))
    return part * long + (1 - part) * plain


def _hidden(model: ModelSpec, t: Tensors, tokens: Tensor, documents: Tensor | None) -> tuple[Tensor, list[Routes]]:
    """The normed residual stream [B, S, H] after the last layer, and the routes of layers with experts."""
    x, routes = t["embedding"][tokens], list[Routes]()
    if model.scale_embedding:
        x = x * math.sqrt(model.hidden)
    for layer in range(model.layers):
        x, more = _layer(model, t, layer, x, documents)
        routes += more
    return _norm(model, t["norm"], x), routes


def _mtp(
    model: ModelSpec, t: Tensors, hidden: Tensor, targets: Tensor, documents: Tensor | None
) -> list[tuple[Tensor, list[Routes]]]:
    """The normed stream of each MTP layer, and its routes.

    A layer reads the normed stream of the layer before and the next token (0 at the end of a sequence).
    """
    found = []
    for number in range(model.mtp_layers):
        prefix = f"mtp.{number}"
        tokens = torch.cat([targets[:, number:], targets.new_zeros(len(targets), number)], 1)
        embedded = _norm(model, t[f"{prefix}.embedding_norm"], t["embedding"][tokens])
        hidden = _norm(model, t[f"{prefix}.hidden_norm"], hidden)
        joined = torch.cat([embedded, hidden], -1) @ t[f"{prefix}.join"].T
        x, routes = _layer(model, t, model.layers + number, joined, documents)
        hidden = _norm(model, t[f"{prefix}.norm"], x)
        found.append((hidden, routes))
    return found


def _layer(
    model: ModelSpec, t: Tensors, layer: int, x: Tensor, documents: Tensor | None
) -> tuple[Tensor, list[Routes]]:
    prefix, experts, routes = f"layers.{layer}", model.experts, list[Routes]()
    types = model.layer_types
    is_local = model.sliding_window > 0 and types[layer % len(types)] == "sliding_attention"
    mixed = _norm(model, t.get(f"{prefix}.attention_norm"), x)
    if model.mla is None:
        mixed = _attention(model, t, f"{prefix}.attention", mixed, documents, is_local)
    else:
        mixed = _latent_attention(model, t, f"{prefix}.attention", mixed, documents)
    x = x + _norm(model, t.get(f"{prefix}.attention_post_norm"), mixed)
    y = _norm(model, t.get(f"{prefix}.mlp_norm"), x)
    if experts is None or layer < experts.first_k_dense:
        y = _gated_mlp(y, t[f"{prefix}.mlp.gate_up"], t[f"{prefix}.mlp.down"], model.hidden_act)
    else:
        flat, found = _moe(experts, t, prefix, y.flatten(0, 1))
        y, routes = flat.view_as(x), [found]
    return x + _norm(model, t.get(f"{prefix}.mlp_post_norm"), y), routes


def _moe(experts: Experts, t: Tensors, prefix: str, x: Tensor) -> tuple[Tensor, Routes]:
    at = f"{prefix}.experts"
    routes = route(experts, t[f"{at}.router"], t.get(f"{at}.bias"), x, t.get(f"{at}.router_bias", 0.0))
    weights = torch.zeros_like(routes.scores).scatter(-1, routes.chosen, routes.weights)  # [T, E]
    out = torch.zeros_like(x)
    for expert in range(experts.num_experts):
        gate_up, down = t[f"{prefix}.experts.gate_up"][expert], t[f"{prefix}.experts.down"][expert]
        if f"{at}.router_bias" in t:
            biases = t[f"{at}.gate_up_bias"][expert], t[f"{at}.down_bias"][expert]
            out = out + weights[:, expert, None] * _clamped_mlp(x, gate_up, down, *biases)
        else:
            out = out + _gated_mlp(x, gate_up, down, weight=weights[:, expert, None])
    if experts.shared_intermediate_size:
        out = out + _gated_mlp(x, t[f"{prefix}.shared.gate_up"], t[f"{prefix}.shared.down"])
    return out, routes


def _attention(
    model: ModelSpec, t: Tensors, prefix: str, x: Tensor, documents: Tensor | None, is_local: bool
) -> Tensor:
    n, m, d = model.heads, model.kv_heads, model.qk_head_dim
    qkv = x @ t[f"{prefix}.qkv"].T
    if model.qkv_bias:
        qkv = qkv + t[f"{prefix}.qkv_bias"]
    q, k, v = qkv.split([n * d, m * d, m * d], -1)
    if model.qk_norm == "all_heads":
        q, k = _norm(model, t[f"{prefix}.query_norm"], q), _norm(model, t[f"{prefix}.key_norm"], k)
    q, k, v = (each.unflatten(-1, (-1, d)).transpose(1, 2) for each in (q, k, v))
    if model.qk_norm == "head":
        q, k = _norm(model, t[f"{prefix}.query_norm"], q), _norm(model, t[f"{prefix}.key_norm"], k)
    q, k = (_rotate(model, each, local=is_local) for each in (q, k))
    k, v = (each.repeat_interleave(n // m, 1) for each in (k, v))
    window, sinks = model.sliding_window if is_local else 0, t.get(f"{prefix}.sinks")
    out = _attend(model, q, k, v, documents, window, sinks) @ t[f"{prefix}.out"].T
    return out + t[f"{prefix}.out_bias"] if model.out_bias else out


def _latent_attention(model: ModelSpec, t: Tensors, prefix: str, x: Tensor, documents: Tensor | None) -> Tensor:
    mla = model.mla
    assert isinstance(mla, MLA)
    q_input = x
    if mla.q_lora_rank:
        q_input = _norm(model, t[f"{prefix}.query_norm"], x @ t[f"{prefix}.query_down"].T)
    q = (q_input @ t[f"{prefix}.query"].T).unflatten(-1, (model.heads, -1)).transpose(1, 2)
    q_nope, q_rope = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], -1)
    latent, k_rope = (x @ t[f"{prefix}.latent"].T).split([mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
    kv = _norm(model, t[f"{prefix}.latent_norm"], latent) @ t[f"{prefix}.keys_values"].T
    k_nope, v = kv.unflatten(-1, (model.heads, -1)).transpose(1, 2).split([mla.qk_nope_head_dim, mla.v_head_dim], -1)
    k_rope = _rotate(model, k_rope[:, None]).expand(-1, model.heads, -1, -1)
    q, k = torch.cat([q_nope, _rotate(model, q_rope)], -1), torch.cat([k_nope, k_rope], -1)
    return _attend(model, q, k, v, documents) @ t[f"{prefix}.out"].T


def _attend(
    model: ModelSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of [B, N, S, D], its heads side by side: [B, S, N D]."""
    factor = model.rope_scaling.softmax_factor if model.rope_scaling is not None else 1.0
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    if documents is not None:
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    if window:
        hidden = hidden | torch.ones_like(hidden).tril(-window)
    scores = factor / math.sqrt(model.query_pre_attn_scalar or model.qk_head_dim) * (q @ k.transpose(-1, -2))
    if model.attn_logit_softcapping:
        scores = model.attn_logit_softcapping * torch.tanh(scores / model.attn_logit_softcapping)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2).flatten(2)


def _rotate(model: ModelSpec, x: Tensor, *, local: bool = False) -> Tensor:
    """[B, heads, S, D]: pair i is (x[i], x[i + D/2])."""
    cos, sin = (each.to(x) for each in rope_table(model, x.shape[2], local=local))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, act: str = "silu", weight: Tensor | float = 1.0) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, -1)
    activated = F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")
    return (activated * up * weight) @ down.T


def _clamped_mlp(x: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor, down_bias: Tensor) -> Tensor:
    """An expert of gpt-oss."""
    gate, up = (x @ gate_up.T + gate_up_bias).chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ down.T + down_bias


def _norm(model: ModelSpec, weight: Tensor | None, x: Tensor) -> Tensor:
    """x itself if the model lacks this norm."""
    if weight is None:
        return x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.norm_eps) * (weight + model.norm_offset)


def _logits(model: ModelSpec, t: Tensors, hidden: Tensor) -> Tensor:
    logits, cap = hidden @ _head(model, t).T, model.final_logit_softcapping
    return cap * torch.tanh(logits / cap) if cap else logits


def _head(model: ModelSpec, t: Tensors) -> Tensor:
    return t["embedding" if model.tie_word_embeddings and "head" not in t else "head"]
