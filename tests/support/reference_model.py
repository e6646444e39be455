"""Single-process training with autograd and torch's AdamW, or Muon: the reference for every mesh and schedule."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import NamedTuple

import reference_families
import torch
from fp8_reference import AmaxHistory, in_8_bits
from reference_muon import ReferenceMuon, is_muons

from pentad.schedules.spec.lora import LoraSpec, adapter_tensors
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.optimizer import OptimizerSpec, ParamGroup
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import Tensor, tensors
from pentad.workers.params.param_init import initial_values

State = dict[str, torch.Tensor]
Trained = tuple[list[float], list[State], list[float], State]  # losses, gradients, norms of each step; last weights


class GlobalBatch(NamedTuple):
    """All [sequences, S]. Tokens attend to those with the same index in `documents`."""

    inputs: torch.Tensor
    following: torch.Tensor  # the tokens after them
    is_target: torch.Tensor  # which of those count in the loss
    documents: torch.Tensor


def train(plan: Plan, batches: list[GlobalBatch], sets: list[torch.Tensor] | None = None) -> Trained:
    """One step for each batch. Experts are balanced over tokens with the same index in `sets` [sequences, S], not
    counting negative ones; None: over each microbatch.

    Losses are those of the next token, gradients are before clipping, and the last weights include router biases.
    """
    found = [each for each in tensors(plan.model) if not each.tied_to]
    if plan.lora is not None:
        return _train_adapters(plan, plan.lora, found, batches)
    p = {each.name: initial_values(each, plan.seed).double().requires_grad_() for each in found}
    bias, history = zero_biases(plan), AmaxHistory()

    def losses_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        given = batches[step], None if sets is None else sets[step]
        history.begin_step()
        losses = _mean_losses(plan, p | bias, *given, history)
        _update_biases(plan, p, bias, *given)
        return losses

    losses, gradients, norms, weights = optimize(plan, p, len(batches), losses_of)
    return losses, gradients, norms, weights | bias


def _train_adapters(plan: Plan, lora: LoraSpec, base: list[Tensor], batches: list[GlobalBatch]) -> Trained:
    """Only adapters are parameters; every matrix is used as W + alpha / rank B A."""
    frozen = {each.name: initial_values(each, plan.seed).double() for each in base} | zero_biases(plan)
    adapters = adapter_tensors(lora, base)
    p = {each.name: initial_values(each, plan.seed).double().requires_grad_() for each in adapters}

    def losses_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return _mean_losses(plan, merged(plan.model, lora, frozen, p), batches[step])

    return optimize(plan, p, len(batches), losses_of)


def merged(model: ModelSpec, lora: LoraSpec, frozen: State, adapters: State) -> State:
    """The weights of a model with merged adapters."""
    found = dict(frozen)
    for name, weight in frozen.items():
        layer, tensor = ".".join(name.split(".")[:2]), ".".join(name.split(".")[2:])
        at, parts = f"{layer}.{tensor.split('.')[0]}", _modules(model, tensor, weight, lora.targets)
        deltas = [
            lora.alpha / lora.rank * adapters[f"{at}.{module}.lora_B"] @ adapters[f"{at}.{module}.lora_A"]
            if f"{at}.{module}.lora_A" in adapters
            else weight.new_zeros(rows, weight.shape[1])
            for module, rows in parts.items()
        ]
        if deltas:
            found[name] = weight + torch.cat(deltas)
    return found


def _modules(model: ModelSpec, tensor: str, weight: torch.Tensor, targets: tuple[str, ...]) -> dict[str, int]:
    """The modules whose weights make up a tensor of a layer, with their numbers of rows; empty if no target is among
    them."""
    q, kv = model.heads * model.qk_head_dim, model.kv_heads * model.qk_head_dim
    one = {
        "attention.out": "o_proj",
        "attention.query_down": "q_a_proj",
        "attention.query": "q_b_proj" if model.mla is not None and model.mla.q_lora_rank else "q_proj",
        "attention.latent": "kv_a_proj_with_mqa",
        "attention.keys_values": "kv_b_proj",
        "mlp.down": "down_proj",
        "experts.gate_up": "experts.gate_up_proj",
        "experts.down": "experts.down_proj",
    }
    fused = {"attention.qkv": "qkv_proj", "mlp.gate_up": "gate_up_proj"}
    separate = {
        "attention.qkv": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "mlp.gate_up": {"gate_proj": model.ffn, "up_proj": model.ffn},
    }
    for whole in (one.get(tensor), fused.get(tensor)):
        if whole in targets:
            return {whole.removeprefix("experts."): weight.shape[0]}
    parts = separate.get(tensor, {})
    return parts if set(parts) & set(targets) else {}


def optimize(
    plan: Plan, p: State, steps: int, losses_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
) -> Trained:
    """Runs the plan's optimizer on (loss to report, loss to minimize) of each step."""
    spec = plan.optimizer
    scales = {name: _group_of(spec, name).learning_rate_scale for name in p}
    decays = {name: _weight_decay(spec, name, t) for name, t in p.items()}
    muons = {name: t for name, t in p.items() if spec.name == "muon" and is_muons(name, t)}
    muon = ReferenceMuon(spec, plan.model, muons)
    groups = [
        {"params": [t], "weight_decay": decays[name], "scale": scales[name]}
        for name, t in p.items()
        if name not in muons
    ]
    groups = groups or [{"params": [torch.zeros(1)]}]  # torch refuses an empty list
    adam = torch.optim.AdamW(groups, lr=1.0, betas=(spec.beta1, spec.beta2), eps=spec.eps)
    losses, gradients, norms = [], [], []
    for step in range(steps):
        rate = spec.learning_rate.at(step)
        for group in adam.param_groups:
            group["lr"] = rate * group.get("scale", 1.0)
        for t in p.values():
            t.grad = None
        reported, total = losses_of(step)
        total.backward()
        losses.append(reported.item())
        found = {name: t.grad for name, t in p.items() if t.grad is not None}
        assert found.keys() == p.keys()
        gradients.append({name: gradient.clone() for name, gradient in found.items()})
        norms.append(torch.stack([gradient.norm() for gradient in found.values()]).norm().item())
        for gradient in found.values():
            gradient *= 1.0 if spec.clip_norm is None else min(1.0, spec.clip_norm / norms[-1])
        adam.step()
        for name in muons:
            muon.step(name, rate * scales[name], decays[name])
    return losses, gradients, norms, {name: t.detach() for name, t in p.items()}


