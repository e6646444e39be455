"""Displays a table of rates beside the rates that plans assume without one."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from pentad.orchestrator.calibration.calibrate import GROUPS
from pentad.orchestrator.calibration.refine import Refined
from pentad.orchestrator.gpus.rate_table import CPU, RateTable
from pentad.orchestrator.gpus.table import GPUS
from pentad.orchestrator.planning.formatting import counted, format_duration, format_percent
from pentad.orchestrator.planning.hardware import rates_of
from pentad.schedules.simulate.rates import Link, Links, Rates

KINDS = tuple(Links.__dataclass_fields__)
NOTABLE = 0.02  # fraction of compute time worth mentioning
WHERE = {"intra_host": "on a host", "peer": "by peer copies", "inter_host": "between hosts"}
ASSUMED = {name: f"links {where}" for name, where in WHERE.items()} | {"issue": "the host's exchanges in layers"}


def show_table(table: RateTable, console: Console) -> None:
    ranks, hosts = table.ranks
    assumed = rates_of("cpu") if table.gpu == CPU else rates_of("cuda", table.gpu) if table.gpu in GPUS else None
    usual = {} if assumed is None else dict(_rows(assumed, table.assumed))
    grid = Table.grid(padding=(0, 2), pad_edge=True)
    grid.add_row("", "measured", "assumed without", style="dim")
    for name, text in _rows(table.rates, table.assumed):
        grid.add_row(name, text, usual.get(name, ""))
    console.print(f" {table.gpu}: {counted(ranks, 'rank')} on {counted(hosts, 'host')}", highlight=False)
    for each in table.kernels:
        times = ", ".join(f"{kernel} {format_duration(seconds)}" for kernel, seconds in each.seconds)
        grid.add_row(f"{each.op} of {' x '.join(map(str, each.sizes))}", times, each.seconds[0][0])
    console.print(grid)
    if table.assumed:
        console.print(f" not measured, so assumed: {', '.join(ASSUMED[each] for each in table.assumed)}")


def show_refined(found: Refined, console: Console) -> None:
    for name, factor in (("compute", found.compute), ("updates", found.update), ("transfers", found.transfer)):
        text = f"{factor:.3g} times as fast as the table had" if factor != 1 else "as the table has it"
        console.print(f" {name}: {text}", highlight=False)
    if found.starved >= NOTABLE:
        text = f" other processes had the cores for {format_percent(found.starved)} of compute, which is left out"
        console.print(text, highlight=False)
    seconds = [format_duration(each) for each in (found.measured, found.before, found.after)]
    console.print(f" a step took {seconds[0]}: predicted {seconds[1]} before, {seconds[2]} now", highlight=False)


def _rows(rates: Rates, left_out: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    yield "products", f"{_span(rates.products)} FLOP/s"
    if rates.products_8bit:
        yield "products in 8 bits", f"{_span(rates.products_8bit)} FLOP/s"
    for name, experts in zip(("", " in 8 bits"), rates.experts, strict=False):
        spans = ", ".join(map(_span, (experts.forward, experts.backward, experts.weight)))
        yield f"experts' F, B, W{name}", f"{spans} FLOP/s"
    for each in rates.attention:
        yield f"attention of width {each.width}", f"{_span(each.forward)}, back {_span(each.backward)} FLOP/s"
    for name in ("memory", "elementwise", "update"):
        yield name, f"{_scaled(getattr(rates, name))}B/s"
    yield "to the host", _link(rates.host_memory)
    yield "launch", format_duration(rates.launch)
    yield "host's F, B, W of a layer", ", ".join(map(format_duration, rates.layer_issue))
    if "issue" not in left_out:
        yield "host's exchange in a layer", format_duration(rates.issue)
        yield "by peer copies", format_duration(rates.peer_issue)
    for group in (each for each in GROUPS if each not in left_out):
        for kind in () if group == "peer" and rates.peer == rates.intra_host else KINDS:
            yield f"{kind} {WHERE[group]}", _link(getattr(getattr(rates, group), kind))


def _span(curve: tuple[tuple[float, float], ...]) -> str:
    """Rates of the smallest and the largest size."""
    return "-".join(dict.fromkeys(_scaled(curve[at][1]) for at in (0, -1)))


def _link(link: Link) -> str:
    return f"{format_duration(link.latency)} + {_scaled(link.bandwidth)}B/s"


def _scaled(value: float) -> str:
    """'1.23 T'"""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "
