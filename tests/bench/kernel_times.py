"""Times every kernel on one GPU against the rate this GPU reaches, torch, and Liger if it is installed.

PYTHONPATH=.typings:tests/support python tests/bench/kernel_times.py [--only NAME ...] [--json FILE]

Each case runs in its own process, so that a crash affects no other case. It checks its result against float64, and
measures the rate it is compared with: a device copy (bytes read and written) or a square bf16 GEMM. Times are median
device times: calls with inputs that together exceed the L2 cache are captured in a CUDA graph, or timed between events
("events" in the JSON). The exit status is 0 only if every check passes.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from record import stamp, write
from torch import Tensor

from pentad.kernels import cross_entropy, glu, rms_norm, wgrad_gemm
from pentad.kernels.attention import attention, rope, rope_tables
from pentad.kernels.backend import use_kernels, usual_kernels
from pentad.kernels.optimizer import adamw
from pentad.kernels.optimizer.param_remainders import SplitFloat32

Calls = list[Callable[[], object]]
SETS, SAMPLES = 3, 20
EPS = 1e-5
notes: dict[str, Any] = {}  # further results of the checks, such as whether ten runs have the `same` bits


@dataclass(frozen=True)
class Case:
    """`work` is the bytes a call moves, or its FLOPs if `gemm`; `bound` is the largest allowed error."""

    work: float
    ours: Calls
    torch: Calls
    liger: Callable[[], Calls] | None
    error: Callable[[], float]
    bound: float = 1e-2
    gemm: bool = False


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def sets(make: Callable[[], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [make() for _ in range(SETS)]


def each(call: Callable[..., object], data: list[tuple[Any, ...]]) -> Calls:
    return [partial(call, *values) for values in data]


def error(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest relative error of a tensor, in the L2 norm."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def liger_op(module: str, name: str) -> Callable[..., Any]:
    return getattr(import_module(f"liger_kernel.ops.{module}"), name)


def float64(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.double() for t in tensors)


def norm_forward(rows: int, width: int, fused: bool) -> Case:
    weight = random(width)
    data = sets(lambda: tuple(random(rows, width) for _ in range(2 if fused else 1)))

    def ours(x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, ...]:
        return rms_norm.rms_norm(x, weight, EPS, residual)

    def by_torch(x: Tensor, residual: Tensor | None = None) -> object:
        summed = x if residual is None else x + residual
        return summed, F.rms_norm(summed, (width,), weight, EPS)

    def liger() -> Calls:
        module, rest = ("fused_add_rms_norm", ()) if fused else ("rms_norm", (None,))
        forward = liger_op(module, f"{module}_forward")
        return each(lambda *inputs: forward(*inputs, weight, EPS, 0.0, "llama", *rest), data)

    def check() -> float:
        x, w, *residual = float64(data[0][0], weight, *data[0][1:])
        return error(ours(*data[0]), rms_norm.rms_norm(x, w, EPS, residual[0] if fused else None))

    return Case((4 if fused else 2) * rows * width * 2, each(ours, data), each(by_torch, data), liger, check)


def norm_backward(rows: int, width: int) -> Case:
    weight = random(width)

    def make() -> tuple[Tensor, ...]:
        dy, summed, dresidual = (random(rows, width) for _ in range(3))
        return dy, summed, dresidual, rms_norm.rms_norm(summed, weight, EPS)[2]

    data = sets(make)
    leaves = [(d[1].detach().requires_grad_(), weight.detach().requires_grad_()) for d in data]
    graphs = [(F.rms_norm(x, (width,), w, EPS), (x, w), d[0], d[2]) for (x, w), d in zip(leaves, data, strict=True)]

    def ours(dy: Tensor, summed: Tensor, dresidual: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
        return rms_norm.rms_norm_backward(dy, summed, weight, rstd, dresidual)

    def by_torch(y: Tensor, inputs: tuple[Tensor, ...], dy: Tensor, dresidual: Tensor) -> object:
        return torch.autograd.grad(y, inputs, dy, retain_graph=True)[0] + dresidual

    def liger() -> Calls:
        forward, backward = (liger_op("fused_add_rms_norm", f"fused_add_rms_norm_{way}ward") for way in ("for", "back"))
        _, _, _, block, warps, stages, casting = forward(*data[0][:2], weight, EPS, 0.0, "llama")
        settings = (0.0, casting, block, warps, stages, False)
        return each(lambda dy, s, dresidual, rstd: backward(dy, dresidual, s, weight, rstd, *settings), data)

    def check() -> float:
        dy, summed, dresidual, weight64 = float64(*data[0][:3], weight)
        rstd = rms_norm.rms_norm(summed, weight64, EPS, None)[2]
        return error(ours(*data[0]), rms_norm.rms_norm_backward(dy, summed, weight64, rstd, dresidual))

    return Case(4 * rows * width * 2, each(ours, data), each(by_torch, graphs), liger, check)


def rope_case(tokens: int, heads: int, groups: int, width: int) -> Case:
    every = heads + groups
    data = sets(lambda: (random(tokens, every + groups, width)[:, :every],))
    cos, sin = rope_tables.rope_tables(tokens, width, 5e5, "cuda")
    cos2, sin2 = (torch.cat((table, table), dim=-1)[None] for table in (cos, sin))

    def by_torch(x: Tensor) -> Tensor:
        rotated = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1)
        return x * cos2[0, :, None] + rotated * sin2[0, :, None]

    def liger() -> Calls:
        forward = liger_op("rope", "rope_forward")
        parts = sets(lambda: tuple(random(1, tokens, n, width).transpose(1, 2) for n in (heads, groups)))
        return each(lambda q, k: forward(q, k, cos2, sin2), parts)

    def check() -> float:
        found, expected = data[0][0].clone(), data[0][0].double()
        rope.rope_(found, cos, sin)
        rope.rope_(expected, cos.double(), sin.double())
        return error([found], [expected])

    ours = each(lambda x: rope.rope_(x, cos, sin), data)
    return Case(2 * tokens * every * width * 2, ours, each(by_torch, data), liger, check)


def silu_product(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_forward(tokens: int, width: int) -> Case:
    data = sets(lambda: (random(tokens, 2 * width),))
    return Case(
        3 * tokens * width * 2, each(glu.glu, data), each(silu_product, data),
        lambda: each(liger_op("swiglu", "swiglu_fused_gate_up_forward"), data),
        lambda: error([glu.glu(*data[0])], [silu_product(data[0][0].double())]),
    )  # fmt: skip


def swiglu_backward(tokens: int, width: int) -> Case:
    data = sets(lambda: (random(tokens, width), random(tokens, 2 * width)))
    leaves = [x.detach().requires_grad_() for _, x in data]
    graphs = [(dy, x, silu_product(x)) for (dy, _), x in zip(data, leaves, strict=True)]

    def by_torch(dy: Tensor, x: Tensor, y: Tensor) -> object:
        return torch.autograd.grad(y, x, dy, retain_graph=True), silu_product(x.detach())

    def liger() -> Calls:
        forward, backward = (liger_op("swiglu", f"swiglu_fused_gate_up_{way}ward") for way in ("for", "back"))
        return each(lambda dy, x: (backward(x, dy), forward(x)), data)  # ours recomputes y as well

    return Case(
        6 * tokens * width * 2, each(glu.glu_backward, data), each(by_torch, graphs), liger,
        lambda: error(glu.glu_backward(*data[0]), glu.glu_backward(data[0][0].double(), data[0][1].double())),
    )  # fmt: skip


def loss(tokens: int, vocabulary: int, backward: bool) -> Case:
    data = sets(lambda: (random(tokens, vocabulary), torch.randint(vocabulary, (tokens,), device="cuda")))

    def ours(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        found, lse = cross_entropy.cross_entropy(logits, targets)
        if backward:
            cross_entropy.cross_entropy_backward_(logits, targets, lse, 1 / tokens)
        return (found, lse, logits) if backward else (found, lse)

    def by_torch(logits: Tensor, targets: Tensor) -> object:
        leaf = logits.detach().requires_grad_(backward)
        mean = F.cross_entropy(leaf.float(), targets)
        return torch.autograd.grad(mean, leaf) if backward else mean

    def liger() -> Calls:
        forward = liger_op("cross_entropy", "cross_entropy_forward")
        # Its forward pass overwrites the logits with their gradient.
        leaves = [(logits.detach().requires_grad_(backward), targets) for logits, targets in data]
        return each(lambda x, y: forward(x, y, None, -100, 0.0, 0.0, "mean", None, False)[0], leaves)

    def check() -> float:
        logits, targets = random(512, vocabulary), data[0][1][:512]
        expected = logits.double()
        expected_loss, expected_lse = cross_entropy.cross_entropy(expected, targets)
        cross_entropy.cross_entropy_backward_(expected, targets, expected_lse, 1 / tokens)
        results = (expected_loss, expected_lse, expected) if backward else (expected_loss, expected_lse)
        return error(ours(logits, targets), results)

    work = (3 if backward else 1) * tokens * vocabulary * 2
    return Case(work, each(ours, data), each(by_torch, data), liger, check)


def adamw_case(n: int) -> Case:
    master, m, grad = (random(n, dtype=torch.float32) for _ in range(3))
    v, out, parts = torch.rand(n, device="cuda"), master.bfloat16(), SplitFloat32.of(master)
    scale, step = torch.full((1,), 0.5, device="cuda"), torch.full((), 10.0, device="cuda")
    settings: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

    def ours() -> None:
        adamw.adamw_(parts, m, v, grad, None, scale, adamw.coefficients(step=10, **settings))

    def by_torch() -> None:
        torch._fused_adamw_([master], [grad], [m], [v], [], [step], amsgrad=False, maximize=False, **settings)
        out.copy_(master)

    def check() -> float:
        p, m64, v64, g = (torch.cat((t[:1000000], t[-1000000:])).double() for t in (parts, m, v, grad))
        adamw.adamw_(p, m64, v64, g, None, scale.double(), adamw.coefficients(step=10, **settings))
        ours()
        return error((torch.cat((t[:1000000], t[-1000000:])) for t in (parts, m, v)), (p, m64, v64))

    return Case(28 * n, [ours], [by_torch], None, check, bound=1e-6)


def attention_of(heads: int, groups: int, length: int, width: int, value: int, backward: bool, fixed: bool) -> Case:
    sizes = ((heads, width), (groups, width), (groups, value), (heads, value))
    data = sets(lambda: tuple(random(1, length, *size).transpose(1, 2) for size in sizes))

    def ours(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        out, saved = attention.attention(q, k, v, fixed)
        return (out, *attention.attention_backward(dout, saved)) if backward else (out,)

    def by_torch(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> object:
        leaves = [t.detach().requires_grad_(backward) for t in (q, k, v)]
        out = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, leaves, dout) if backward else out

    def check() -> float:
        group = heads // groups  # only the first group of heads: a float64 reference of all heads would not fit
        part = [t[:, : group if t.shape[1] == heads else 1].double().requires_grad_() for t in data[0]]
        out = F.scaled_dot_product_attention(part[0], part[1], part[2], is_causal=True, enable_gqa=True)
        expected = (out, *torch.autograd.grad(out, part[:3], part[3])) if backward else (out,)
        found = ours(*data[0])
        notes["same"] = all(torch.equal(a, b) for _ in range(10) for a, b in zip(found, ours(*data[0]), strict=True))
        assert notes["same"] or not fixed
        return error([f[:, : w.shape[1]] for f, w in zip(found, expected, strict=True)], [w.detach() for w in expected])

    work = heads * length**2 * (4 * width + 3 * value if backward else width + value)
    return Case(work, each(ours, data), each(by_torch, data), None, check, gemm=True)


def grad_gemm_case(tokens: int, n: int, k: int) -> Case:
    data = sets(lambda: (torch.zeros(n, k, device="cuda"), random(tokens, n), random(tokens, k)))

    def by_torch(main: Tensor, dy: Tensor, x: Tensor) -> None:
        main += dy.t() @ x  # rounds the product to bf16

    def check() -> float:
        main, dy, x = random(n, k, dtype=torch.float32), *data[0][1:]
        expected = main[:256].double() + dy[:, :256].double().t() @ x.double()
        wgrad_gemm.accumulate_gradient_(main, dy, x)
        return error([main[:256]], [expected])

    ours = each(wgrad_gemm.accumulate_gradient_, data)
    return Case(2 * tokens * n * k, ours, each(by_torch, data), None, check, bound=1e-5, gemm=True)


CASES: dict[str, Callable[[], Case]] = {
    "rms_norm 8192x4096 + residual": lambda: norm_forward(8192, 4096, True),
    "rms_norm 8192x4096": lambda: norm_forward(8192, 4096, False),
    "rms_norm 327680x128": lambda: norm_forward(327680, 128, False),
    "rms_norm backward 8192x4096 + residual": lambda: norm_backward(8192, 4096),
    "rope 8192x40x128": lambda: rope_case(8192, 32, 8, 128),
    "swiglu 8192x14336": lambda: swiglu_forward(8192, 14336),
    "swiglu backward 8192x14336": lambda: swiglu_backward(8192, 14336),
    "cross_entropy 4096x128256": lambda: loss(4096, 128256, backward=False),
    "cross_entropy with backward 4096x128256": lambda: loss(4096, 128256, backward=True),
    "adamw 500M": lambda: adamw_case(500_000_000),
    "attention 32:8x8192x128": lambda: attention_of(32, 8, 8192, 128, 128, False, False),
    "attention with backward": lambda: attention_of(32, 8, 8192, 128, 128, True, False),
    "attention with backward, deterministic": lambda: attention_of(32, 8, 8192, 128, 128, True, True),
    "attention with backward, deterministic, MLA": lambda: attention_of(16, 16, 8192, 192, 128, True, True),
    "attention with backward, deterministic, 256 wide": lambda: attention_of(16, 8, 8192, 256, 256, True, True),
    "grad_gemm 8192x4096x14336": lambda: grad_gemm_case(8192, 4096, 14336),
}


def seconds(calls: Calls) -> tuple[float, str]:
    """(median device seconds of a call, "graph" or "events")."""

    def run_all() -> list[object]:
        return [call() for call in calls]

    outputs = run_all()  # kept alive, so that every call writes to its own memory
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run_all()
        run, how = cast(Callable[[], object], graph.replay), "graph"
    except Exception:  # a call that synchronizes with the host cannot be captured
        run, how = run_all, "events"
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(3 + SAMPLES)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    del outputs
    times = [start.elapsed_time(end) / 1e3 / len(calls) for start, end in events[3:]]
    return statistics.median(times), how


def peak_rate(gemm: bool) -> float:
    """The rate this GPU reaches: FLOP/s of a square bf16 GEMM, or bytes/s, read and written, of a copying kernel."""
    if gemm:
        a, b = random(8192, 8192), random(8192, 8192)
        return 2 * 8192**3 / seconds([lambda: a @ b] * SETS)[0]
    pairs = sets(lambda: (random(2**28), random(2**28)))
    return 2**30 / seconds(each(lambda a, b: torch.neg(b, out=a), pairs))[0]  # a graph runs a copy on a copy engine


def measure(name: str) -> dict[str, Any]:
    """One row of the table."""
    torch.manual_seed(0)
    use_kernels(usual_kernels(torch.device("cuda")))
    case = CASES[name]()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN
    case_error = case.error()
    torch.use_deterministic_algorithms(False)
    row: dict[str, Any] = {"name": name, "error": case_error, "bound": case.bound, "ok": case_error < case.bound}
    unit, per = ("TFLOP/s", 1e12) if case.gemm else ("GB/s", 1e9)
    limit = peak_rate(case.gemm) / per
    ours, how = seconds(case.ours)
    rate = case.work / ours / per
    row |= {**notes, "microseconds": ours * 1e6, "measured": how}
    row |= {"rate": rate, "unit": unit, "limit": limit, "share": rate / limit}
    for peer, calls in (("torch", lambda: case.torch), ("liger", case.liger)):
        try:
            if calls is not None:
                theirs, how = seconds(calls())
                row |= {f"{peer}_microseconds": theirs * 1e6, f"{peer}_ratio": theirs / ours, f"{peer}_measured": how}
        except Exception as problem:  # torch or Liger is missing or fails: our result still counts
            row[f"{peer}_failure"] = f"{type(problem).__name__}: {problem}"[:300]
    return row


def measure_in_process(name: str) -> dict[str, Any]:
    """`measure` in a new process."""
    try:
        with get_context("spawn").Pool(1) as pool:
            return pool.apply_async(measure, (name,)).get(180)
    except Exception as problem:
        return {"name": name, "ok": False, "failure": f"{type(problem).__name__}: {problem}"}


def line(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"{row['name']:<42} FAILED: {row['failure']}"
    ratios = "".join(f"{row.get(f'{peer}_ratio', float('nan')):>8.2f}" for peer in ("torch", "liger"))
    verdict = "" if row["ok"] else f"  WRONG: error {row['error']:.1e}, at most {row['bound']:.0e}"
    rate = f"{row['rate']:>8.0f} {row['unit']:<8}{row['share']:>7.1%}"
    return f"{row['name']:<42}{row['microseconds']:>9.1f}{rate}{ratios}{verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="texts: run only cases whose name contains one")
    parser.add_argument("--json", type=Path, help="JSON file of the results")
    args = parser.parse_args()
    print(f"{'':<42}{'us':>9}{'rate':>8} {'':<8}{'share':>7}{'torch/x':>8}{'liger/x':>8}")
    rows = []
    for name in (name for name in CASES if any(part in name for part in args.only)):
        rows.append(measure_in_process(name))
        print(line(rows[-1]), flush=True)
    write(args.json, {**stamp(f"1 x {torch.cuda.get_device_name()}, torch {torch.__version__}"), "cases": rows})
    return 0 if rows and all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
