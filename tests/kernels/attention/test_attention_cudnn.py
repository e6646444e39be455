"""cuDNN's deterministic backward, part by part: parts make up the whole, and need no more memory than planned."""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from closeness import relative_error
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pentad.kernels.attention import attention_cudnn
from pentad.kernels.attention.attention_cudnn import WORKSPACE, Part, attention_backward_in_order, part_of
from pentad.kernels.attention.attention_partial import (
    partial_attention,
    partial_attention_backward,
    serving_kernels,
)
from pentad.kernels.attention.attention_reference import AttentionOptions, partial_attention_backward_reference
from pentad.kernels.backend import KernelsInUse, use_kernels
from pentad.schedules.ir.gc_pause import gc_paused

CAUSAL = AttentionOptions(True, 0.25, True)


@pytest.fixture
def frontend() -> Iterator[None]:
    before = use_kernels(KernelsInUse(cudnn_frontend=True))
    yield
    use_kernels(before)


def inputs(
    rows: int, heads: int, groups: int, queries: int, keys: int, width: int, value: int, **to: Any
) -> list[Tensor]:
    """q, k, v and dout; the first three are cut from one tensor if their sizes allow."""
    if (queries, width) == (keys, value):
        joined = torch.randn(rows, queries, heads + 2 * groups, width, **to)
        found = [*joined.split([heads, groups, groups], 2), torch.randn(rows, queries, heads, width, **to)]
    else:
        sizes = ((queries, heads, width), (keys, groups, width), (keys, groups, value), (queries, heads, value))
        found = [torch.randn(rows, *each, **to) for each in sizes]
    return [x.transpose(1, 2) for x in found]


SIZES = st.tuples(
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([1, 2, 6]),
    st.sampled_from([100, 1000, 4096, 8192, 16384, 65536]),
    st.sampled_from([64, 4096, 32768]),
)


