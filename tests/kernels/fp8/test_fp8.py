"""Casts to 8 bits and scaled products: laws of the reference, and on a GPU the kernels against it."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error
from fp8_recipes import RECIPES, Casting, amax_for, assert_nearly_equal

from pentad.kernels.fp8 import fp8_cast as fp8_cast_module
from pentad.kernels.fp8 import fp8_gemm as fp8_gemm_module
from pentad.kernels.fp8 import fp8_glu as fp8_glu_module
from pentad.kernels.fp8 import fp8_norm
from pentad.kernels.fp8.fp8_cast import forms_of, fp8_cast, fp8_transpose
from pentad.kernels.fp8.fp8_gemm import accumulate_fp8_gradient_, fp8_gemm
from pentad.kernels.fp8.fp8_glu import fp8_glu, fp8_glu_backward, glu_amax, glu_backward_amax
from pentad.kernels.fp8.fp8_norm import fp8_normed, fp8_rms_norm, rms_norm_amax
from pentad.kernels.fp8.fp8_tensor import Amax, Fp8Tensor, Recipe, Role, Scaling, quantize

pytestmark = pytest.mark.usefixtures("fresh_memory_holds_nan")
SCALINGS: list[Scaling] = ["tensor", "row", "block"]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("role", ["activation", "gradient", "weight"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_cast_is_off_by_at_most_half_a_step_of_its_tile(scaling: Scaling, role: Role, power_of_two: bool) -> None:
    """E4M3 has 3 mantissa bits, E5M2 has 2; below the smallest normal number all steps are equal."""
    recipe = Recipe(scaling, "e5m2", power_of_two=power_of_two)
    x = torch.randn(256, 384) * torch.logspace(-6, 3, 384)
    found = quantize(x, recipe, role)
    info = torch.finfo(found.values.dtype)
    scales = found._replace(values=torch.ones_like(x)).dequantize(torch.float32)
    bound = torch.maximum(x.abs(), info.smallest_normal * scales) * info.eps / 2
    assert ((found.dequantize(torch.float32) - x).abs() <= bound * (1 + 1e-5)).all()
    assert found.values.float().abs().amax() > info.max / 2 - 1
    if power_of_two:
        assert torch.equal(torch.frexp(found.scales)[0], torch.full_like(found.scales, 0.5))


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("role", ["activation", "gradient", "weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_a_part_are_those_of_the_whole(parts: int, role: Role, dtype: torch.dtype) -> None:
    """Rows as context and sequence parallelism cut them, columns as row-parallel products do."""
    recipe, x = Recipe("block", "e5m2"), (torch.randn(512, 512) * torch.logspace(-3, 3, 512)).to(dtype)
    rows, columns = forms_of(x, recipe, role)
    assert rows is not None and columns is not None
    for dim in (0, 1):
        for number, part in enumerate(x.chunk(parts, dim)):
            found = forms_of(part.contiguous(), recipe, role)
            for form, whole, along in ((found.rows, rows, dim), (found.columns, columns, 1 - dim)):
                assert form is not None
                for each, all_parts in zip(form, whole, strict=True):
                    assert torch.equal(each.float(), all_parts.chunk(parts, along)[number].float())


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_zeros_stay_zeros_and_what_is_not_finite_is_seen(scaling: Scaling, power_of_two: bool) -> None:
    x, recipe = torch.zeros(128, 256), Recipe(scaling, power_of_two=power_of_two)
    assert torch.equal(quantize(x, recipe, "activation").dequantize(torch.float32), x)
    for bad in (torch.nan, torch.inf):
        x[3, 5] = bad
        found = quantize(x, recipe, "activation")
        assert not found.dequantize(torch.float32)[3, 5].isfinite() and not found.scales.isfinite().all()


def test_what_exceeds_a_given_maximum_saturates() -> None:
    x = torch.tensor([[1.0, 2.0, -8.0, 0.5] * 32] * 128)
    found = quantize(x, Recipe("tensor"), "activation", torch.full((1, 1), 2.0)).dequantize(torch.float32)
    assert torch.allclose(found, x.clamp(-2, 2))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_are_those_of_the_numbers_that_the_operands_stand_for(scaling: Scaling) -> None:
    recipe, wide = Recipe(scaling), torch.float64
    x, dy, weight = torch.randn(256, 384).double(), torch.randn(256, 128).double(), torch.randn(128, 384).double()
    (x_rows, x_columns), (dy_rows, dy_columns) = forms_of(x, recipe, "activation"), forms_of(dy, recipe, "gradient")
    w_rows, w_columns = forms_of(weight, recipe, "weight")
    assert x_rows and x_columns and dy_rows and dy_columns and w_rows and w_columns
    main = torch.ones(128, 384, dtype=wide)
    accumulate_fp8_gradient_(main, dy_columns, x_columns)
    products = [(fp8_gemm(x_rows, w_rows, wide), x @ weight.t()), (fp8_gemm(dy_rows, w_columns, wide), dy @ weight)]
    for found, exact in [*products, (main - 1, dy.t() @ x)]:
        assert 0.01 < relative_error(found, exact) < 0.05
    operands = [(x_rows, w_rows), (dy_rows, w_columns), (dy_columns, x_columns)]
    for (a, b), (found, _) in zip(operands, [*products, (main - 1, None)], strict=True):
        assert relative_error(found, a.dequantize(wide) @ b.dequantize(wide).t()) < 1e-12


def on_cpu(found: Fp8Tensor | None) -> Fp8Tensor | None:
    return found and Fp8Tensor(found.values.cpu(), found.scales.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 128), (1024, 1536), (14336, 4096)])
def test_triton_transposes_bytes(shape: tuple[int, int]) -> None:
    values = torch.randint(256, shape, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    found = fp8_transpose(values)
    assert found.is_contiguous() and torch.equal(found.view(torch.uint8), values.view(torch.uint8).t())


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("role", ["activation", "gradient", "weight"])
@pytest.mark.parametrize("shape", [(128, 128), (128, 256), (256, 5120), (4096, 384)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_casts_with_the_bits_of_the_reference(
    recipe: Recipe, role: Role, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = torch.randn(*shape, device="cuda", dtype=dtype)
    amax = amax_for(recipe, x)
    on_host = amax and Amax(*(each.cpu() for each in amax))
    want = forms_of(x.float().cpu(), recipe, role, on_host)
    for a, b in zip(fp8_cast(x, recipe, role, amax), want, strict=True):
        assert_nearly_equal(on_cpu(a), b, differing=0.0)


@pytest.mark.sampled(11)
@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("width", [128, 1152, 4096, 14336])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_fuses_casts_as_the_reference_does(recipe: Recipe, width: int, dtype: torch.dtype) -> None:
    x, residual, dy = torch.randn(3, 256, width, device="cuda", dtype=dtype)
    gate_up, weight = torch.cat((x, residual), 1), torch.randn(width, device="cuda", dtype=dtype)
    amax, of_gradients = amax_for(recipe, 4 * x), amax_for(recipe, 4 * gate_up)

    def results(convert: object) -> list[Fp8Tensor | None]:
        def to(t: torch.Tensor) -> torch.Tensor:
            return t if convert is None else t.float().cpu()

        a = amax and Amax(*map(to, amax))
        rows = a and a.rows
        b = None if a is None or of_gradients is None else (Amax(*map(to, of_gradients)), a.columns)
        normed, summed, rstd = fp8_rms_norm(to(x), to(weight), 1e-5, recipe, rows, to(residual), 1.0)
        if convert is not None:  # the sum that the kernel rounded
            summed = to((x.float() + residual.float()).to(dtype))
            normed, _, rstd = fp8_rms_norm(summed, to(weight), 1e-5, recipe, rows, None, 1.0)
        given = (dy, gate_up) if convert is None else (dy.cpu(), gate_up.cpu())  # rounding may be to their dtype
        dgate_up, y = fp8_glu_backward(*given, recipe, "silu", b)
        again = fp8_normed(summed, to(weight), rstd, recipe, a, 1.0)
        return [normed, *again, fp8_glu(to(gate_up), recipe, "silu", rows), *dgate_up, y]

    for found, want in zip(results(None), results("cpu"), strict=True):
        assert_nearly_equal(on_cpu(found), want, differing=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [each for each in RECIPES if each.scaling == "tensor"])
@pytest.mark.parametrize("width", [128, 1152, 14336])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_records_the_maximum_of_what_it_casts(recipe: Recipe, width: int, dtype: torch.dtype) -> None:
    """The casts agree with the reference, too. Scaling by 1/8 is exact, and a residual of zero rounds nothing."""
    casting = Casting(fp8_cast_module, fp8_norm, fp8_glu_module)
    x, dy = torch.randn(2, 256, width, device="cuda", dtype=dtype)
    given = x, torch.zeros_like(x), dy, torch.randn(width, device="cuda", dtype=dtype)
    found = casting.recorded(recipe, *given)
    want = casting.recorded(recipe, *(each.float().cpu() for each in given))
    for (form, amax), (wanted, maximum) in zip(found, want, strict=True):
        assert_nearly_equal(on_cpu(form), wanted, differing=5e-3)
        torch.testing.assert_close(amax.cpu(), maximum, rtol=1e-4, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("t", "n", "k"), [(128, 128, 128), (256, 384, 640), (1024, 512, 4096)])
def test_cublas_multiplies_as_the_reference_does(scaling: Scaling, t: int, n: int, k: int) -> None:
    recipe, wide = Recipe(scaling), torch.float64
    x, dy, weight = (torch.randn(*shape, device="cuda") for shape in ((t, k), (t, n), (n, k)))
    (x_rows, x_columns), (dy_rows, dy_columns) = forms_of(x, recipe, "activation"), forms_of(dy, recipe, "gradient")
    w_rows, w_columns = forms_of(weight, recipe, "weight")
    assert x_rows and x_columns and dy_rows and dy_columns and w_rows and w_columns
    main = torch.ones(n, k, device="cuda")
    accumulate_fp8_gradient_(main, dy_columns, x_columns, overwrite=True)
    accumulate_fp8_gradient_(main, dy_columns, x_columns)
    forward, backward = fp8_gemm(x_rows, w_rows, torch.bfloat16), fp8_gemm(dy_rows, w_columns, torch.bfloat16)
    pairs = [
        (forward, x_rows, w_rows, 4e-3),
        (backward, dy_rows, w_columns, 4e-3),
        (main / 2, dy_columns, x_columns, 1e-3),
    ]
    for found, a, b, bound in pairs:
        assert relative_error(found, a.dequantize(wide) @ b.dequantize(wide).t()) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [Recipe("tensor"), Recipe("tensor", "e5m2"), Recipe("row"), Recipe("block")])
def test_cublas_adds_to_the_main_gradient_in_the_product(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of a separate product and sum."""
    x, dy = torch.randn(4096, 2048, device="cuda"), torch.randn(4096, 3072, device="cuda")
    (_, x_columns), (_, dy_columns) = forms_of(x, recipe, "activation"), forms_of(dy, recipe, "gradient")
    assert x_columns and dy_columns
    main = torch.randn(3072, 2048, device="cuda")
    expected = main + fp8_gemm(dy_columns, x_columns, torch.float32)
    monkeypatch.delattr(fp8_gemm_module, "fp8_gemm")  # no separate product is made
    accumulate_fp8_gradient_(main, dy_columns, x_columns)
    assert torch.equal(main, expected)


