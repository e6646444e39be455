"""The Triton kernels of 8-bit casts on a machine without a GPU, in Triton's interpreter; see test_interpreted.py."""

from __future__ import annotations

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("runs without a GPU", allow_module_level=True)
pytest.importorskip("triton")

from fp8_recipes import RECIPES, Casting, amax_for, assert_nearly_equal

from pentad.kernels.fp8 import fp8_cast as fp8_cast_module
from pentad.kernels.fp8 import fp8_cast_triton, fp8_glu_triton, fp8_norm, fp8_norm_triton
from pentad.kernels.fp8 import fp8_glu as fp8_glu_module
from pentad.kernels.fp8.fp8_cast import fp8_cast, fp8_transpose
from pentad.kernels.fp8.fp8_glu import fp8_glu, fp8_glu_backward, glu_amax, glu_backward_amax
from pentad.kernels.fp8.fp8_norm import fp8_normed, fp8_rms_norm, rms_norm_amax
from pentad.kernels.fp8.fp8_tensor import Amax, Recipe, Role

pytestmark = pytest.mark.usefixtures("fresh_memory_holds_nan", "interpreter", "nearest_numbers")
# All but two are slow.
SLOWLY = [pytest.param(each, marks=[] if each in (RECIPES[0], RECIPES[-1]) else [pytest.mark.slow]) for each in RECIPES]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recipe", SLOWLY)
@pytest.mark.parametrize("role", ["activation", "gradient", "weight"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_casts_have_the_bits_of_the_reference(recipe: Recipe, role: Role, dtype: torch.dtype) -> None:
    """Scales and scaled values are float32, also for inputs in bfloat16."""
    x = torch.randn(256, 384).to(dtype)
    x[3:140, 128:256] = 0
    found = fp8_cast_triton.fp8_cast(x, recipe, role, amax_for(recipe, x))
    for a, b in zip(found, fp8_cast(x, recipe, role, amax_for(recipe, x)), strict=True):
        assert a is not None and b is not None
        assert torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8)) and torch.equal(a.scales, b.scales)


@pytest.mark.parametrize("rows", [True, False])
def test_one_form_is_cast_by_its_own_maxima(rows: bool) -> None:
    x, recipe = torch.randn(128, 256), Recipe("row")
    both = amax_for(recipe, x)
    assert both is not None
    amax = both._replace(**{"columns" if rows else "rows": torch.empty(0, 1)})
    found = fp8_cast_triton.fp8_cast(x, recipe, "activation", amax, rows=rows, columns=not rows)
    want = fp8_cast(x, recipe, "activation", both)
    assert (found.rows is not None, found.columns is not None) == (rows, not rows)
    assert_nearly_equal(found[not rows], want[not rows], differing=0.0)


@pytest.mark.parametrize("recipe", [Recipe("tensor"), Recipe("row"), Recipe("tensor", power_of_two=True)])
def test_a_given_maximum_that_is_not_a_number_is_seen(recipe: Recipe) -> None:
    """The maximum of a tensor may come from another rank."""
    x = torch.randn(128, 256)
    amax = amax_for(recipe, x)
    assert amax is not None
    for each in amax:
        each[0] = torch.nan
    found = fp8_cast_triton.fp8_cast(x, recipe, "gradient", amax)
    for a, b in zip(found, fp8_cast(x, recipe, "gradient", amax), strict=True):
        assert a is not None and b is not None
        assert torch.equal(a.values.float().isnan(), b.values.float().isnan()) and a.values[0].float().isnan().all()
        torch.testing.assert_close(a.scales, b.scales, equal_nan=True)