def _group_of(spec: OptimizerSpec, name: str) -> ParamGroup:
    return next((group for group in spec.groups if fnmatch.fnmatch(name, group.pattern)), ParamGroup(name))


def _weight_decay(spec: OptimizerSpec, name: str, tensor: torch.Tensor) -> float:
    given = _group_of(spec, name).weight_decay
    if given is not None:
        return given
    is_expert_bias = name.endswith(("experts.gate_up_bias", "experts.down_bias"))
    return spec.weight_decay if tensor.dim() > 1 + is_expert_bias else 0.0


def _mean_losses(
    plan: Plan, p: State, batch: GlobalBatch, sets: torch.Tensor | None = None, history: AmaxHistory | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss of the next token, sum of all losses): means over target tokens. Experts are balanced in each microbatch,
    and their loss is a mean over these; or in each of the `sets`."""
    is_split = sets is None and is_by_microbatch(plan)
    rows = plan.batch.micro_batch_size if is_split else len(batch.inputs)
    weights = p if plan.fp8 is None else in_8_bits(p, plan.fp8, plan.model.layers, history)
    parts = [
        torch.stack(
            reference_families.losses(plan.model, weights, x, y, mask, documents, int(batch.is_target.sum()), sets)
        )
        for x, y, mask, documents in zip(*(tensor.split(rows) for tensor in batch), strict=True)
    ]
    main, routers, mtp, squares = torch.stack(parts).sum(0)
    return main, main + routers / len(parts) + mtp + plan.optimizer.z_loss * squares


def is_by_microbatch(plan: Plan) -> bool:
    """Whether results depend on which samples share a microbatch."""
    return plan.fp8 is not None or (plan.model.experts is not None and plan.model.experts.aux_loss_coef > 0)


def zero_biases(plan: Plan) -> State:
    experts = plan.model.experts
    if experts is None or not experts.has_bias:
        return {}
    layers = range(experts.first_k_dense, plan.model.layers + plan.model.mtp_layers)
    return {f"layers.{n}.experts.bias": torch.zeros(experts.num_experts, dtype=torch.float64) for n in layers}


def _update_biases(plan: Plan, p: State, bias: State, batch: GlobalBatch, sets: torch.Tensor | None) -> None:
    """Moves router biases towards an even load, replacing the dictionary's values."""
    experts = plan.model.experts
    if not bias or experts is None:
        return
    with torch.no_grad():
        routes = reference_families.routes(plan.model, p | bias, batch.inputs, batch.following, batch.documents)
    for each, name in zip(routes, sorted(bias, key=lambda name: int(name.split(".")[1])), strict=True):
        chosen = each.chosen if sets is None else each.chosen[sets.flatten() >= 0]
        load = reference_families.load(experts, each._replace(chosen=chosen)).double()
        bias[name] = bias[name] + experts.bias_update_rate * torch.sign(load.mean() - load)
