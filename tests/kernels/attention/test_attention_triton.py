"""Our kernels of attention against the reference in float64: in Triton's interpreter, and on a GPU at real sizes."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from closeness import relative_error
from torch import Tensor

pytest.importorskip("triton")

from pentad.kernels.attention import attention_backward_triton, attention_blocks_triton, attention_forward_triton
from pentad.kernels.attention.attention_blocks_triton import Blocks
from pentad.kernels.attention.attention_partial import partial_attention, partial_attention_backward
from pentad.kernels.attention.attention_reference import (
    AttentionOptions,
    partial_attention_backward_reference,
    partial_attention_reference,
)
from pentad.kernels.attention.packed_runs import PackedLengths

Shape = tuple[int, int, int, int, int, int]  # batch, query heads, key-value heads, queries, keys, head dim
SMALL = Blocks(16, 32, 4, 2), Blocks(32, 16, 4, 2)
SHAPES: list[Shape] = [
    (2, 4, 2, 64, 64, 32),
    (1, 4, 1, 50, 50, 32),
    (1, 2, 2, 40, 90, 32),
    (2, 2, 1, 1, 40, 64),
    (2, 4, 2, 48, 80, 48),
]
GPU_SHAPES: list[Shape] = [
    (2, 4, 2, 512, 512, 128),
    (1, 8, 2, 300, 300, 128),
    (1, 4, 2, 200, 700, 64),
    (2, 4, 4, 1, 257, 32),
    (1, 4, 1, 1, 1, 128),
    (2, 4, 4, 512, 512, 192),
    (1, 4, 2, 200, 700, 192),
    (2, 4, 2, 512, 512, 256),
    (1, 4, 1, 130, 130, 256),
]


def inputs(shape: Shape, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout, as views of [B, S, heads, D]. At MLA's head dim, values are two thirds as wide."""
    batch, heads, groups, queries, keys, width = shape
    value = width if width.bit_count() == 1 else width * 2 // 3
    sizes = ((queries, heads, width), (keys, groups, width), (keys, groups, value), (queries, heads, value))
    return [torch.randn(batch, s, n, w, device=device, dtype=dtype).transpose(1, 2) for s, n, w in sizes]


def packed(
    lengths: list[int],
    device: str,
    causal: bool,
    window: int | None,
    keys: list[int] | None = None,
    softcap: float = 0.0,
) -> AttentionOptions:
    """Segments with these numbers of queries, and as many keys unless `keys` is given."""
    sizes = lengths, lengths if keys is None else keys
    ends = [torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device) for each in sizes]
    packed_lengths = PackedLengths(ends[0], ends[1], (max(sizes[0]), max(sizes[1])))
    return AttentionOptions(causal, 0.2, True, packed_lengths, window_left=window, softcap=softcap)


def empty_segments(scale: int, device: str, window: int | None) -> AttentionOptions:
    """Segments with 48 queries and 40 keys in all, times `scale`: some have no keys, and some no queries."""
    queries, keys = [5, 0, 20, 1, 0, 22], [0, 9, 4, 12, 15, 0]
    return packed([scale * each for each in queries], device, False, window, [scale * each for each in keys])


def errors(tensors: list[Tensor], options: AttentionOptions) -> list[float]:
    """Errors of out, lse, dq, dk and dv relative to float64, absolute where that is zero, as for one key. If some
    queries see no key of this part, the backward gets the output and lse of an attention in which they see others."""
    q, k, v, dout = tensors
    wide_q, wide_k, wide_v = q.double(), k.double(), v.double()
    exact = partial_attention_reference(wide_q, wide_k, wide_v, options)
    found = attention_forward_triton.attention_forward(q, k, v, options)
    out, lse = exact
    sees_nothing = lse.isneginf()
    assert torch.equal(found[1].isneginf(), sees_nothing)
    assert (found[0][sees_nothing] == 0).all()
    if sees_nothing.any():
        lse = torch.logaddexp(lse, torch.zeros_like(lse))
    exact_grads = partial_attention_backward_reference(dout.double(), wide_q, wide_k, wide_v, out, lse, options)
    grads = attention_backward_triton.attention_backward(dout, q, k, v, out.to(q.dtype), lse.float(), options)
    both = zip((*found, *grads), (*exact, *exact_grads), strict=True)
    pairs = [(a.nan_to_num(neginf=0.0), b.nan_to_num(neginf=0.0)) for a, b in both]
    return [relative_error(a, b) if b.norm() > 1e-6 else a.double().norm().item() for a, b in pairs]


