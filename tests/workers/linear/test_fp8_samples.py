"""What is counted in 8-bit operands."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pentad.kernels.fp8.fp8_tensor import Recipe, Scaling, quantize
from pentad.workers.linear import fp8_samples
from pentad.workers.linear.fp8_sample import Fp8Sample, merged
from pentad.workers.linear.fp8_samples import Fp8Samples, counts_of


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
def test_counts_are_those_of_the_values(
    monkeypatch: pytest.MonkeyPatch, scaling: Scaling, gradients: Literal["e4m3", "e5m2"]
) -> None:
    """Whatever the size of the chunks that are counted at once."""
    operand = quantize(torch.randn(256, 384) * torch.logspace(-6, 3, 384), Recipe(scaling, gradients), "gradient")
    values, dense = operand.values.float(), operand.dequantize(torch.float64)
    largest = torch.finfo(operand.values.dtype).max
    want = [
        dense.abs().amax().item(),
        (values.abs() == largest).sum().item(),
        (values == 0).sum().item(),
        values.numel(),
    ]
    for chunk in (2**24, 1000):
        monkeypatch.setattr(fp8_samples, "CHUNK", chunk)
        assert counts_of(operand).tolist() == want


class LargestResult(TorchDispatchMode):
    """The number of elements in the largest result of an operation."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not func.is_view:
            self.elements = max(self.elements, found.numel())
        return found


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_a_sample_needs_no_more_memory_than_a_chunk(monkeypatch: pytest.MonkeyPatch, scaling: Scaling) -> None:
    operand = quantize(torch.randn(256, 384), Recipe(scaling), "gradient")
    monkeypatch.setattr(fp8_samples, "CHUNK", 1000)
    with LargestResult() as largest:
        counts_of(operand)
    assert 0 < largest.elements <= 1000


def test_what_is_not_finite_shows_in_the_maximum() -> None:
    x = torch.randn(128, 128)
    x[3, 5] = torch.nan
    samples = Fp8Samples()
    for each in (x, torch.randn(128, 128)):
        samples.add("w", "activation", quantize(each, Recipe("row"), "activation"))
    (found,) = samples.take().read()
    assert math.isnan(found.amax) and found.values == 2 * 128 * 128


def test_samples_of_ranks_add_up() -> None:
    found = merged([Fp8Sample("b", "weight", 2.0, 1, 2, 8), Fp8Sample("a", "weight", 1.0, 0, 0, 8)] * 2)
    assert list(found.values()) == [Fp8Sample("a", "weight", 1.0, 0, 0, 16), Fp8Sample("b", "weight", 2.0, 2, 4, 16)]
    for pair in ((math.nan, 1.0), (1.0, math.nan)):
        assert math.isnan(merged(Fp8Sample("a", "weight", each, 0, 0, 8) for each in pair)["a", "weight"].amax)
