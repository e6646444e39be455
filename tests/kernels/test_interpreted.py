"""The Triton kernels on a machine without a GPU, through Triton's interpreter, at sizes it can handle.

tests/conftest.py selects the interpreter before Triton is first imported. With a GPU this file is skipped.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from closeness import relative_error

if torch.cuda.is_available():
    pytest.skip("runs without a GPU", allow_module_level=True)
pytest.importorskip("triton")

from pentad.kernels import cross_entropy_triton, glu_triton, rms_norm_triton
from pentad.kernels.attention import rope_triton
from pentad.kernels.attention.attention_merge import merge_partials_
from pentad.kernels.attention.rope import rope_
from pentad.kernels.attention.rope_tables import rope_tables
from pentad.kernels.backend import IGNORE_INDEX
from pentad.kernels.cross_entropy import cross_entropy, cross_entropy_backward_
from pentad.kernels.embedding_wgrad import accumulate_embedding_gradient_
from pentad.kernels.glu import Activation, glu, glu_backward
from pentad.kernels.heads.qk_norm_rope import norm_and_rotate_, norm_and_rotate_backward_
from pentad.kernels.moe.grouped_gemm import accumulate_grouped_gradient_, grouped_gemm
from pentad.kernels.moe.moe_permute import gather_rows, sum_rows, weighted_glu, weighted_glu_backward
from pentad.kernels.optimizer import adamw_triton, add_shards_triton, muon_triton, param_remainders_triton
from pentad.kernels.optimizer.adamw import adamw_, adamw_optimistic_, coefficients
from pentad.kernels.optimizer.add_shards import add_shards_
from pentad.kernels.optimizer.muon import muon_, muon_coefficients, muon_direction_
from pentad.kernels.optimizer.param_remainders import SplitFloat32, join, nearest
from pentad.kernels.rms_norm import rms_norm, rms_norm_backward

pytestmark = pytest.mark.usefixtures("fresh_memory_holds_nan", "interpreter")
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]


@pytest.mark.parametrize(
    "operation",
    [
        *(adamw_, adamw_optimistic_, cross_entropy, cross_entropy_backward_, rms_norm, rms_norm_backward, rope_),
        *(glu, glu_backward, merge_partials_, grouped_gemm, accumulate_grouped_gradient_),
        *(gather_rows, sum_rows, weighted_glu, weighted_glu_backward, muon_, muon_direction_, add_shards_),
        *(join, nearest, accumulate_embedding_gradient_, norm_and_rotate_, norm_and_rotate_backward_),
    ],
    ids=lambda operation: operation.__name__,
)
def test_a_twin_takes_the_arguments_of_its_operation(operation: Callable[..., Any]) -> None:
    twin = getattr(importlib.import_module(f"{operation.__module__}_triton"), operation.__name__)
    found, expected = (inspect.signature(each).parameters.values() for each in (twin, operation))
    assert [(each.name, each.default) for each in found] == [(each.name, each.default) for each in expected]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("rows", "width", "offset"), [(1, 33, 0.0), (7, 128, 0.0), (5, 576, 0.0), (7, 33, 1.0)])
def test_rms_norm(rows: int, width: int, offset: float, fused: bool, dtype: torch.dtype, bound: float) -> None:
    x, residual, dy, dsummed = torch.randn(4, rows, width, dtype=dtype)
    weight = torch.randn(width, dtype=dtype)
    r, d = (residual, dsummed) if fused else (None, None)
    y, summed, rstd = rms_norm_triton.rms_norm(x, weight, 1e-5, r, offset)
    y64, summed64, rstd64 = rms_norm(x.double(), weight.double(), 1e-5, None if r is None else r.double(), offset)
    again = torch.empty_like(y) if fused else None
    found = rms_norm_triton.rms_norm_backward(dy, summed, weight, rstd, d, offset, again)
    assert again is None or torch.equal(again, y)
    wide = None if d is None else d.double()
    expected = rms_norm_backward(dy.double(), summed64, weight.double(), rstd64, wide, offset)
    for a, b in zip((y, summed, rstd, *found), (y64, summed64, rstd64, *expected), strict=True):
        assert relative_error(a, b) < bound


def test_rms_norm_with_several_rows_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm_triton, "PROGRAMS", 2)
    monkeypatch.setattr(rms_norm_triton, "TILE", 1024)
    summed, dy = torch.randn(2, 51, 64)
    weight, rstd = torch.randn(64), torch.rand(51)
    found = rms_norm_triton.rms_norm_backward(dy, summed, weight, rstd, None)
    expected = rms_norm_backward(dy.double(), summed.double(), weight.double(), rstd.double(), None)
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("tokens", "length", "head_dim"), [(1, 1, 8), (14, 7, 40)])
def test_rope(tokens: int, length: int, head_dim: int, inverse: bool, dtype: torch.dtype, bound: float) -> None:
    packed = torch.randn(tokens, 5, head_dim, dtype=dtype)
    expected = packed.double()
    rope_(expected[:, :3], *rope_tables(length, head_dim, 1e4, "cpu", torch.float64), inverse)
    rope_triton.rope_(packed[:, :3], *rope_tables(length, head_dim, 1e4, "cpu"), inverse)
    assert relative_error(packed, expected) < bound
    assert torch.equal(packed[:, 3:].double(), expected[:, 3:])


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "act"),
    [(1, 1, "silu"), (3, 33, "silu"), (2, 2100, "silu"), (3, 33, "gelu_pytorch_tanh"), (3, 33, "clamped_silu")],
)
def test_glu(rows: int, width: int, act: Activation, dtype: torch.dtype, bound: float) -> None:
    gate_up, dy = 4 * torch.randn(rows, 2 * width, dtype=dtype), torch.randn(rows, width, dtype=dtype)
    dgate_up, recomputed = glu_triton.glu_backward(dy, gate_up, act)
    expected_dgate_up, expected_y = glu_backward(dy.double(), gate_up.double(), act)
    assert relative_error(glu_triton.glu(gate_up, act), expected_y) < bound
    assert relative_error(recomputed, expected_y) < bound
    assert relative_error(dgate_up, expected_dgate_up) < bound


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize(
    ("vocabulary", "softcap", "z_loss"), [(1, 0.0, 0.0), (5, 0.0, 0.1), (8193, 0.0, 0.0), (8193, 3.0, 1e-2)]
)
def test_cross_entropy(vocabulary: int, softcap: float, z_loss: float, dtype: torch.dtype, bound: float) -> None:
    logits = 4 * torch.randn(4, vocabulary, dtype=dtype)
    targets = torch.tensor([0, IGNORE_INDEX, vocabulary - 1, -1])
    expected_loss, expected_lse = cross_entropy(logits.double(), targets, softcap)
    expected = logits.double()
    cross_entropy_backward_(expected, targets, expected_lse, 0.5, softcap, z_loss)
    loss, lse = cross_entropy_triton.cross_entropy(logits, targets, softcap)
    assert torch.allclose(loss.double(), expected_loss, rtol=1e-5, atol=1e-5)
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    cross_entropy_triton.cross_entropy_backward_(logits, targets, lse, 0.5, softcap, z_loss)
    assert torch.allclose(logits.double(), expected, rtol=bound, atol=bound * 0.5)


STATES = [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)]  # the interpreter truncates to bf16 where a GPU rounds


@pytest.mark.sampled(13)
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
@pytest.mark.parametrize(("state", "bound"), STATES)
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("n", [1, 1024, 2049])
def test_adamw(n: int, cast: bool, state: torch.dtype, bound: float, bad: float | None) -> None:
    c = coefficients(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=2)
    master, grad = torch.randn(2, n)
    m, v, out = torch.randn(n).to(state), torch.rand(n).to(state), torch.zeros(n, dtype=torch.bfloat16)
    scale = torch.tensor([0.5 if bad is None else bad])
    expected = p64, m64, v64 = master.double(), m.double(), v.double()
    adamw_(p64, m64, v64, grad.double(), None, scale.double(), c)
    adamw_triton.adamw_(master, m, v, grad, out if cast else None, scale, c)
    for found, exact, most in zip((master, m, v), expected, (1e-6, bound, bound), strict=True):
        assert relative_error(found, exact) < most
    assert torch.equal(out, nearest(master, torch.bfloat16)) if cast and bad is None else not out.any()


@pytest.mark.parametrize("n", [1, 1024, 2049])
def test_steps_of_master_weights_in_two_parts(n: int) -> None:
    master, m, v, grad, direction = torch.randn(5, n)
    parts = SplitFloat32.of(master)
    moments, scale = (m.clone(), v.square_().clone()), torch.tensor([0.5])
    c = coefficients(3e-3, 0.9, 0.95, 1e-8, 0.1, 2)
    adamw_triton.adamw_(master, m, v, grad, None, scale, c)
    adamw_triton.adamw_(parts, *moments, grad, None, scale, c)
    assert torch.equal(parts, master)
    each = muon_coefficients(3e-3, 0.95, 0.1, 1.5, nesterov=True)
    muon_triton.muon_(master, m, grad, direction, None, scale, each)
    muon_triton.muon_(parts, moments[0], grad, direction, None, scale, each)
    assert torch.equal(parts, master)
    assert torch.equal(parts.high, nearest(master, torch.bfloat16))
    assert torch.equal(param_remainders_triton.join(parts.high, parts.low), master)
    assert torch.equal(param_remainders_triton.nearest(master, torch.bfloat16), parts.high)


@pytest.mark.parametrize("bad", [None, float("nan")])
@pytest.mark.parametrize(("state", "bound"), STATES)
@pytest.mark.parametrize("n", [1, 1025])
def test_muon(n: int, state: torch.dtype, bound: float, bad: float | None) -> None:
    c = muon_coefficients(3e-3, 0.95, 0.1, 1.5, nesterov=True)
    master, grad, direction, found = torch.randn(4, n)
    momentum, out = torch.randn(n).to(state), torch.zeros(n, dtype=torch.bfloat16)
    scale = torch.tensor([0.5 if bad is None else bad])
    master64, momentum64, grad64, direction64 = (t.double() for t in (master, momentum, grad, direction))
    if bad is None:
        expected = torch.empty_like(master64)
        muon_direction_(expected, momentum64, grad64, scale.double(), c)
        muon_triton.muon_direction_(found, momentum, grad, scale, c)
        assert relative_error(found, expected) < 1e-6
    muon_(master64, momentum64, grad64, direction64, None, scale.double(), c)
    muon_triton.muon_(master, momentum, grad, direction, out, scale, c)
    assert relative_error(master, master64) < 1e-6
    assert relative_error(momentum, momentum64) < bound
    assert torch.equal(out, nearest(master, torch.bfloat16)) if bad is None else not out.any()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("ranks", "position"), [(2, 0), (2, 1), (5, 3)])
def test_add_shards(ranks: int, position: int, accumulate: bool) -> None:
    full, others = torch.randn(ranks, 2500), torch.randn(ranks - 1, 3000)[:, :2500]
    own = full[position]
    expected, found = own.clone(), own if not accumulate else own.clone()
    add_shards_(expected, own.clone(), others, position, accumulate=accumulate)
    add_shards_triton.add_shards_(found, own, others, position, accumulate=accumulate)
    assert torch.equal(found, expected), "not the bits of a sum in the order of ranks"


@pytest.mark.parametrize("accumulate", [False, True])
def test_narrow_shards_add_up_in_float32(accumulate: bool) -> None:
    terms, found = torch.randn(5, 2500).bfloat16(), torch.randn(2500)
    expected = found.clone()
    add_shards_(expected, terms[0], terms[1:], 0, accumulate=accumulate)
    add_shards_triton.add_shards_(found, terms[0], terms[1:], 0, accumulate=accumulate)
    assert torch.equal(found, expected), "not the bits of a sum in the order of ranks"
