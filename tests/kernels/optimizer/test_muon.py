"""Muon: Newton-Schulz against a reference of its own and torch.optim.Muon, which rounds to bfloat16; the element-wise
updates against torch's formulas, and on a GPU through Triton."""

import pytest
import torch
from closeness import relative_error
from reference_muon import newton_schulz as expected_newton_schulz
from torch import Tensor

from pentad.kernels.optimizer.muon import (
    MuonCoefficients,
    muon_,
    muon_coefficients,
    muon_direction_,
    muon_optimistic_,
)
from pentad.kernels.optimizer.newton_schulz import newton_schulz
from pentad.kernels.optimizer.param_remainders import nearest

SHAPES = [(8, 8), (12, 5), (5, 12), (1, 7)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def coefficients(*, nesterov: bool = True) -> MuonCoefficients:
    return muon_coefficients(3e-3, 0.95, 0.1, 1.5, nesterov=nesterov)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_newton_schulz_is_that_of_every_matrix(rows: int, columns: int) -> None:
    x = 1e-3 * torch.randn(3, rows, columns, dtype=torch.float64)
    for found, matrix in zip(newton_schulz(x), x, strict=True):
        assert relative_error(found, expected_newton_schulz(matrix)) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_newton_schulz_keeps_the_dtype(device: str, dtype: torch.dtype, bound: float) -> None:
    x = torch.randn(2, 64, 160, device=device).to(dtype)
    found = newton_schulz(x)
    assert found.dtype == dtype
    assert relative_error(found, newton_schulz(x.double())) < bound


def test_zeros_stay_zeros() -> None:
    assert not newton_schulz(torch.zeros(2, 4, 6)).any()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_a_step_is_that_of_torch_up_to_bfloat16(nesterov: bool, adjust: str) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(48, 16, dtype=torch.float64))
    theirs = torch.optim.Muon(
        [parameter], lr=1e-2, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust
    )
    adjustment = {"original": 3**0.5, "match_rms_adamw": 0.2 * 48**0.5}[adjust]
    c = muon_coefficients(1e-2, 0.9, 0.1, adjustment, nesterov=nesterov)
    master = parameter.detach().clone()
    start, momentum, scale = master.clone(), torch.zeros_like(master), torch.ones(1, dtype=torch.float64)
    for _ in range(5):
        parameter.grad = torch.randn(48, 16, dtype=torch.float64)
        theirs.step()
        direction = torch.empty_like(master)
        muon_direction_(direction, momentum, parameter.grad, scale, c)
        muon_(master, momentum, parameter.grad, newton_schulz(direction[None])[0].contiguous(), None, scale, c)
        assert relative_error(momentum, theirs.state[parameter]["momentum_buffer"]) < 1e-12
        assert relative_error(master - start, parameter.detach() - start) < 3e-2


def shard(n: int, device: str, state: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(master, momentum, gradient, direction)."""
    master, momentum, grad, direction = torch.randn(4, n, device=device)
    return master, (0.1 * momentum).to(state), grad, direction.bfloat16()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("device", DEVICES)
def test_a_scale_that_is_not_finite_changes_nothing(device: str, bad: float) -> None:
    tensors = (*shard(3000, device, torch.float32), torch.zeros(3000, device=device).bfloat16())
    before = [t.clone() for t in tensors]
    muon_(*tensors, torch.tensor([bad], device=device), coefficients())
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_an_optimistic_step_writes_the_bits_of_the_step(device: str, narrow: torch.dtype) -> None:
    master, momentum, grad, direction = shard(3001, device, torch.float32)
    expected, found = torch.empty(2, 3001, device=device, dtype=narrow)
    muon_optimistic_(found, master, direction, coefficients())
    muon_(master, momentum, grad, direction, expected, torch.ones(1, device=device), coefficients())
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 1023, 1025, 4_000_003])
def test_triton_agrees_with_the_reference(n: int, state: torch.dtype) -> None:
    master, momentum, grad, direction = shard(n, "cuda", state)
    scale, c = torch.tensor([0.37], device="cuda"), coefficients()
    master64, momentum64, grad64, direction64 = (t.double() for t in (master, momentum, grad, direction))
    expected = torch.empty_like(master64)
    muon_direction_(expected, momentum64, grad64, scale.double(), c)
    found, out = torch.empty_like(master), torch.empty_like(direction)
    muon_direction_(found, momentum, grad, scale, c)
    assert relative_error(found, expected) < 1e-6
    muon_(master64, momentum64, grad64, direction64, None, scale.double(), c)
    muon_(master, momentum, grad, direction, out, scale, c)
    assert relative_error(master, master64) < 1e-6
    assert relative_error(momentum, momentum64) < (1e-6 if state == torch.float32 else 4e-3)
    assert torch.equal(out, nearest(master, torch.bfloat16))