def test_a_transpose_moves_bytes() -> None:
    values = torch.randint(256, (256, 384), dtype=torch.uint8).view(torch.float8_e4m3fn)
    found = fp8_cast_triton.fp8_transpose(values)
    assert found.is_contiguous() and torch.equal(found.view(torch.uint8), values.view(torch.uint8).t())
    assert torch.equal(found.view(torch.uint8), fp8_transpose(values).view(torch.uint8))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_of_a_tile_with_its_maximum_are_cast_as_the_tile(power_of_two: bool) -> None:
    """Shards of matrices rely on it (workers/params/fp8_shard.py), but their tests cast with the reference."""
    x = torch.randn(256, 384).bfloat16()
    tiles = x.float().abs().view(2, 128, 3, 128).amax((1, 3))
    of_rows = tiles[:, None].expand(2, 128, 3).reshape(-1, 1).contiguous()
    row, block = (Recipe(scaling, power_of_two=power_of_two) for scaling in ("row", "block"))
    amax = Amax(of_rows, of_rows)
    found = fp8_cast_triton.fp8_cast(x.view(-1, 128), row, "weight", amax, columns=False).rows
    want = fp8_cast_triton.fp8_cast(x, block, "weight")
    assert found is not None and want.rows is not None and want.columns is not None
    assert torch.equal(found.values.view(x.shape).view(torch.uint8), want.rows.values.view(torch.uint8))
    assert torch.equal(found.scales, want.rows.scales[:, None].expand(2, 128, 3).reshape(-1, 1))
    assert torch.equal(want.columns.values.view(torch.uint8), want.rows.values.view(torch.uint8).t())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recipe", SLOWLY)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm(recipe: Recipe, fused: bool, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 128, 384).to(dtype)
    weight, amax, r = torch.randn(384).to(dtype), amax_for(recipe, x * 3), residual if fused else None
    of_rows = amax and amax.rows
    found = fp8_norm_triton.fp8_rms_norm(x, weight, 1e-5, recipe, of_rows, r, 1.0)
    want = fp8_rms_norm(x, weight, 1e-5, recipe, of_rows, r, 1.0)
    assert_nearly_equal(found[0], want[0])
    for a, b in zip(found[1:], want[1:], strict=True):
        torch.testing.assert_close(a, b)
    again = fp8_norm_triton.fp8_normed(found[1], weight, found[2], recipe, amax, 1.0)
    assert_nearly_equal(again.rows, found[0], differing=0.0)
    assert_nearly_equal(again.columns, fp8_normed(found[1], weight, found[2], recipe, amax, 1.0).columns)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recipe", SLOWLY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_glu(recipe: Recipe, dtype: torch.dtype) -> None:
    gate_up, dy = torch.randn(128, 512).to(dtype), torch.randn(128, 256).to(dtype)
    amax, of_gradients = amax_for(recipe, 4 * dy), amax_for(recipe, 4 * gate_up)
    of_rows = amax and amax.rows
    found = fp8_glu_triton.fp8_glu(gate_up, recipe, "silu", of_rows)
    assert_nearly_equal(found, fp8_glu(gate_up, recipe, "silu", of_rows))
    both = None if amax is None or of_gradients is None else (of_gradients, 2 * amax.columns)
    (rows, columns), y = fp8_glu_triton.fp8_glu_backward(dy, gate_up, recipe, "silu", both)
    want, want_y = fp8_glu_backward(dy, gate_up, recipe, "silu", both)
    for a, b in ((rows, want.rows), (columns, want.columns), (y, want_y)):
        assert_nearly_equal(a, b)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recipe", [each for each in RECIPES if each.scaling == "tensor"])
def test_casts_record_the_maximum_of_what_they_cast(recipe: Recipe) -> None:
    x, residual, dy = torch.randn(3, 128, 128)
    twins, references = (
        Casting(*each)
        for each in ((fp8_cast_triton, fp8_norm_triton, fp8_glu_triton), (fp8_cast_module, fp8_norm, fp8_glu_module))
    )
    given = recipe, x, residual, dy, torch.randn(128)
    for (form, amax), (want, wanted) in zip(twins.recorded(*given), references.recorded(*given), strict=True):
        assert_nearly_equal(form, want)
        torch.testing.assert_close(amax, wanted)


@pytest.mark.slow
def test_maxima() -> None:
    x, residual, dy = torch.randn(3, 256, 384)
    weight, gate_up = torch.randn(384), torch.cat((x, residual), 1)
    found = fp8_norm_triton.rms_norm_amax(x, weight, 1e-5, residual, 1.0)
    pairs = [*zip(found, rms_norm_amax(x, weight, 1e-5, residual, 1.0), strict=True)]
    pairs += [(fp8_glu_triton.glu_amax(gate_up), glu_amax(gate_up))]
    pairs += zip(fp8_glu_triton.glu_backward_amax(dy, gate_up), glu_backward_amax(dy, gate_up), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)
