"""The reference implementation itself: its losses are those of transformers, and every weight has a gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models
import pytest
import reference_families as reference
import torch
import torch.nn.functional as F
from hf_files import take, tensors_of
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from pentad.schedules.spec.model import Experts, ModelSpec
from pentad.schedules.spec.tensors import tensors as tensors_of_model

ROWS = torch.randint(64, (3, 21), generator=torch.Generator().manual_seed(2))
TOKENS, TARGETS = ROWS[:, :-1], ROWS[:, 1:]


def imported(name: str, folder: Path, **other: Any) -> tuple[Any, ModelSpec, dict[str, torch.Tensor]]:
    """A model of transformers, its spec and its tensors in float64."""
    torch.manual_seed(0)
    model = hf_models.make(name, **other)
    done = take(hf_models.save(model, folder / "files"), folder / "out")
    found = {key.removeprefix("model."): tensor.double() for key, tensor in tensors_of(done).items()}
    return model, done.model, found


def differentiated(name: str, folder: Path, aux_loss_coef: float) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of transformers, and its tensors with gradients of the reference's loss."""
    model, shape, tensors = imported(name, folder)
    if shape.experts is not None:
        shape = replace(shape, experts=replace(shape.experts, aux_loss_coef=aux_loss_coef))
    for tensor in tensors.values():
        tensor.requires_grad_()
    reference.loss(shape, tensors, TOKENS, TARGETS).backward()
    return model, tensors


def test_names_and_shapes_of_a_llama_are_those_of_a_rank(tmp_path: Path) -> None:
    _, shape, tensors = imported("llama", tmp_path)
    held = {spec.name: spec.shape for spec in tensors_of_model(shape)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == held


@pytest.mark.parametrize(
    ("name", "layers", "even"),
    [("mixtral", 1, False), ("qwen3-moe", 1, False), ("mixtral", 2, True), ("qwen3-moe-dense", 3, True)],
)
def test_the_balance_loss_of_an_import_is_that_of_transformers(
    name: str, layers: int, even: bool, tmp_path: Path
) -> None:
    """Exactly so for one layer, and for several that route alike: transformers multiplies means over all layers."""
    model, shape, tensors = imported(name, tmp_path, num_hidden_layers=layers, router_aux_loss_coef=0.25)
    assert shape.experts is not None
    if even:
        theirs = [module.gate.weight.data for module in model.modules() if hasattr(module, "gate")]
        for router in [*theirs, *(tensor for key, tensor in tensors.items() if key.endswith("router"))]:
            router.zero_()
    with torch.no_grad():
        out = model(TOKENS, labels=TOKENS, output_router_logits=True)
    found = reference.losses(shape, tensors, TOKENS, TARGETS)
    experts, top_k = shape.experts.num_experts, shape.experts.top_k
    expected = 0.25 * float(load_balancing_loss_func(out.router_logits, experts, top_k))
    assert float(found.routers) == pytest.approx(expected, rel=1e-5)
    main = F.cross_entropy(out.logits.flatten(0, 1), TARGETS.flatten())
    assert float(found.main) == pytest.approx(float(main), rel=1e-5)


def test_the_balance_loss_of_an_even_load_is_one() -> None:
    experts = Experts(4, 2, 8)
    chosen = torch.tensor([[0, 1], [2, 3]])
    ones = torch.ones(2, 2), torch.ones(2)
    even = reference.Routes(torch.full((2, 4), 0.25), chosen, *ones)
    assert float(reference.balance(experts, even)) == 1.0
    sure = reference.Routes(torch.tensor([[1.0, 0, 0, 0]] * 2), torch.tensor([[0, 1], [0, 2]]), *ones)
    assert float(reference.balance(experts, sure)) == 2.0
    assert reference.load(experts, sure).tolist() == [2, 1, 1, 0]


def test_the_mtp_loss_is_averaged_over_all_tokens(tmp_path: Path) -> None:
    _, shape, tensors = imported("deepseek-v3-mtp", tmp_path)
    found = reference.losses(shape, tensors, TOKENS, TARGETS)
    expected = 0.0
    for number, logits in enumerate(reference.predictions(shape, tensors, TOKENS, TARGETS)):
        for row in range(3):
            for at in range(TOKENS.shape[1] - 1 - number):
                expected -= float(logits[row, at].log_softmax(-1)[ROWS[row, at + number + 2]])
    assert float(found.mtp) == pytest.approx(0.3 / 2 * expected / TOKENS.numel(), rel=1e-12)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", hf_models.CASES)
def test_every_weight_has_a_gradient_and_expert_biases_have_none(name: str, tmp_path: Path) -> None:
    _, tensors = differentiated(name, tmp_path, aux_loss_coef=0.01)
    for key, tensor in tensors.items():
        if key.endswith("experts.bias"):
            assert tensor.grad is None
        else:
            assert tensor.grad is not None and float(tensor.grad.abs().max()) > 0, key


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-moe", "llama-3.1"])
def test_gradients_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    float32_model, tensors = differentiated(name, tmp_path, aux_loss_coef=0.0)
    with hf_models.widened(name, monkeypatch):
        model = hf_models.make(name).double()
        model.load_state_dict(float32_model.state_dict())
        F.cross_entropy(model(TOKENS).logits.flatten(0, 1), TARGETS.flatten()).backward()
    for mine, theirs in (
        ("embedding", model.model.embed_tokens.weight),
        ("head", model.lm_head.weight),
        ("layers.1.attention_norm", model.model.layers[1].input_layernorm.weight),
        ("layers.0.mlp_norm", model.model.layers[0].post_attention_layernorm.weight),
        ("layers.1.attention.out", model.model.layers[1].self_attn.o_proj.weight),
    ):
        found = tensors[mine].grad
        assert found is not None and torch.allclose(found, theirs.grad, rtol=1e-9, atol=1e-13), mine