@pytest.mark.gpu
def test_where_cublas_cannot_add_a_product_is_made_first() -> None:
    """Here because the address is no multiple of 16 bytes."""
    recipe = Recipe("tensor")
    x, dy = torch.randn(256, 384, device="cuda"), torch.randn(256, 128, device="cuda")
    (_, x_columns), (_, dy_columns) = forms_of(x, recipe, "activation"), forms_of(dy, recipe, "gradient")
    assert x_columns and dy_columns
    main = torch.ones(128 * 384 + 1, device="cuda")[1:].view(128, 384)
    expected = 1 + fp8_gemm(dy_columns, x_columns, torch.float32)
    accumulate_fp8_gradient_(main, dy_columns, x_columns)
    assert torch.equal(main, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 4096, 14336])
def test_triton_finds_the_maxima_of_what_is_not_written(width: int) -> None:
    x, residual, dy = torch.randn(3, 512, width, device="cuda", dtype=torch.bfloat16)
    weight, gate_up = torch.randn(width, device="cuda", dtype=torch.bfloat16), torch.cat((x, residual), 1)
    found = [rms_norm_amax(x, weight, 1e-5, None, 1.0)[0], glu_amax(gate_up), *glu_backward_amax(dy, gate_up)]
    x, weight, gate_up, dy = (t.float().cpu() for t in (x, weight, gate_up, dy))
    want = [rms_norm_amax(x, weight, 1e-5, None, 1.0)[0], glu_amax(gate_up), *glu_backward_amax(dy, gate_up)]
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=0)
