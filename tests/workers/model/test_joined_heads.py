"""Gradients of queries, keys and values become one tensor, with no copy where the kernel has put them side by side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pentad.workers.model.attention import joined_heads


def parts_of(whole: Tensor, heads: tuple[int, ...]) -> list[Tensor]:
    return list(whole.split(heads, dim=2))


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 5)])
def test_neighbours_are_not_copied(batch: int, length: int) -> None:
    whole = torch.randn(3, batch, length, 8, 4)[1]
    found = joined_heads(parts_of(whole, (4, 2, 2)))
    assert torch.equal(found, whole) and found.data_ptr() == whole.data_ptr()


def test_all_others_are_copied() -> None:
    whole = torch.randn(2, 5, 8, 4)
    q, k, v = parts_of(whole, (4, 2, 2))
    strided = torch.randn(2, 5, 8, 8)[..., ::2]
    gaps = torch.randn(2, 5, 9, 4)[:, :, :8]
    for parts in ((q, v, k), (q, k.clone(), v), (q, k), (k, v), parts_of(strided, (4, 4)), parts_of(gaps, (4, 4))):
        found = joined_heads(parts)
        assert torch.equal(found, torch.cat(list(parts), dim=2)) and found.is_contiguous()
