"""The rates that one device attains with the kernels that layers and optimizers launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.kernels.attention.attention import attention, attention_backward
from pentad.kernels.attention.rope import rope_
from pentad.kernels.fp8.fp8_cast import fp8_cast
from pentad.kernels.fp8.fp8_gemm import fp8_gemm
from pentad.kernels.fp8.fp8_grouped import ExpertMatrices, dequantize_rows, fp8_grouped_gemm
from pentad.kernels.fp8.fp8_tensor import E4M3, Fp8Tensor, Recipe
from pentad.kernels.glu import glu, glu_backward
from pentad.kernels.moe.grouped_gemm import accumulate_grouped_gradient_, grouped_gemm
from pentad.kernels.optimizer.adamw import adamw_, coefficients
from pentad.kernels.optimizer.param_remainders import SplitFloat32
from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.kernels.wgrad_gemm import accumulate_gradient_

Work = Callable[[], object]
ROUNDS = 3  # measurements, of which the median counts
EPS = 1e-5


class Sizes(NamedTuple):
    """What is measured on a kind of device, for `seconds` each. First come `warm_up` seconds of products, because a
    power limit lowers clocks only after a while. Products are of [tokens, k] and [n, k]."""

    seconds: float
    warm_up: float
    products: tuple[tuple[int, int, int], ...]
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    layer: tuple[int, int, int]  # tokens, hidden, ffn
    grouped: tuple[int, int, int, tuple[int, ...]]  # rows, n, k, and the numbers of experts in descending order
    elements: int
    host_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]


_LAYER = [(tokens, 14336, 4096) for tokens in (4096, 8192, 16384)]
SIZES = {
    "cuda": Sizes(
        *(0.4, 5.0, (*((each,) * 3 for each in (1024, 2048, 4096)), *_LAYER), (64, 128), (2048, 8192, 32768)),
        *((8192, 4096, 14336), (32768, 1536, 2048, (256, 128, 64, 32, 16, 8)), 2**27),
        *((2**16, 2**20, 2**24, 2**28), (2**16, 2**20, 2**24, 2**28)),
    ),
    "cpu": Sizes(
        *(0.01, 0.0, ((64,) * 3, (256,) * 3), (64,), (64, 256), (64, 128, 384), (128, 64, 64, (8, 4)), 2**16),
        *((2**14, 2**20), (2**12, 2**16, 2**20)),
    ),
}


class Clock:
    """Times the same work on all ranks at once; the slowest rank counts. Calls `done` after each timing."""

    def __init__(self, device: torch.device, seconds: float, done: Callable[[], None]) -> None:
        self.device, self.budget, self.done = device, seconds, done

    def seconds(self, work: Work) -> float:
        """The seconds of one run: the median over rounds, after a warm-up."""
        work()
        once = self._runs(work, 1)
        count = max(1, min(1000, int(self.budget / ROUNDS / max(once, 1e-9))))
        found = sorted(self._runs(work, count) for _ in range(ROUNDS))[ROUNDS // 2]
        self.done()
        return found

    def _runs(self, work: Work, count: int) -> float:
        """The mean seconds over `count` runs."""
        if dist.is_initialized():
            dist.barrier()
        self.wait()
        began = time.perf_counter()
        for _ in range(count):
            work()
        self.wait()
        return self.slowest((time.perf_counter() - began) / count)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, seconds: float) -> float:
        if not dist.is_initialized():
            return seconds
        found = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)


def num_device_timings(sizes: Sizes, device: torch.device) -> int:
    products = len(sizes.products) * (1 + 2 * has_fp8(device))
    others = 4 + 3 * (1 + has_blocks(device)) * len(sizes.grouped[-1]) + len(sizes.host_bytes)
    return products + 2 * len(sizes.widths) * len(sizes.lengths) + others


def has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def has_blocks(device: torch.device) -> bool:
    """Whether the device has FP8 products with block scales, as Hopper GPUs do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def measure_device(sizes: Sizes, device: torch.device, clock: Clock) -> dict[str, object]:
    """The fields of Rates about a single device; host memory as seconds by bytes."""
    new = Tensors.of(device)
    _warm_up(sizes, new, clock)
    launch = clock.seconds(_launch(new))
    wide, narrow = _products(sizes, new, clock)
    return {
        "products": wide,
        "products_8bit": narrow,
        "experts": _experts(sizes, new, clock),
        "attention": [_attention(sizes, width, new, clock) for width in sizes.widths],
        "memory": _memory(sizes, new, clock),
        "elementwise": _elementwise(sizes, new, clock),
        "update": _update(sizes, new, clock),
        "host_memory": _host(sizes, device, clock),
        "launch": launch,
    }