@pytest.fixture(params=["short", "long"])
def how_long(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels treat segments as short, or as long enough for blocks without a mask."""
    if request.param == "long":
        monkeypatch.setattr(attention_blocks_triton, "SHORT_SEGMENT", 0)


@pytest.mark.usefixtures("fresh_memory_holds_nan", "interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs without a GPU")
class TestInterpreted:
    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention_backward_triton, "blocks_for", lambda width, rest, device: SMALL)
        monkeypatch.setattr(attention_forward_triton, "forward_blocks", lambda width, rest, device: SMALL[1])

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("window", [None, 10])
    @pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_it_agrees_with_the_reference(self, shape: Shape, causal: bool, window: int | None) -> None:
        options = AttentionOptions(causal, 0.2, True, window_left=window)
        if not causal and window is not None and shape[3] != shape[4]:
            return  # a window is not defined for keys after the last query
        assert max(errors(inputs(shape, "cpu", torch.float32), options)) < 1e-5

    @pytest.mark.slow
    @pytest.mark.usefixtures("how_long")
    @pytest.mark.parametrize("window", [None, 10])
    def test_segments_do_not_see_each_other(self, window: int | None) -> None:
        options = packed([5, 25, 18, 1, 47], "cpu", True, window)
        assert max(errors(inputs((2, 4, 2, 48, 48, 32), "cpu", torch.float32), options)) < 1e-5

    def test_segments_without_keys_or_queries_have_outputs_and_gradients_of_zero(self) -> None:
        options = empty_segments(1, "cpu", None)
        tensors = inputs((1, 4, 2, 48, 40, 32), "cpu", torch.float32)
        assert max(errors(tensors, options)) < 1e-5

    def test_gradients_as_long_and_wide_lie_side_by_side(self) -> None:
        q, k, v, dout = inputs((2, 4, 2, 17, 17, 32), "cpu", torch.float32)
        options = AttentionOptions(True, 0.2, True)
        out, lse = partial_attention_reference(q, k, v, options)
        dq, dk, dv = attention_backward_triton.attention_backward(dout, q, k, v, out, lse, options)
        joined = dq.transpose(1, 2).as_strided((2, 17, 8, 32), (17 * 8 * 32, 8 * 32, 32, 1))
        assert torch.equal(joined, torch.cat((dq, dk, dv), dim=1).transpose(1, 2))

    @pytest.mark.usefixtures("how_long")
    @pytest.mark.parametrize("window", [None, pytest.param(10, marks=pytest.mark.slow)])
    def test_soft_caps(self, window: int | None) -> None:
        options = packed([5, 25, 18, 1, 47], "cpu", True, window, softcap=1.5)
        assert max(errors(inputs((2, 2, 1, 48, 48, 32), "cpu", torch.float32), options)) < 1e-5


@pytest.mark.sampled(7)
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_it_agrees_on_a_gpu(shape: Shape, causal: bool, window: int | None, dtype: torch.dtype) -> None:
    options = AttentionOptions(causal, 0.1, True, window_left=window)
    if causal or window is None or shape[3] == shape[4]:
        assert max(errors(inputs(shape, "cuda", dtype), options)) < 1e-2


@pytest.mark.gpu
@pytest.mark.usefixtures("how_long")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("width", [32, 64, 128, 192, 256])
def test_segments_on_a_gpu(width: int, window: int | None) -> None:
    options = packed([300, 1, 7, 204, 512], "cuda", True, window)
    assert max(errors(inputs((2, 4, 2, 512, 512, width), "cuda", torch.bfloat16), options)) < 1e-2


@pytest.mark.gpu
@pytest.mark.usefixtures("how_long")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("width", [32, 64, 128, 192, 256])
def test_soft_caps_on_a_gpu(width: int, window: int | None) -> None:
    options = packed([300, 1, 7, 204, 512], "cuda", True, window, softcap=2.0)
    assert max(errors(inputs((2, 4, 2, 512, 512, width), "cuda", torch.bfloat16), options)) < 1e-2


@pytest.mark.gpu
@pytest.mark.usefixtures("how_long")
@pytest.mark.parametrize("window", [None, 0, 40])
@pytest.mark.parametrize("width", [32, 64, 128, 192, 256])
def test_segments_without_keys_or_queries_on_a_gpu(width: int, window: int | None) -> None:
    tensors = inputs((1, 4, 2, 480, 400, width), "cuda", torch.bfloat16)
    assert max(errors(tensors, empty_segments(10, "cuda", window))) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 192, 256])
def test_it_gives_the_same_bits_from_run_to_run(width: int) -> None:
    q, k, v, dout = inputs((2, 8, 2, 2048, 2048, width), "cuda", torch.bfloat16)
    options = AttentionOptions(True, 0.1, True)
    out, lse = partial_attention(q, k, v, options)
    first = partial_attention_backward(dout, q, k, v, out, lse, options)
    for _ in range(5):
        again = partial_attention_backward(dout, q, k, v, out, lse, options)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
