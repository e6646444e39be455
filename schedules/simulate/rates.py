"""What a rank and its links attain, assumed or measured by `pentad calibrate`: the figures from which costs are
derived."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log
from typing import Any, NamedTuple

# Outermost first: replicas communicate once a step only.
HOST_ORDER = ("dp", "pp", "ep", "cp", "tp")
NOTABLY = 1.02  # times as fast: less is noise, and switching kernels changes the last bits of results
Curve = tuple[tuple[float, float], ...]  # (size, rate) in ascending order of sizes, not empty


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of the implementations of an operation (kernels/), of which the first is usually the fastest. `sizes` are
    those of a rank: for attention, sequences, tokens of a sequence, heads, key-value heads, and the widths of queries
    and of values; for grouped products, rows, experts, n and k."""

    op: str
    sizes: tuple[int, ...]
    seconds: tuple[tuple[str, float], ...]

    @property
    def key(self) -> tuple[str | int, ...]:
        """The key that kernels look up, without the numbers of tokens."""
        return self.op, *(self.sizes[2:] if "attention" in self.op else self.sizes[1:])

    @property
    def fastest(self) -> str:
        """The usual implementation, unless another is NOTABLY faster."""
        usual, least = self.seconds[0], min(self.seconds, key=lambda each: each[1])
        return least[0] if NOTABLY * least[1] < usual[1] else usual[0]


class KernelChoice(NamedTuple):
    """The kernels that ranks use (precision.kernels): 'torch', 'triton', 'cudnn', or 'auto': those `measured` as
    fastest, by the keys of KernelTimes, or else those that usually are. `cudnn_frontend`: whether they may include
    cuDNN's deterministic backward of attention, for which ranks need its Python frontend."""

    name: str = "auto"
    measured: tuple[tuple[tuple[str | int, ...], str], ...] = ()
    cudnn_frontend: bool = False

    def of(self, key: tuple[str | int, ...]) -> str:
        """The kernel measured as fastest, '' if nothing is known."""
        return dict(self.measured).get(key, "")


USUAL_KERNELS = KernelChoice()


@dataclass(frozen=True)
class Link:
    """Seconds before an operation, and bytes/s that a rank sends in it."""

    latency: float
    bandwidth: float

    def seconds(self, size: float, operations: int = 1) -> float:
        """Seconds of this many operations that send `size` bytes together."""
        return operations * self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Links:
    """A link by kind of operation; `send` also stands for the hops of a ring. Bytes are those that each rank sends in a
    ring algorithm."""

    all_gather: Link
    reduce_scatter: Link
    all_reduce: Link
    all_to_all: Link
    send: Link

    @staticmethod
    def uniform(latency: float, bandwidth: float) -> Links:
        return Links(*(Link(latency, bandwidth) for _ in range(5)))

    def shared(self, ranks: int, most: Links) -> Links:
        """The links if this many ranks of a collective are on a host: collectives in a ring use the links of all of
        them, up to the bandwidth of `most`; in sends and exchanges each rank uses its own."""
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        bandwidths = {kind: min(ranks * self.of(kind).bandwidth, most.of(kind).bandwidth) for kind in kinds}
        return replace(self, **{kind: Link(self.of(kind).latency, each) for kind, each in bandwidths.items()})

    def of(self, kind: str) -> Link:
        found: Link = getattr(self, "send" if kind == "ring" else kind)
        return found


@dataclass(frozen=True)
class AttentionRates:
    """FLOP/s of causal attention with heads of this width, by the length of sequences; the masked half does not count,
    and a backward counts 2.5 times the FLOPs of a forward."""

    width: int
    forward: Curve
    backward: Curve


@dataclass(frozen=True)
class ExpertRates:
    """FLOP/s of the grouped products of experts in F, B and W, by the mean rows of an expert."""

    forward: Curve
    backward: Curve
    weight: Curve

    @staticmethod
    def uniform(forward: float, backward: float, weight: float) -> ExpertRates:
        """The same for any number of rows."""
        return ExpertRates(*(((1.0, flops),) for flops in (forward, backward, weight)))

    def at(self, rows: float) -> tuple[float, float, float]:
        """FLOP/s of F, B and W. With fewer rows than at the first point, an expert takes as long as there: it reads its
        matrices, or adds to their gradients, all the same."""
        forward, backward, weight = (
            min(1.0, rows / curve[0][0]) * rate_at(curve, rows) for curve in (self.forward, self.backward, self.weight)
        )
        return forward, backward, weight