class Tensors:
    """Creates tensors with random values: zeros would take less power, and so less time."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    @classmethod
    def of(cls, device: torch.device) -> Tensors:
        """Tensors in the usual compute dtype."""
        return cls(device, torch.bfloat16 if device.type == "cuda" else torch.float32)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)


def _warm_up(sizes: Sizes, new: Tensors, clock: Clock) -> None:
    tokens, n, k = sizes.products[-1]
    a, b, until = new(tokens, k), new(n, k), time.monotonic() + sizes.warm_up
    while time.monotonic() < until:
        for _ in range(10):
            torch.mm(a, b.t())
        clock.wait()


def _launch(new: Tensors) -> Work:
    """One small kernel, which takes less time on a GPU than its launch on the host."""
    x, weight = new(8, 64), new(64)
    return lambda: rms_norm(x, weight, EPS)


def _products(sizes: Sizes, new: Tensors, clock: Clock) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """FLOP/s by FLOPs: of the products of F, B and W together, and in FP8 the same times F's measured speed-up."""
    wide, narrow = [], []
    for tokens, n, k in sizes.products:
        x, dy, matrix, main = new(tokens, k), new(tokens, n), new(n, k), new(n, k, dtype=torch.float32)
        flops = 2.0 * tokens * n * k

        def products(x: Tensor = x, dy: Tensor = dy, matrix: Tensor = matrix, main: Tensor = main) -> None:
            torch.mm(x, matrix.t())
            torch.mm(dy, matrix)
            accumulate_gradient_(main, dy, x)

        rate = 3 * flops / clock.seconds(products)
        wide.append((flops, rate))
        if has_fp8(new.device):
            plain, narrower = clock.seconds(partial(torch.mm, x, matrix.t())), clock.seconds(_in_8_bits(x, matrix))
            narrow.append((flops, rate * plain / narrower))
    return wide, narrow


def _in_8_bits(x: Tensor, matrix: Tensor) -> Work:
    """The product in FP8 with one scale per factor, without casts."""
    a, b = (Fp8Tensor(each.to(E4M3), torch.ones(1, 1, device=x.device)) for each in (x, matrix))
    return partial(fp8_gemm, a, b, x.dtype)


def _experts(sizes: Sizes, new: Tensors, clock: Clock) -> list[dict[str, list[tuple[float, float]]]]:
    """FLOP/s of F, B and W of experts by the mean rows per expert: in the compute dtype and, if the GPU supports it, in
    FP8 with block scales, without the casts."""
    rows, n, k, counts = sizes.grouped
    found: list[dict[str, list[tuple[float, float]]]] = []
    for experts in counts:
        for number, works in enumerate(_grouped(rows, n, k, experts, new)):
            if number == len(found):
                found.append({phase: [] for phase in works})
            for phase, work in works.items():
                found[number][phase].append((rows / experts, 2.0 * rows * n * k / clock.seconds(work)))
    return found


def _grouped(rows: int, n: int, k: int, experts: int, new: Tensors) -> Iterator[dict[str, Work]]:
    """F, B and W of grouped products with weights [experts, n, k]. Rows are routed at random, so that experts do not
    get full tiles."""
    x, dy, weights = new(rows, k), new(rows, n), new(experts, n, k)
    main = new(experts, n, k, dtype=torch.float32)
    offsets = routed_offsets(rows, experts, new.device)
    yield {
        "forward": lambda: grouped_gemm(x, weights, offsets),
        "backward": lambda: grouped_gemm(dy, weights.transpose(1, 2), offsets),
        "weight": lambda: accumulate_grouped_gradient_(main, dy, x, offsets),
    }
    if has_blocks(new.device):
        yield _grouped_in_8_bits(main, dy, x, weights, offsets)


def routed_offsets(rows: int, experts: int, device: torch.device) -> Tensor:
    """[experts] int32: where each expert's rows end if `rows` tokens are routed at random."""
    chosen = torch.randint(experts, (rows,), generator=torch.Generator().manual_seed(0))
    return torch.bincount(chosen, minlength=experts).cumsum(0).to(device, torch.int32)


