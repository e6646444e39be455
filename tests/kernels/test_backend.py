"""Operations take the same tensors on every device."""

import pytest
import torch

from pentad.kernels.attention.rope import rope_
from pentad.kernels.cross_entropy import cross_entropy
from pentad.kernels.moe.grouped_gemm import grouped_gemm
from pentad.kernels.rms_norm import rms_norm


def test_a_tensor_that_is_not_contiguous_is_refused_by_place_and_by_name() -> None:
    logits, strided = torch.randn(4, 8), torch.zeros(8, dtype=torch.int64)[::2]
    said = r"targets of cross_entropy has shape \(4,\) and strides \(2,\): expected contiguous"
    for call in (lambda: cross_entropy(logits, strided), lambda: cross_entropy(logits, targets=strided)):
        with pytest.raises(ValueError, match=said):
            call()


def test_an_optional_tensor_is_contiguous_or_absent() -> None:
    x, weight = torch.randn(4, 8), torch.ones(8)
    rms_norm(x, weight, 1e-5)
    with pytest.raises(ValueError, match="residual of rms_norm"):
        rms_norm(x, weight, 1e-5, torch.randn(8, 4).t())


def test_dense_rows_may_have_gaps_between_them_and_not_within() -> None:
    cos, sin = torch.randn(2, 4, 4)
    rope_(torch.randn(4, 2, 16)[..., :8], cos, sin)
    with pytest.raises(ValueError, match=r"x of rope_ .* expected a contiguous last dimension"):
        rope_(torch.randn(4, 2, 16)[..., ::2], cos, sin)


def test_a_strided_tensor_may_lie_anyhow() -> None:
    offsets = torch.tensor([1, 3], dtype=torch.int32)
    assert grouped_gemm(torch.randn(3, 4), torch.randn(2, 4, 5).transpose(1, 2), offsets).shape == (3, 5)
