"""Delayed scaling on one rank: which maxima scale a cast, and when they change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pentad.kernels.fp8.fp8_tensor import Recipe, Role, quantize
from pentad.workers.linear.amax_history import AmaxHistory, reduce_maxima
from pentad.workers.linear.casts import Casts, SplitOver
from pentad.workers.linear.fp8_samples import Fp8Samples

CPU, RECIPE, WHOLE = torch.device("cpu"), Recipe("tensor", "e5m2"), SplitOver()
YES, NO = torch.tensor(True), torch.tensor(False)


def casts_of(*names: str) -> tuple[Casts, AmaxHistory]:
    history = AmaxHistory(names, CPU)
    return Casts(RECIPE, CPU, torch.float32, history), history


def end_step(history: AmaxHistory, valid: Tensor = YES) -> None:
    reduce_maxima([(history, None)], None)
    history.advance(valid)


def amaxes(history: AmaxHistory, name: str = "w") -> list[float]:
    return [float(each) for each in history.by_name[f"fp8_amax.{name}"]]


@pytest.mark.parametrize("role", ["activation", "gradient"])
def test_a_cast_is_scaled_by_the_largest_of_all_of_the_step_before(role: Role) -> None:
    """Casts of the first step are scaled by their own maximum; larger values in later steps saturate."""
    casts, history = casts_of("w")
    steps = [[torch.randn(128, 256) * size for size in sizes] for sizes in ((1.0, 3.0, 2.0), (5.0, 0.1), (1.0,))]
    before: Tensor | None = None
    for operands in steps:
        casts.begin_step(None)
        assert not history.is_known  # the other operand has no maximum
        for x in operands:
            found = casts.cast(x, role, "w", WHOLE)
            scaled_by = x.abs().amax().view(1, 1) if before is None else before
            for form, matrix in zip(found, (x, x.t()), strict=True):
                assert form is not None
                expected = quantize(matrix, RECIPE, role, scaled_by)
                assert torch.equal(form.values.float(), expected.values.float())
                assert torch.equal(form.scales, expected.scales)
        before = torch.stack([x.abs().amax() for x in operands]).amax().view(1, 1)
        end_step(history)


def test_maxima_of_both_operands_make_casts_single_passes_with_the_same_bits() -> None:
    """`is_known` decides which kernels run, and nothing else."""
    x, dy = torch.randn(128, 256), torch.randn(128, 256)
    found = []
    for is_known in (False, True):
        casts, history = casts_of("w", "v")
        history.load({f"fp8_amax.{name}": torch.tensor([1.5, 0.5]) for name in ("w", "v")})
        casts.begin_step(None)
        assert history.is_known
        history.is_known = is_known
        weight, gate_up = torch.linspace(0.5, 1.5, 256), torch.cat((x, dy), 1)
        forms, saved = casts.norm(x, dy, weight, 1e-5, 0.0, "w", WHOLE)
        again = casts.normed_again(saved, weight, 0.0, "w", rows=True, columns=True)
        gated = casts.glu(gate_up, "silu", "w", WHOLE)
        gradient, columns = casts.glu_backward(dy, gate_up, "silu", "w", "v", WHOLE)
        other = casts.cast(dy, "gradient", "w", WHOLE)
        made = [form for each in (forms, again, gated, gradient, columns, other) for form in each if form is not None]
        end_step(history)
        found.append(([(form.values.float(), form.scales) for form in made], history.values.clone()))
    (plain, maxima), (fused, fused_maxima) = found
    assert len(plain) == len(fused) == 9
    assert torch.equal(maxima, fused_maxima) and (maxima[0] > 0).all() and maxima[1, 1] > 0
    for one, same in zip(plain, fused, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))


def test_a_step_that_is_not_valid_leaves_the_maxima_and_one_ahead_of_its_norm_does_not_save_them() -> None:
    casts, history = casts_of("w")
    history.load({"fp8_amax.w": torch.tensor([2.0, 4.0])})
    casts.begin_step(None)
    casts.cast(torch.full((128, 128), 3.0), "activation", "w", WHOLE)
    casts.cast(torch.full((128, 128), 5.0), "gradient", "w", WHOLE)
    reduce_maxima([(history, None)], None)
    history.look_ahead()
    assert amaxes(history) == [2.0, 4.0]
    assert [float(history.operands["w", role].amax) for role in ("activation", "gradient")] == [3.0, 5.0]
    history.advance(NO)
    assert [float(history.operands["w", role].amax) for role in ("activation", "gradient")] == [2.0, 4.0]
    history.advance(YES)
    assert amaxes(history) == [3.0, 5.0]


def test_zeros_and_what_is_not_finite_become_no_maximum() -> None:
    casts, history = casts_of("w")
    history.load({"fp8_amax.w": torch.tensor([2.0, 4.0])})
    casts.begin_step(None)
    casts.cast(torch.zeros(128, 128), "activation", "w", WHOLE)
    casts.cast(torch.full((128, 128), torch.inf), "gradient", "w", WHOLE)
    end_step(history)
    assert amaxes(history) == [2.0, 4.0]


def test_what_a_checkpoint_lacks_is_scaled_by_its_own_maximum() -> None:
    casts, history = casts_of("w", "v")
    history.load({"fp8_amax.v": torch.tensor([2.0, 4.0])})
    casts.begin_step(None)
    assert not history.is_known and amaxes(history, "v") == [2.0, 4.0]
    x = torch.full((128, 128), 8.0)
    for name, want in (("w", 8.0), ("v", 2.0)):
        form = casts.cast(x, "activation", name, WHOLE, columns=False).rows
        assert form is not None and torch.equal(form.dequantize(torch.float32), torch.full_like(x, want))


def test_weights_are_scaled_by_their_own_maximum() -> None:
    casts, history = casts_of("w")
    history.load({"fp8_amax.w": torch.tensor([1.0, 1.0])})
    casts.begin_step(None)
    form = casts.weight(torch.full((128, 128), 8.0), WHOLE).rows
    assert form is not None and (form.dequantize(torch.float32) == 8).all()


def test_samples_have_the_maxima_before_the_casts_and_count_what_saturates() -> None:
    casts, history = casts_of("w")
    history.load({"fp8_amax.w": torch.tensor([1.0, 1.0])})
    casts.begin_step(Fp8Samples())
    x = torch.full((128, 128), 0.25)
    x[0, :3] = torch.tensor([7.0, -2.0, 0.0])
    form = casts.cast(x, "activation", "w", WHOLE, columns=False).rows
    assert casts.samples is not None and form is not None
    casts.samples.add("w", "activation", form)
    pending = casts.take_samples()
    assert pending is not None
    (found,) = pending.read()
    assert (found.amax, found.saturated, found.underflowed, found.values) == (7.0, 2, 1, 128 * 128)