def _grouped_in_8_bits(main: Tensor, dy: Tensor, x: Tensor, weights: Tensor, offsets: Tensor) -> dict[str, Work]:
    recipe = Recipe("block")
    a, b = fp8_cast(x, recipe, "activation", columns=False).rows, fp8_cast(dy, recipe, "gradient", columns=False).rows
    matrices = ExpertMatrices.of(fp8_cast(weights.flatten(0, 1), recipe, "weight"), len(weights))
    assert a is not None and b is not None

    def gradient() -> object:
        wide, wide_x = (dequantize_rows(each, offsets, x.dtype) for each in (b, a))
        return accumulate_grouped_gradient_(main, wide, wide_x, offsets)

    return {
        "forward": lambda: fp8_grouped_gemm(a, matrices.rows, offsets, x.dtype),
        "backward": lambda: fp8_grouped_gemm(b, matrices.columns, offsets, x.dtype),
        "weight": gradient,
    }


def _attention(sizes: Sizes, width: int, new: Tensors, clock: Clock) -> dict[str, object]:
    """FLOP/s of attention by length, as in training: grouped heads, and a deterministic backward."""
    tokens, hidden, _ = sizes.layer
    heads = max(1, hidden // width)
    kv_heads = max(1, heads // 4)
    forwards, backwards = [], []
    for length in sizes.lengths:
        rows = max(1, tokens // length)
        q, k, v = (new(rows, length, count, width).transpose(1, 2) for count in (heads, kv_heads, kv_heads))
        dout = new(rows, heads, length, width)

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> object:
            return attention(q, k, v, deterministic=True)

        def both(q: Tensor = q, k: Tensor = k, v: Tensor = v, dout: Tensor = dout) -> None:
            attention_backward(dout, attention(q, k, v, deterministic=True)[1])

        took = clock.seconds(forward)
        rest = max(clock.seconds(both) - took, took)  # less than the forward's time would be noise
        flops = 2.0 * rows * heads * length**2 * width
        forwards.append((float(length), flops / took))
        backwards.append((float(length), 2.5 * flops / rest))
    return {"width": width, "forward": forwards, "backward": backwards}


def _memory(sizes: Sizes, new: Tensors, clock: Clock) -> float:
    source = new(sizes.elements)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / clock.seconds(lambda: target.copy_(source))


def _elementwise(sizes: Sizes, new: Tensors, clock: Clock) -> float:
    """Bytes/s of a layer's F and B besides products and attention, by the bytes that the planner counts."""
    tokens, hidden, ffn = sizes.layer
    width = sizes.widths[-1]
    x, residual, dy, weight = new(tokens, hidden), new(tokens, hidden), new(tokens, hidden), new(hidden)
    gate_up, dgate = new(tokens, 2 * ffn), new(tokens, ffn)
    heads = new(tokens, hidden // width + 2 * max(1, hidden // width // 4), width)
    cos, sin = (new(tokens, width // 2, dtype=torch.float32) for _ in range(2))

    def run() -> None:
        for _ in range(2):
            _, summed, rstd = rms_norm(x, weight, EPS, residual)
            rms_norm_backward(dy, summed, weight, rstd, residual)
        for inverse in (False, True):
            rope_(heads, cos, sin, inverse)
        glu(gate_up)
        glu_backward(dgate, gate_up)

    counted = tokens * new.dtype.itemsize * (8 * hidden + 3 * ffn)
    return 2.5 * counted / clock.seconds(run)


def _update(sizes: Sizes, new: Tensors, clock: Clock) -> float:
    master, first, second, gradient = (new(sizes.elements, dtype=torch.float32) for _ in range(4))
    scale = torch.ones(1, device=new.device)
    if new.dtype == torch.bfloat16:
        master = SplitFloat32.of(master)
    each = coefficients(1e-4, 0.9, 0.95, 1e-8, 0.1, 1)
    second.square_()
    return 7.0 * master.nbytes / clock.seconds(lambda: adamw_(master, first, second, gradient, None, scale, each))


def _host(sizes: Sizes, device: torch.device, clock: Clock) -> list[tuple[float, float]]:
    """(bytes, seconds) of copies to host memory."""
    found, pinned = [], device.type == "cuda"
    for size in sizes.host_bytes:
        source = torch.empty(size, dtype=torch.uint8, device=device)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

        def copy(source: Tensor = source, host: Tensor = host) -> None:
            host.copy_(source, non_blocking=True)

        found.append((float(size), clock.seconds(copy)))
    return found
