"""Cross-entropy: the reference against torch in float64, and Triton against the reference on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from pentad.kernels.cross_entropy import IGNORE_INDEX, cross_entropy, cross_entropy_backward_

pytestmark = pytest.mark.usefixtures("fresh_memory_holds_nan")


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_the_reference_agrees_with_torch(z_loss: float) -> None:
    logits = (5 * torch.randn(6, 11, dtype=torch.float64)).requires_grad_()
    targets = torch.tensor([0, 10, IGNORE_INDEX, 3, 3, IGNORE_INDEX])
    expected = F.cross_entropy(logits, targets, reduction="none")
    squares = torch.where(targets == IGNORE_INDEX, 0.0, logits.logsumexp(1).square())
    (0.25 * (expected + z_loss * squares)).sum().backward()
    buffer = logits.detach().clone()
    loss, lse = cross_entropy(buffer, targets)
    assert torch.allclose(loss, expected, rtol=1e-14, atol=0)
    assert torch.allclose(lse, torch.logsumexp(logits, 1), rtol=1e-14, atol=0)
    cross_entropy_backward_(buffer, targets, lse, 0.25, z_loss=z_loss)
    assert logits.grad is not None and torch.allclose(buffer, logits.grad, rtol=1e-12, atol=1e-16)


def test_two_vocabulary_shards_give_the_full_loss() -> None:
    logits = 5 * torch.randn(6, 10, dtype=torch.float64)
    targets = torch.tensor([0, 9, IGNORE_INDEX, 3, 5, 4])
    full_loss, full_lse = cross_entropy(logits, targets)
    full_gradient = logits.clone()
    cross_entropy_backward_(full_gradient, targets, full_lse, 0.5)

    shards = [logits[:, :5].clone(), logits[:, 5:].clone()]
    low = torch.where(targets >= 5, -1, targets)
    high = torch.where(targets == IGNORE_INDEX, IGNORE_INDEX, torch.where(targets < 5, -1, targets - 5))
    parts = [cross_entropy(shard, local) for shard, local in zip(shards, (low, high), strict=True)]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    chosen = sum(part_lse - loss for loss, part_lse in parts)
    assert torch.allclose(torch.where(targets == IGNORE_INDEX, 0.0, lse - chosen), full_loss, atol=1e-13)
    for shard, local in zip(shards, (low, high), strict=True):
        cross_entropy_backward_(shard, local, lse, 0.5)
    assert torch.allclose(torch.cat(shards, dim=1), full_gradient, atol=1e-15)


def test_16_bit_logits_have_a_float32_loss() -> None:
    loss, lse = cross_entropy(torch.randn(2, 4, dtype=torch.bfloat16), torch.tensor([1, 2]))
    assert (loss.dtype, lse.dtype) == (torch.float32,) * 2


@pytest.mark.sampled(7)
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("vocabulary", [1, 5, 4097, 8192, 128256, 151936])
@pytest.mark.parametrize("rows", [1, 7, 257])
def test_triton_agrees_with_the_reference(rows: int, vocabulary: int, dtype: torch.dtype, bound: float) -> None:
    logits = 4 * torch.randn(rows, vocabulary, device="cuda", dtype=dtype)
    targets = torch.randint(vocabulary, (rows,), device="cuda")
    targets[2::7] = -1
    targets[1::3] = IGNORE_INDEX
    expected_loss, expected_lse = cross_entropy(logits.double(), targets)
    expected = logits.double()
    cross_entropy_backward_(expected, targets, expected_lse, 0.125, z_loss=1e-3)

    loss, lse = cross_entropy(logits, targets)
    again = cross_entropy(logits, targets)
    assert (loss - expected_loss).abs().max() < 1e-5 * expected_lse.abs().max().clamp(min=1.0)
    assert (lse - expected_lse).abs().max() < 1e-5 * expected_lse.abs().max().clamp(min=1.0)
    assert torch.equal(loss, again[0]) and torch.equal(lse, again[1])
    assert (loss[1::3] == 0).all()
    cross_entropy_backward_(logits, targets, lse, 0.125, z_loss=1e-3)
    # p - 1 cancels where the target is nearly certain, so float32 errors are relative to 1.
    assert (logits - expected).norm() < bound * expected.norm().clamp(min=0.125)
    assert (logits[1::3] == 0).all()


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits() -> None:
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    rows, vocabulary = 16800, 128256
    logits = torch.zeros(rows, vocabulary, device="cuda", dtype=torch.bfloat16)
    logits[-1, -1] = 20.0
    targets = torch.full((rows,), vocabulary - 1, device="cuda")
    loss, lse = cross_entropy(logits, targets)
    assert loss[-1].item() == pytest.approx(torch.tensor(128255 * 2.718281828459045**-20 + 1).log().item(), abs=1e-5)
    assert loss[0].item() == pytest.approx(11.7618, abs=1e-3)
    cross_entropy_backward_(logits, targets, lse, 1.0)
    assert logits[-2, -1].item() == pytest.approx(-1.0, abs=1e-3)
    assert abs(logits[-1, -1].item()) < 1e-3
