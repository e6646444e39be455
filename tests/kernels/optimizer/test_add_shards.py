"""The sum of gradient shards: every rank's part once, in the order of ranks."""

import pytest
import torch

from pentad.kernels.optimizer.add_shards import add_shards_


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_all_ranks_get_the_bits_of_a_sum_in_their_order(ranks: int, accumulate: bool, device: str) -> None:
    parts, before = torch.randn(ranks, 5000, device=device), torch.randn(5000, device=device)
    expected = before.clone() if accumulate else torch.zeros_like(before)
    for part in parts:
        expected += part
    for position in range(ranks):
        others = torch.cat((parts[:position], parts[position + 1 :]))
        found = before.clone()
        add_shards_(found, parts[position], others, position, accumulate=accumulate)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_terms_add_up_in_float32_and_are_rounded_once(device: str) -> None:
    terms = torch.randn(7, 5000, device=device).bfloat16()
    expected, own = terms[0].float(), torch.empty_like(terms[0])
    for term in terms[1:]:
        expected = expected + term.float()
    add_shards_(own, terms[0], terms[1:], 0, accumulate=False)
    assert torch.equal(own, expected.bfloat16())
    found = torch.randn(5000, device=device)
    before = found.clone()
    add_shards_(found, terms[0], terms[1:], 0, accumulate=True)
    for term in terms:
        before = before + term.float()
    assert torch.equal(found, before)


def test_the_sum_may_replace_the_own_part() -> None:
    parts = torch.randn(3, 100, dtype=torch.float64)
    own = parts[1].clone()
    add_shards_(own, own, parts[::2], 1, accumulate=False)
    assert torch.equal(own, parts[0] + parts[1] + parts[2])