@given(sizes=SIZES)
def test_a_part_has_as_much_of_a_call_as_its_workspace_has_room_for(sizes: tuple[int, ...]) -> None:
    rows, groups, group, queries, keys = sizes
    shapes = ((rows, group * groups, queries, 128), (rows, groups, keys, 128))
    q, k = (torch.empty(shape, device="meta") for shape in shapes)
    part, head = part_of(q, k, k), 2 * group * (-(-queries // 128) * 128) * (-(-keys // 128) * 128)
    if part is None:
        assert head > WORKSPACE
        return
    assert rows % part.rows == groups % part.kv_heads == 0
    assert part.rows * part.kv_heads * head <= WORKSPACE
    assert part.kv_heads == groups or part.rows == 1, "a sequence's heads are together where they can be"


@pytest.mark.parametrize(
    ("width", "value", "served"),
    [(128, 128, True), (192, 128, True), (256, 256, True), (160, 160, False), (36, 36, False)],
)
def test_heads_that_cudnn_lacks_have_no_part(width: int, value: int, served: bool) -> None:
    q, k, v, _ = inputs(1, 4, 2, 16, 16, width, value)
    assert (part_of(q, k, v) is not None) == served


@pytest.mark.parametrize("part", [Part(2, 4), Part(1, 4), Part(1, 2), Part(1, 1)])
@pytest.mark.parametrize(("keys", "value"), [(24, 16), (24, 8), (40, 16)])
def test_parts_make_up_the_whole(monkeypatch: pytest.MonkeyPatch, part: Part, keys: int, value: int) -> None:
    """The graph computes what the reference does, into the memory that it is given."""
    q, k, v, dout = inputs(2, 8, 4, 24, keys, 16, value, dtype=torch.float64)
    options = CAUSAL._replace(causal=keys == 24)
    out, lse = partial_attention(q, k, v, options)
    calls = []

    def graph(device: torch.device, key: tuple[Any, ...], causal: bool, scale: float) -> attention_cudnn._Graph:
        def run(given: dict[str, Tensor], workspace: Tensor, handle: object) -> None:
            assert [(tuple(x.shape), x.stride(), x.dtype) for x in given.values()] == list(key)
            q, k, v, out, dout, lse, *gradients = given.values()
            assert lse.is_contiguous() and lse.stride() == (lse.shape[1] * lse.shape[2], lse.shape[2], 1, 1)
            calls.append(q.shape)
            found = partial_attention_backward_reference(dout, q, k, v, out, lse.squeeze(3), options)
            for into, x in zip(gradients, found, strict=True):
                into.copy_(x)

        return attention_cudnn._Graph(run, [*"qkvodlabc"], 1)

    class Frontend:
        set_stream = staticmethod(lambda **_: None)

    monkeypatch.setattr(attention_cudnn, "_graph", graph)
    monkeypatch.setattr(attention_cudnn, "_handle", lambda device: None)
    monkeypatch.setattr(attention_cudnn, "frontend", lambda: Frontend)
    monkeypatch.setattr(attention_cudnn, "part_of", lambda *_: part)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.cuda.Stream)
    monkeypatch.setattr(torch.cuda.Stream, "cuda_stream", 0, raising=False)
    monkeypatch.setattr(Tensor, "float", lambda x: x)  # lse stays in float64
    found = attention_backward_in_order(dout, q, k, v, out, lse, options)
    expected = partial_attention_backward_reference(dout, q, k, v, out, lse, options)
    assert len(calls) == 8 // (part.rows * part.kv_heads)
    for x, y in zip(found, expected, strict=True):
        assert torch.allclose(x, y, rtol=1e-12, atol=1e-12)


def test_what_is_caught_while_a_graph_is_built_keeps_no_tensor_of_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that refers to itself through the frame that caught it is freed by the garbage collector only."""

    def build(modes: object) -> None:
        try:
            raise ValueError
        except ValueError as error:
            caught = error  # noqa: F841

    library = Mock()
    library.pygraph.return_value = SimpleNamespace(
        build=build, tensor=Mock(), sdpa_backward=lambda **_: (), execute=Mock(), get_workspace_size=lambda: 0
    )
    monkeypatch.setattr(attention_cudnn, "frontend", lambda: library)
    monkeypatch.setattr(attention_cudnn, "_handle", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    kept = list[weakref.ref[Tensor]]()

    def backward() -> None:
        large = torch.zeros(8)
        attention_cudnn._graph.__wrapped__(large.device, (((), (), torch.bfloat16),) * 6, True, 1.0)
        kept.append(weakref.ref(large))

    with gc_paused():
        backward()
        assert kept[0]() is None


CASES = [
    *((1, 32, 8, 2048, 2048, 128, 128), (3, 8, 2, 1000, 1000, 64, 64), (2, 4, 4, 512, 512, 192, 128)),
    *((1, 4, 2, 512, 512, 256, 256), (1, 8, 2, 512, 1024, 128, 128), (2, 8, 1, 1024, 512, 128, 128)),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("frontend")
@pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="needs nvidia-cudnn-frontend")
@pytest.mark.parametrize("room", [WORKSPACE, 2**25])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_right_and_have_the_same_bits_in_every_run(
    monkeypatch: pytest.MonkeyPatch, case: Any, room: int
) -> None:
    """As a whole and in parts."""
    q, k, v, dout = inputs(*case, dtype=torch.bfloat16, device="cuda")
    options = CAUSAL._replace(causal=case[3] == case[4])
    monkeypatch.setattr(attention_cudnn, "WORKSPACE", room)
    assert serving_kernels(q, k, v, options, backward=True)[0] == "cudnn"
    out, lse = partial_attention(q, k, v, options)
    first, *others = (partial_attention_backward(dout, q, k, v, out, lse, options) for _ in range(4))
    wide: Any = *(x.double() for x in (dout, q, k, v, out, lse)), options
    expected = partial_attention_backward_reference(*wide)
    for x, y in zip(first, expected, strict=True):
        assert relative_error(x.double(), y) < 5e-3
    for other in others:
        assert all(map(torch.equal, first, other))