@dataclass(frozen=True)
class Rates:
    """FLOP/s of products, by FLOPs of a product: in the compute dtype, and in 8 bits with one scale for each factor
    (`products_8bit`; empty: unknown). FLOP/s of experts, in the compute dtype and, where known, in 8 bits with scales
    of blocks; and of attention. Bytes/s of copies in a rank's memory, of what layers do besides products
    (`elementwise`), and of an optimizer's update. Links inside layers to ranks on the same host and on other hosts,
    links of transfers and ZeRO on a host if no operation leaves it (`peer`), and the link to host memory. Seconds to
    launch an instruction; those that the host takes to issue exchanges inside a layer (`issue`; `peer_issue`: by peer
    copies, if no rank is on another host), and F, B and W of a layer without exchanges (`layer_issue`). `source` says
    where the figures come from, `tp_hidden` is the share of tp's bytes that products hide, and `host_order` the order
    of axes in which ranks fill hosts.
    """

    products: Curve
    products_8bit: Curve
    experts: tuple[ExpertRates, ...]
    attention: tuple[AttentionRates, ...]
    memory: float
    elementwise: float
    update: float
    intra_host: Links
    inter_host: Links
    peer: Links
    host_memory: Link
    launch: float
    issue: float
    source: str = ""
    peer_issue: float = 0.0
    layer_issue: tuple[float, float, float] = (0.0, 0.0, 0.0)
    tp_hidden: float = 0.0
    host_order: tuple[str, ...] = HOST_ORDER

    def __hash__(self) -> int:
        """Covers only what usually differs, for speed: many caches have rates in their keys."""
        return hash((self.source, self.memory, self.launch, self.issue))

    @property
    def flops(self) -> float:
        """FLOP/s of the largest products."""
        return self.products[-1][1]

    def attention_of(self, width: int) -> AttentionRates:
        """The attention rates of the nearest width."""
        return min(self.attention, key=lambda each: abs(log(each.width / width)))

    def typical(self, name: str) -> float:
        """A figure for people: 'flops', or bytes/s of gathers 'intra_host' or 'inter_host'."""
        return self.flops if name == "flops" else float(getattr(self, name).all_gather.bandwidth)

    def scaled(self, name: str, times: float) -> Rates:
        """Rates in which all that `typical(name)` stands for is that many times as fast."""
        if name != "flops":
            names = ("intra_host", "peer") if name == "intra_host" else (name,)
            changed: dict[str, Any] = {each: _scaled_links(getattr(self, each), times) for each in names}
            return replace(self, **changed)
        attention = tuple(
            replace(each, forward=_scaled(each.forward, times), backward=_scaled(each.backward, times))
            for each in self.attention
        )
        experts = tuple(
            ExpertRates(*(_scaled(curve, times) for curve in (each.forward, each.backward, each.weight)))
            for each in self.experts
        )
        return replace(
            self,
            products=_scaled(self.products, times),
            products_8bit=_scaled(self.products_8bit, times),
            experts=experts,
            attention=attention,
        )


@lru_cache(maxsize=65536)
def rate_at(curve: Curve, size: float) -> float:
    """Linear in the logarithm of the size between two points, and constant beyond the first and last."""
    at = bisect([each for each, _ in curve], size)
    if at in (0, len(curve)):
        return curve[max(0, at - 1)][1]
    (low, first), (high, second) = curve[at - 1 : at + 1]
    return first + (second - first) * log(size / low) / log(high / low)


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """The latency and bandwidth with the least squares of relative errors; the latency is at least 0."""
    weights = [each**-2 for each in seconds]
    total = sum(weights)
    size = sum(weight * each for weight, each in zip(weights, sizes, strict=True)) / total
    took = sum(weight * each for weight, each in zip(weights, seconds, strict=True)) / total
    rows = list(zip(weights, sizes, seconds, strict=True))
    variance = sum(weight * (each - size) ** 2 for weight, each, _ in rows)
    slope = sum(weight * (each - size) * (second - took) for weight, each, second in rows) / variance
    if slope <= 0 or took < slope * size:  # noise: fit through the origin
        slope = sum(w * each * second for w, each, second in rows) / sum(w * each**2 for w, each, _ in rows)
        return Link(0.0, 1 / slope)
    return Link(took - slope * size, 1 / slope)


def _scaled(curve: Curve, times: float) -> Curve:
    return tuple((size, times * rate) for size, rate in curve)


def _scaled_links(links: Links, times: float) -> Links:
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
    return Links(*(replace(link, bandwidth=times * link.bandwidth) for link in (getattr(links, k) for k in kinds)))
