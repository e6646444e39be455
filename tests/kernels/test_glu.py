"""Gated linear units: the reference against autograd in float64, and Triton against the reference on a GPU."""

from collections.abc import Callable

import pytest
import torch
from closeness import relative_error

from pentad.kernels.glu import Activation, glu, glu_backward

pytestmark = pytest.mark.usefixtures("fresh_memory_holds_nan")


def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


UNITS: dict[Activation, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": lambda gate, up: torch.nn.functional.silu(gate) * up,
    "gelu_pytorch_tanh": lambda gate, up: torch.nn.functional.gelu(gate, approximate="tanh") * up,
    "clamped_silu": clamped,
}


@pytest.mark.parametrize("act", UNITS)
def test_the_reference_agrees_with_autograd(act: Activation) -> None:
    gate_up = (5 * torch.randn(5, 14, dtype=torch.float64)).requires_grad_()
    dy = torch.randn(5, 7, dtype=torch.float64)
    y = UNITS[act](gate_up[:, :7], gate_up[:, 7:])
    (y * dy).sum().backward()
    assert relative_error(glu(gate_up.detach(), act), y.detach()) < 1e-14
    dgate_up, recomputed = glu_backward(dy, gate_up.detach(), act)
    assert gate_up.grad is not None and relative_error(dgate_up, gate_up.grad) < 1e-14
    assert relative_error(recomputed, y.detach()) < 1e-14


def test_16_bit_inputs_give_16_bit_results() -> None:
    gate_up = torch.randn(3, 8, dtype=torch.bfloat16)
    y = glu(gate_up)
    dgate_up, recomputed = glu_backward(y, gate_up)
    assert (y.dtype, dgate_up.dtype) == (torch.bfloat16,) * 2
    assert torch.equal(y, recomputed)


@pytest.mark.sampled(17)
@pytest.mark.gpu
@pytest.mark.parametrize("act", UNITS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("width", [1, 33, 128, 576, 4096, 14336])
@pytest.mark.parametrize("rows", [1, 7, 257, 4096])
def test_triton_agrees_with_the_reference(
    rows: int, width: int, dtype: torch.dtype, bound: float, act: Activation
) -> None:
    if rows * width > 4096 * 4096:
        rows = 300
    gate_up = 3 * torch.randn(rows, 2 * width, device="cuda", dtype=dtype)
    dy = torch.randn(rows, width, device="cuda", dtype=dtype)
    y = glu(gate_up, act)
    dgate_up, recomputed = glu_backward(dy, gate_up, act)
    want_dgate_up, want_y = glu_backward(dy.double(), gate_up.double(), act)
    assert relative_error(want_y, glu(gate_up.double(), act)) < 1e-14
    assert relative_error(y, want_y) < bound
    assert relative_error(dgate_up, want_dgate_up) < bound
    assert torch.equal(y, recomputed)
    assert torch.equal(dgate_up, glu_backward(dy, gate_up, act)[0])


@pytest.mark.gpu
def test_large_gates_do_not_overflow() -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]], device="cuda")
    dgate_up, y = glu_backward(torch.ones(1, 5, device="cuda"), gate_up)
    assert torch.equal(y, torch.tensor([[0.0, 0.0, 0.0, 200.0, 1e4]], device="cuda"))
    assert dgate_up.isfinite().all()
