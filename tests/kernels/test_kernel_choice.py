"""Which implementation runs, and that all of them give the reference's result."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from closeness import relative_error
from torch import Tensor

pytest.importorskip("triton")

from pentad.kernels.attention import attention_backward_triton, attention_forward_triton, attention_partial
from pentad.kernels.attention.attention_partial import (
    attention_key,
    partial_attention,
    partial_attention_backward,
    serving_kernels,
)
from pentad.kernels.attention.attention_reference import (
    AttentionOptions,
    partial_attention_backward_reference,
    partial_attention_reference,
)
from pentad.kernels.attention.packed_runs import PackedLengths
from pentad.kernels.backend import KernelsInUse, choose_kernel, kernels_name, use_kernels
from pentad.kernels.moe import grouped_gemm_triton
from pentad.kernels.moe.grouped_gemm import grouped_gemm
from pentad.kernels.rms_norm import rms_norm

KEY = ("attention", 4, 2, 32, 32)
OPTIONS = AttentionOptions(True, 0.2, False)


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """Restores the kernels in use after each test."""
    before = use_kernels(KernelsInUse())
    yield
    use_kernels(before)


@pytest.mark.parametrize(
    ("name", "measured", "chosen"),
    [
        ("auto", {}, "cudnn"),
        ("auto", {KEY: "flash"}, "flash"),
        ("auto", {KEY: "of another GPU"}, "cudnn"),
        ("auto", {("attention", 4, 4, 32, 32): "flash"}, "cudnn"),
        ("triton", {KEY: "flash"}, "triton"),
        ("cudnn", {KEY: "flash"}, "cudnn"),
    ],
)
def test_the_measured_one_of_those_that_serve_runs_or_the_usual_one(
    name: str, measured: dict[tuple[str | int, ...], str], chosen: str
) -> None:
    use_kernels(KernelsInUse(name, measured))
    assert choose_kernel(("cudnn", "triton", "flash"), KEY) == chosen
    assert kernels_name() == name


def tensors() -> list[Tensor]:
    """q, k, v and dout of 4 query heads and 2 key-value heads."""
    return [torch.randn(2, 40, heads, 32).transpose(1, 2) for heads in (4, 2, 2, 4)]


def results(given: list[Tensor], options: AttentionOptions) -> list[Tensor]:
    """out, dq, dk and dv."""
    q, k, v, dout = given
    out, lse = partial_attention(q, k, v, options)
    return [out, *partial_attention_backward(dout, q, k, v, out, lse, options)]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tensors count as ones for which a GPU has all kernels."""
    monkeypatch.setattr(attention_partial, "has_fused_kernel", lambda *_: True)
    monkeypatch.setattr(attention_partial, "_cudnn_supports", lambda q, k, v, options: options.lengths is None)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fused implementations that have been called; each computes what the reference does."""
    found: list[str] = []

    def record(module: object, name: str, kernel: str, reference: object) -> None:
        def call(*args: object) -> object:
            found.append(kernel)
            return reference(*args)  # type: ignore[operator]

        monkeypatch.setattr(module, name, call)

    for kernel in ("cudnn", "flash"):
        record(attention_partial, f"_{kernel}", kernel, partial_attention_reference)
        record(attention_partial, f"_{kernel}_backward", kernel, partial_attention_backward_reference)
    record(attention_forward_triton, "attention_forward", "triton", partial_attention_reference)
    record(attention_backward_triton, "attention_backward", "triton", partial_attention_backward_reference)
    return found


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_follows_what_was_measured_in_each_direction(called: list[str], deterministic: bool) -> None:
    q, k, v, dout = tensors()
    options = OPTIONS._replace(deterministic=deterministic)
    for backward in (False, True):
        serving = serving_kernels(q, k, v, options, backward=backward)
        assert ("cudnn" in serving) == (not (backward and deterministic)), "cuDNN's backward adds in any order"
        for kernel in serving:
            called.clear()
            use_kernels(KernelsInUse(measured={attention_key(q, k, v, options, backward=backward): kernel}))
            out, lse = partial_attention(q, k, v, options)
            partial_attention_backward(dout, q, k, v, out, lse, options)
            usual = serving_kernels(q, k, v, options, backward=not backward)[0]
            assert called == ([usual, kernel] if backward else [kernel, usual])


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", ["auto", "triton", "cudnn", "torch"])
def test_a_name_holds_for_all_calls_that_it_serves(called: list[str], name: str) -> None:
    q, k, v, dout = tensors()
    use_kernels(KernelsInUse(name))
    out, lse = partial_attention(q, k, v, OPTIONS)
    partial_attention_backward(dout, q, k, v, out, lse, OPTIONS)
    assert called == ([] if name == "torch" else ["cudnn" if name == "auto" else name] * 2)


@pytest.mark.usefixtures("on_gpu")
def test_what_cudnn_does_not_serve_is_refused_and_no_other_kernel_runs() -> None:
    q, k, v, _ = tensors()
    use_kernels(KernelsInUse("cudnn"))
    options = OPTIONS._replace(deterministic=True)
    out, lse = partial_attention_reference(q, k, v, options)
    with pytest.raises(ValueError, match=r"^kernels are cudnn, which has no attention for queries \(2, 4, 40, 32\)"):
        partial_attention_backward(out, q, k, v, out, lse, options)


def test_parts_windows_and_soft_caps_have_no_measured_kernel() -> None:
    q, k, v, _ = tensors()
    for options in (OPTIONS._replace(causal=False), OPTIONS.within(8), OPTIONS._replace(softcap=3.0)):
        assert attention_key(q, k, v, options) == ()
    assert attention_key(q[:, :, 20:], k, v, OPTIONS) == ()
    assert attention_key(q, k, v, OPTIONS) == KEY


@pytest.mark.usefixtures("on_gpu", "fresh_memory_holds_nan", "interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets Triton")
def test_our_kernels_give_the_references_result() -> None:
    given = tensors()
    use_kernels(KernelsInUse("torch"))
    expected = results([x.double() for x in given], OPTIONS)
    use_kernels(KernelsInUse("triton"))
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(results(given, OPTIONS), expected, strict=True))


@pytest.mark.usefixtures("fresh_memory_holds_nan", "interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets Triton")
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_experts_follow_what_was_measured(monkeypatch: pytest.MonkeyPatch, transposed: bool) -> None:
    x, weights = torch.randn(12, 32), torch.randn(3, 48, 32)
    weights = weights.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weights
    offsets = torch.tensor([4, 4, 12], dtype=torch.int32)
    monkeypatch.setattr(grouped_gemm_triton, "_torch_supports", lambda x, weights: True)
    monkeypatch.setattr(torch, "_grouped_mm", lambda x, weights, offs: x.new_zeros(()))
    key = grouped_gemm_triton.grouped_key(weights)
    assert key == ("grouped_gemm_transposed" if transposed else "grouped_gemm", 3, 48, 32)
    assert grouped_gemm_triton.grouped_gemm(x, weights, offsets).dim() == 0, "torch's usually is the fastest"
    expected = grouped_gemm(x, weights, offsets)
    for in_use in (KernelsInUse("triton"), KernelsInUse(measured={key: "triton"})):
        use_kernels(in_use)
        assert relative_error(grouped_gemm_triton.grouped_gemm(x, weights, offsets), expected) < 1e-5


@pytest.mark.gpu
@pytest.mark.sampled(8)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("kv_heads", "width", "value"), [(2, 64, 64), (2, 128, 128), (8, 192, 128), (2, 256, 256)])
def test_each_implementation_of_a_gpu_gives_the_references_result(
    kv_heads: int, width: int, value: int, deterministic: bool, packed: bool
) -> None:
    """Chosen by its key in each direction, and in every pair of a forward and a backward."""
    sizes = ((8, width), (kv_heads, width), (kv_heads, value), (8, value))
    given = [torch.randn(2, 384, n, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for n, d in sizes]
    q, k, v, _ = given
    ends = torch.tensor([0, 100, 384, 768], dtype=torch.int32, device="cuda")
    lengths = PackedLengths(ends, ends, (384, 384)) if packed else None
    options = AttentionOptions(True, width**-0.5, deterministic, lengths)
    use_kernels(KernelsInUse("torch"))
    expected = results([x.double() for x in given], options)
    use_kernels(KernelsInUse())
    serving = [serving_kernels(q, k, v, options, backward=each) for each in (False, True)]
    keys = [attention_key(q, k, v, options, backward=each) for each in (False, True)]
    assert all(len(each) > 1 for each in serving)
    for pair in product(*serving):
        use_kernels(KernelsInUse(measured=dict(zip(keys, pair, strict=True))))
        found = results(given, options)
        assert all(relative_error(a, b) < 1e-2 for a, b in zip(found, expected, strict=True)), pair
        if deterministic:
            assert all(torch.equal(a, b) for a, b in zip(found, results(given, options), strict=True)), pair


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_each_product_of_experts_of_a_gpu_gives_the_references_result(transposed: bool) -> None:
    x, weights = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((600, 256), (4, 128, 256)))
    weights = weights.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weights
    offsets = torch.tensor([100, 100, 333, 600], dtype=torch.int32, device="cuda")
    expected = grouped_gemm(x.double(), weights.double(), offsets)
    for kernel in grouped_gemm_triton.serving_kernels(x, weights):
        use_kernels(KernelsInUse(measured={grouped_gemm_triton.grouped_key(weights): kernel}))
        assert relative_error(grouped_gemm(x, weights, offsets), expected) < 1e-2, kernel


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_references_run_on_gpus_too(dtype: torch.dtype) -> None:
    """They have the reference's bits on GPUs, which the Triton kernels do not."""
    x, weight = torch.randn(4096, 1000, device="cuda", dtype=dtype), torch.randn(1000, device="cuda", dtype=dtype)
    expected = rms_norm.__wrapped__(x, weight, 1e-5)  # type: ignore[attr-defined]
    for name, same in (("torch", True), ("auto", False)):
        use_kernels(KernelsInUse(name))
        found = rms_norm(x, weight, 1e-5)
        assert torch.equal(found[2], expected[2]) == same
        assert relative_error(found[0], expected[0]) < 1e-2
