"""The merge of partial attention results: the Triton kernel, on a GPU or in Triton's interpreter, against torch."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error

pytest.importorskip("triton")

from pentad.kernels.attention import attention_merge_triton
from pentad.kernels.attention.attention_merge import merge_partials_

pytestmark = pytest.mark.usefixtures("interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
@pytest.mark.parametrize(("batch", "heads", "length", "width"), [(1, 2, 40, 16), (2, 3, 33, 24), (1, 1, 1, 128)])
def test_the_kernel_agrees_with_the_reference(batch, heads, length, width, dtype, bound):
    """Into the second half of the queries; views of [B, S, heads, D], and of [heads, B, S] for the other part's lse."""
    out = torch.randn(batch, 2 * length, heads, width, device=DEVICE).transpose(1, 2)
    lse = 10 * torch.randn(batch, heads, 2 * length, device=DEVICE)
    other = torch.randn(batch, length, heads, width, device=DEVICE).to(dtype).transpose(1, 2)
    other_lse = 10 * torch.randn(heads, batch, length, device=DEVICE).transpose(0, 1)
    other_lse[:, :, ::3] = -torch.inf  # queries that see no key of the other part
    expected, expected_lse = out.double(), lse.double()
    merge_partials_(expected[:, :, length:], expected_lse[:, :, length:], other.double(), other_lse.double())
    attention_merge_triton.merge_partials_(out[:, :, length:], lse[:, :, length:], other, other_lse)
    assert relative_error(out, expected) < bound
    assert relative_error(lse, expected_lse) < bound
