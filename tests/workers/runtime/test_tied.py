"""The gradients of tied embeddings become their sum over the ranks, in place where a rank has the entire gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pentad.workers.runtime.tied import EmbeddingPart, TiedEmbedding

SIZE = 6
ELSEWHERE = torch.arange(SIZE, dtype=torch.float32)  # what the other ranks contribute


def reduced(monkeypatch: pytest.MonkeyPatch, parts: list[EmbeddingPart]) -> Tensor:
    """The sum over the ranks."""
    given = list[Tensor]()

    def all_reduce(total: Tensor, group: object) -> None:
        total += ELSEWHERE
        given.append(total)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    tied = TiedEmbedding.__new__(TiedEmbedding)
    tied.group, tied.parts, tied.size, tied.gradient = None, parts, SIZE, parts[0].gradient
    tied.reduce()
    (total,) = given
    return total


@pytest.mark.parametrize("contributes", [False, True])
def test_a_copy_that_is_not_cut_is_added_up_in_place(monkeypatch: pytest.MonkeyPatch, contributes: bool) -> None:
    gradient = torch.randn(10)
    before, part = gradient.clone(), EmbeddingPart(gradient, slice(2, 8), slice(0, SIZE), contributes)
    total = reduced(monkeypatch, [part])
    assert total.data_ptr() == gradient[2:].data_ptr()
    assert torch.equal(gradient[2:8], ELSEWHERE + (before[2:8] if contributes else 0))
    assert torch.equal(gradient[:2], before[:2]) and torch.equal(gradient[8:], before[8:])


def test_a_rank_with_both_copies_has_their_sum_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = torch.randn(2, SIZE)
    expected = ELSEWHERE + gradients.sum(0)
    reduced(monkeypatch, [EmbeddingPart(each, slice(0, SIZE), slice(0, SIZE), True) for each in gradients])
    assert torch.equal(gradients, expected.expand(2, -1))


def test_shards_are_added_up_in_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = torch.randn(5)
    before, part = gradient.clone(), EmbeddingPart(gradient, slice(1, 4), slice(3, 6), True)
    reduced(monkeypatch, [part])
    assert torch.equal(gradient[1:4], before[1:4] + ELSEWHERE[3:])
    assert torch.equal(gradient[:1], before[:1]) and torch.equal(gradient[4:], before[4:])
