"""Why a plan takes as long as it does, what would make another one the fastest, and what would fit if nothing does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.first_microbatches import with_words
from pentad.orchestrator.planning.estimate import flops_per_token, simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory
from pentad.orchestrator.planning.formatting import format_bytes, format_duration, format_percent
from pentad.orchestrator.planning.hardware import NODE_GPUS, rates_for
from pentad.orchestrator.search.layout import Work
from pentad.orchestrator.search.placement_bounds import even_seconds
from pentad.orchestrator.search.result import Planned, plan_setting
from pentad.orchestrator.search.search import SearchResult, search
from pentad.orchestrator.search.space import AXES
from pentad.orchestrator.search.time_bounds import Timed, update_seconds
from pentad.schedules.simulate.events import Events, acyclic_events
from pentad.schedules.simulate.rates import Rates
from pentad.schedules.spec.plan import Plan

FACTORS = (0.25, 4.0)  # by which a rate may be off
STEPS = 6  # of a bisection between them
WORTH = 0.005  # a gain in time worth mentioning
GROWTH, MOST_GROWTH = 1.1, 2.0  # of memory, where nothing fits


class Shares(NamedTuple):
    """Seconds of a step by cause: matrix products at the rate of large ones; the rest of the layers; the pipeline's
    bubble, imbalance and recomputation; waiting for weights, gradients and copies; and the update."""

    products: float
    layers: float
    pipeline: float
    collectives: float
    update: float


NAMES = (
    "matrix products",
    "the rest of layers and their communication",
    "bubble, imbalance and recomputation",
    "waiting for weights, gradients and copies",
    "the update",
)


def shares_of(planned: Planned) -> Shares:
    setting, plan = planned.setting, planned.plan
    work = Work(planned.config if plan.cuda_graphs else with_words(planned.config, ("cluster.cuda_graphs=false",)))
    layout = work.layout_of(setting)
    timed = Timed(layout, setting.order, setting.microbatches)
    flops = flops_per_token(plan.model, plan.batch.sequence_length, frozen=plan.lora is not None)
    products = plan.batch.tokens * flops / plan.mesh.size / work.rates.flops
    in_layers = even_seconds(work, setting.mesh, setting.microbatches)
    computed = timed.bound_with(timed.end, setting._replace(offload=0.0)) if setting.recompute != "none" else timed.end
    costs = layout.sharded if plan.zero else layout.plain
    update = update_seconds(work, costs)
    computed = min(computed, planned.seconds - update)
    return Shares(products, in_layers - products, computed - in_layers, planned.seconds - update - computed, update)


def reason(shares: Shares, best: Shares | None) -> str:
    """Where the time of a step goes; for a plan that is not the best, what makes it slower."""
    if best is None:
        parts = sorted(zip(shares, NAMES, strict=True), reverse=True)
        total = sum(shares)
        return ", ".join(f"{format_percent(part / total)} {name}" for part, name in parts[:3])
    more, name = max((own - other, name) for own, other, name in zip(shares, best, NAMES, strict=True))
    return f"{format_percent(sum(shares) / sum(best) - 1)} slower: {format_duration(more)} more of {name}"


@dataclass(frozen=True)
class Flip:
    """A change that would make `other` the fastest."""

    sentence: str
    other: Planned


def flips(config: RunConfig, found: SearchResult) -> Iterator[Flip]:
    """The rate, as close as possible to the assumed one, at which the second mesh would be fastest; and the memory with
    which another setting would be."""
    if len(found.choices) > 1:
        yield from _by_rates(*found.choices[:2])
    best = found.choices[0]
    if found.missed is not None and found.missed.seconds < best.seconds * (1 - WORTH):
        planned = plan_setting(config, found.missed.setting, found.held)
        if planned.seconds < best.seconds * (1 - WORTH):
            gain = format_percent(1 - planned.seconds / best.seconds)
            yield Flip(
                f"with {format_bytes(planned.bytes)} of memory, {describe(planned)} would be {gain} faster", planned
            )


def _by_rates(best: Planned, second: Planned) -> Iterator[Flip]:
    rates = rates_for(best.config.cluster, "cuda")
    events = [acyclic_events(each.plan.program) for each in (best, second)]
    is_wide = best.plan.mesh.size > NODE_GPUS
    names = {"inter_host": "between hosts"} if is_wide else {}
    found = list[tuple[float, str, float]]()
    for name in (*names, "intra_host", "flops"):
        for factor in FACTORS:
            if (at := _crossing(name, factor, (best, second), events)) is not None:
                found.append((max(at, 1 / at), name, at * rates.typical(name)))
    if found:
        _, name, rate = min(found)
        side = "less" if rate < rates.typical(name) else "more"
        what = {"inter_host": "between hosts", "intra_host": "between the GPUs of a host"}.get(name, "in products")
        unit = f"{rate / 1e12:.0f} TFLOP/s" if name == "flops" else f"{rate / 1e9:.0f} GB/s"
        now = f"{rates.typical(name) / (1e12 if name == 'flops' else 1e9):.0f}"
        sentence = f"with {side} than {unit} {what} (assumed: {now}), {describe(second)} would be the fastest"
        yield Flip(sentence, second)
    else:
        sentence = f"no link or product at a quarter to four times its assumed rate: {describe(second)} stays behind"
        yield Flip(sentence, second)


def _crossing(name: str, factor: float, plans: tuple[Planned, Planned], events: list[Events]) -> float | None:
    """The smallest factor of a rate, between 1 and `factor`, at which the second plan is faster; None without one."""

    def changed(plan: Plan, times: float) -> Rates:
        assert plan.rates is not None
        return plan.rates.scaled(name, times)

    def gain(times: float) -> float:
        first, second = (
            simulated_seconds(each.plan, e, changed(each.plan, times)) for each, e in zip(plans, events, strict=True)
        )
        return first - second

    if gain(factor) <= 0:
        return None
    inside, outside = 1.0, factor
    for _ in range(STEPS):
        middle = (inside * outside) ** 0.5
        inside, outside = (inside, middle) if gain(middle) > 0 else (middle, outside)
    return outside


def nearest_fits(
    config: RunConfig, gpus: int, found: SearchResult, held: frozenset[str]
) -> Iterator[tuple[str, Planned]]:
    """If nothing fits: how little more memory would help, and how many more GPUs, each with the resulting plan."""
    least = min((each.least_bytes for each in found.refusals.values() if each.least_bytes), default=0)
    if not least:
        return
    room = float(least)
    while room <= MOST_GROWTH * least:
        device = DeviceMemory(int(room), found.device.where)
        if choices := search(config, gpus, device, held, listed=1).choices:
            yield f"with {format_bytes(choices[0].bytes)} of memory a GPU", choices[0]
            break
        room *= GROWTH
    if held.issuperset(f"mesh.{axis}" for axis in AXES):
        return
    for more in (2 * gpus, 4 * gpus, 8 * gpus):
        if choices := search(config, more, found.device, held, listed=1).choices:
            yield f"on {more} GPUs", choices[0]
            break


def describe(planned: Planned) -> str:
    """'dp4 x pp2, zb-v, 8 x 1 sequences, ZeRO-1'"""
    setting, batch = planned.setting, planned.plan.batch
    chunks = f" {setting.order.chunks} chunks" if setting.order.chunks else ""
    parts = [
        str(setting.mesh),
        f"{setting.order.name}{chunks}",
        f"{batch.microbatches} x {batch.micro_batch_size} sequences",
    ]
    if setting.zero:
        over = "" if setting.shards is None else f" over {setting.shards} ranks"
        parts.append(f"ZeRO-{setting.zero}{over}" + ", all units gathered" * (setting.max_gathered is not None))
    if setting.unit_layers is not None:
        parts.append("units of 1 layer" if setting.unit_layers == 1 else f"units of {setting.unit_layers} layers")
    if setting.recompute != "none":
        layers = "" if setting.recompute_layers is None else f" of {setting.recompute_layers} layers a stage"
        parts.append(f"{setting.recompute} recomputation{layers}")
    if setting.offload:
        parts.append(f"{format_percent(setting.offload)} offloaded")
    if planned.config.cluster.transport == "nccl":
        parts.append("over NCCL")
    return ", ".join(parts)
