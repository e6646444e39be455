"""The sum of two parts of an attention: the Triton kernel against torch, on a GPU or through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error

pytest.importorskip("triton")

from interpreted import index_by_one_element

from pentad.kernels.attention import attention_triton
from pentad.kernels.attention.attention_partial import merge_partials_reference_

__all__ = ["index_by_one_element"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
@pytest.mark.parametrize(("batch", "heads", "length", "width"), [(1, 2, 40, 16), (2, 3, 33, 24), (1, 1, 1, 128)])
def test_the_kernel_adds_parts_up_as_the_formula_does(batch, heads, length, width, dtype, bound):
    """Into the second half of the queries; tensors are views of [B, S, heads, D], the part's lse one of [N, B S]."""
    out = torch.randn(batch, 2 * length, heads, width, device=DEVICE).transpose(1, 2)
    lse = 10 * torch.randn(batch, heads, 2 * length, device=DEVICE)
    more = torch.randn(batch, length, heads, width, device=DEVICE).to(dtype).transpose(1, 2)
    more_lse = 10 * torch.randn(heads, batch, length, device=DEVICE).transpose(0, 1)
    expected, expected_lse = out.double(), lse.double()
    merge_partials_reference_(expected[:, :, length:], expected_lse[:, :, length:], more.double(), more_lse.double())
    attention_triton.merge_partials_(out[:, :, length:], lse[:, :, length:], more, more_lse)
    assert relative_error(out, expected) < bound
    assert relative_error(lse, expected_lse) < bound
