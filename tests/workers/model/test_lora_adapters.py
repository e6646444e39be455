"""Adapters of one rank: what they add, and its gradients, against autograd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pentad.workers.linear.weight_grad import Param, Params, accumulate_wgrads
from pentad.workers.model.lora import ExpertAdapter, LocalAdapter
from pentad.workers.params.param_buffers import Unwritten

SCALE = 0.5
CONTEXT: Any = SimpleNamespace(lora_scale=SCALE)
ROWS, K, N, RANK = 7, 5, 6, 2
ENDS = [3, 3, 7]  # ends of the rows of three experts, one of which has none


def matrices(*shape: int) -> Params:
    """A and B of a module, with gradients that are not zero before."""
    sizes = {"attn.q.lora_A": (*shape, RANK, K), "attn.q.lora_B": (*shape, N, RANK)}
    return {name: Param(torch.randn(size), torch.ones(size)) for name, size in sizes.items()}


def autograd(params: Params, x: Tensor, out: Tensor, dout: Tensor, ends: list[int]) -> tuple[Tensor, ...]:
    """The sum of `out` and what the adapters add; the gradients of x, A and B."""
    a, b = (params[name].weight.reshape(-1, *params[name].weight.shape[-2:]) for name in params)
    leaves = [x.clone().requires_grad_(), a.clone().requires_grad_(), b.clone().requires_grad_()]
    starts = [0, *ends]
    rows = [leaves[0][start:end] for start, end in zip(starts, ends, strict=False)]
    found = out + SCALE * torch.cat([x @ a.T @ b.T for x, a, b in zip(rows, leaves[1], leaves[2], strict=True)])
    return found.detach(), *torch.autograd.grad(found, leaves, dout)


def check(params: Params, expected: tuple[Tensor, ...], found: tuple[Tensor, Tensor]) -> None:
    """Compares what was added, the gradient of x, and what W has added to the gradients of A and B."""
    for value, other in zip(found, expected[:2], strict=True):
        torch.testing.assert_close(value, other)
    for param, other in zip(params.values(), expected[2:], strict=True):
        assert param.gradient is not None
        torch.testing.assert_close(param.gradient, 1 + other.reshape(param.gradient.shape))


def test_an_adapter_of_a_rank_s_own_tokens_has_the_gradients_of_autograd() -> None:
    params, x, out, dout = matrices(), torch.randn(ROWS, K), torch.randn(ROWS, N), torch.randn(ROWS, N)
    adapter, expected = LocalAdapter.bind(params, "attn.q", N), autograd(params, x, out, dout, [ROWS])
    dx = torch.zeros(ROWS, K)
    adapter.add_(CONTEXT, x, out)
    accumulate_wgrads(adapter.backward_(CONTEXT, x, dout, dx), Unwritten())
    check(params, expected, (out, dx))


def test_a_module_without_an_adapter_is_left_alone() -> None:
    adapter, out, dx = LocalAdapter.bind({}, "attn.q", N), torch.randn(ROWS, N), torch.randn(ROWS, K)
    before = out.clone(), dx.clone()
    adapter.add_(CONTEXT, torch.randn(ROWS, K), out)
    assert not adapter.backward_(CONTEXT, torch.randn(ROWS, K), out, dx)
    assert torch.equal(out, before[0]) and torch.equal(dx, before[1])
    assert ExpertAdapter.bind({}, "attn.q") is None


@pytest.mark.parametrize("in_order", [True, False])
def test_the_adapters_of_experts_have_the_gradients_of_autograd(in_order: bool) -> None:
    """The rows of a batch are in the order of their experts, or are found by their indices."""
    params, out, dout = matrices(3), torch.randn(ROWS, N), torch.randn(ROWS, N)
    batch, indices = torch.randn(ROWS, K), torch.randperm(ROWS, dtype=torch.int32)
    x, offsets = batch if in_order else batch[indices.long()], torch.tensor(ENDS, dtype=torch.int32)
    adapter, expected = ExpertAdapter.bind(params, "attn.q"), autograd(params, x, out, dout, ENDS)
    assert adapter is not None
    adapter.add_(CONTEXT, x, offsets, out)
    dx = torch.zeros(ROWS, K)
    dnarrow = adapter.input_grad_(CONTEXT, dout, offsets, dx)
    work = adapter.wgrads(CONTEXT, dout, batch, dnarrow, offsets, None, None if in_order else indices)
    accumulate_wgrads(work, Unwritten())
    check(params, expected, (out, dx))
