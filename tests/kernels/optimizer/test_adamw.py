"""AdamW: the reference against torch.optim.AdamW in float64, and Triton against the reference on a GPU."""

from typing import Any

import pytest
import torch
from closeness import relative_error
from torch import Tensor

from pentad.kernels.optimizer.adamw import adamw_, adamw_optimistic_, coefficients
from pentad.kernels.optimizer.param_remainders import nearest

SETTINGS: dict[str, Any] = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def test_the_reference_agrees_with_torch_over_many_steps() -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(50, dtype=torch.float64))
    optimizer = torch.optim.AdamW([parameter], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    master = parameter.detach().clone()
    m, v = torch.zeros_like(master), torch.zeros_like(master)
    for step in range(1, 21):
        grad = torch.randn(50, dtype=torch.float64)
        parameter.grad = 0.5 * grad
        optimizer.step()
        scale = torch.tensor([0.5], dtype=torch.float64)
        adamw_(master, m, v, grad, None, scale, coefficients(step=step, **SETTINGS))
        assert relative_error(master, parameter.detach()) < 1e-12
    assert relative_error(m, optimizer.state[parameter]["exp_avg"]) < 1e-12
    assert relative_error(v, optimizer.state[parameter]["exp_avg_sq"]) < 1e-12


def shard(n: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(master, m, v, gradient, compute copy)."""
    master, m, grad = torch.randn(3, n, device=device)
    return master, 0.1 * m, torch.rand(n, device=device) * 0.01, grad, torch.zeros(n, device=device).bfloat16()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_scale_that_is_not_finite_changes_nothing(device: str, bad: float) -> None:
    tensors = shard(3000, device)
    before = [t.clone() for t in tensors]
    adamw_(*tensors, torch.tensor([bad], device=device), coefficients(step=1, **SETTINGS))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_the_output_is_the_cast_master() -> None:
    tensors = shard(100, "cpu")
    adamw_(*tensors, torch.ones(1), coefficients(step=3, **SETTINGS))
    assert torch.equal(tensors[4], nearest(tensors[0], torch.bfloat16))


@pytest.mark.sampled(7)
@pytest.mark.gpu
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("n", [1, 7, 1023, 1024, 1025, 4_000_003])
def test_triton_agrees_with_the_reference(n: int, step: int, cast: bool) -> None:
    master, m, v, grad, out = shard(n, "cuda")
    scale = torch.tensor([0.37], device="cuda")
    expected = p64, m64, v64 = master.double(), m.double(), v.double()
    c = coefficients(step=step, **SETTINGS)
    adamw_(p64, m64, v64, grad.double(), None, scale.double(), c)
    again = p2, m2, v2 = master.clone(), m.clone(), v.clone()
    before = master.double()
    adamw_(master, m, v, grad, out if cast else None, scale, c)
    adamw_(p2, m2, v2, grad, None, scale, c)
    for found, exact, repeated in zip((master, m, v), expected, again, strict=True):
        assert relative_error(found, exact) < 1e-6
        assert torch.equal(found, repeated)
    assert relative_error(master.double() - before, expected[0] - before) < 1e-3  # the update, after float32 rounding
    assert torch.equal(out, nearest(master, torch.bfloat16) if cast else torch.zeros_like(out))


@pytest.mark.gpu
def test_the_bits_of_an_element_do_not_depend_on_where_it_lies() -> None:
    """Nor do they depend on whether its compute weight is written."""
    c, scale, tensors = coefficients(step=7, **SETTINGS), torch.ones(1, device="cuda"), shard(10_000, "cuda")
    pieces = [[each.clone() for each in tensor.split(1000)] for tensor in tensors[:4]]
    adamw_(*tensors, scale, c)
    for master, m, v, grad in zip(*pieces, strict=True):
        adamw_(master, m, v, grad, None, scale, c)
    for whole, parts in zip(tensors[:4], pieces, strict=True):
        assert torch.equal(whole, torch.cat(parts))


@pytest.mark.gpu
def test_a_shard_of_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    n = 2**31 + 5
    master, m, v, grad = (torch.zeros(n, device="cuda") for _ in range(4))
    grad[-1] = 1.0
    adamw_(master, m, v, grad, None, torch.ones(1, device="cuda"), coefficients(step=1, **SETTINGS))
    assert master[-1].item() == pytest.approx(-3e-3, rel=1e-5)
    assert int((master != 0).sum()) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("n", [1, 7, 1023, 1025, 400_003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_optimistic_step_writes_the_bits_of_the_step_and_changes_nothing_else(
    n: int, dtype: torch.dtype, device: str
):
    master, m, v, grad, _ = shard(n, device)
    before = [t.clone() for t in (master, m, v, grad)]
    optimistic, out = torch.zeros(n, device=device, dtype=dtype), torch.zeros(n, device=device, dtype=dtype)
    adamw_optimistic_(optimistic, master, m, v, grad, coefficients(step=3, **SETTINGS))
    assert all(torch.equal(a, b) for a, b in zip((master, m, v, grad), before, strict=True))
    adamw_(master, m, v, grad, out, torch.ones(1, device=device), coefficients(step=3, **SETTINGS))
    assert torch.equal(optimistic, out)


def test_moments_in_bfloat16_are_rounded_after_the_update() -> None:
    """The update itself uses the new moments before they are rounded."""
    torch.manual_seed(0)
    master = torch.randn(64, dtype=torch.float64)
    found = m, v = torch.zeros(2, 64, dtype=torch.bfloat16).unbind()
    expected = m64, v64 = m.double(), v.double()
    exact = master.clone()
    for step in range(1, 6):
        grad, scale = torch.randn(64, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        c = coefficients(step=step, **SETTINGS)
        adamw_(master, m, v, grad, None, scale, c)
        adamw_(exact, m64, v64, grad, None, scale, c)
        for moment in expected:
            moment.copy_(moment.bfloat16())
        assert torch.equal(master, exact)
        assert all(torch.equal(a.double(), b) for a, b in zip(found, expected, strict=True))
