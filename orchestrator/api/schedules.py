"""`pentad.schedule` and `pentad schedule`: a program, proven and simulated; needs neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from pentad.orchestrator.api.rendering import as_text
from pentad.orchestrator.monitoring.tables import line
from pentad.orchestrator.monitoring.terminal_timeline import bars, coloured_grid, is_coloured
from pentad.schedules.catalogue import generate
from pentad.schedules.compiler import compile_program, summary
from pentad.schedules.draw.grid import time_cells, time_grid
from pentad.schedules.draw.html import SimulatedProgram, schedule_page
from pentad.schedules.draw.svg import svg_grid
from pentad.schedules.generators.torch_csv import torch_csv
from pentad.schedules.ir.argument_types import checks_types
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.search.auto import AUTO, choose, describe
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.critical_path import breakdown, critical_path, what_if
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions

MOST_CELLS = 200  # the widest grid that is shown by default


@dataclass(frozen=True, repr=False)
class Schedule:
    """A proven program and the costs it is simulated at. `chosen` explains the choice of `auto`."""

    program: Program
    costs: Costs
    chosen: str = ""

    @cached_property
    def timeline(self) -> Timeline:
        """Simulated on first use: a large program has hundreds of thousands of spans."""
        return simulate(self.program, self.costs)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return summary(self.program, self.costs, with_streams=False)

    @property
    def makespan(self) -> float:
        """From the first start on any rank to the last end on any rank, in the unit of the costs."""
        return self._facts["makespan"]

    @property
    def longest(self) -> float:
        """From the first start to the last end on the rank where that is longest."""
        return self._facts["longest"]

    @property
    def bubble(self) -> dict[str, float]:
        """The idle share of the ranks' time, 0 to 1, of `makespan` and of `longest` (docs/glossary.md)."""
        return self._facts["bubble"]

    @property
    def peak_activations(self) -> list[float]:
        """The most activations that each rank keeps, in microbatches of all its layers."""
        return self._facts["peak_activations"]

    @property
    def title(self) -> str:
        """'4 ranks, 8 microbatches' and the slices, if any."""
        sizes = f"{self.program.ranks} ranks, {self.program.microbatches} microbatches"
        return sizes + (f" of {self.program.slices} slices" if self.program.slices > 1 else "")

    @property
    def cells(self) -> int:
        """Width of the time grid."""
        return round(self.makespan / min(*self.costs.forward, *self.costs.backward, *self.costs.weight))

    @checks_types
    def facts(self, *, with_streams: bool = True) -> dict[str, Any]:
        """What `pentad schedule --json` prints; with or without every instruction as text."""
        return summary(self.program, self.costs, with_streams=True) if with_streams else dict(self._facts)

    def bounds(self) -> dict[str, Any]:
        """The shares of the critical path by op and by rank, and the step under changed costs."""
        path = critical_path(self.program, self.costs)
        seconds, found = path[-1].end - path[0].start, breakdown(path)
        by_op = {str(op): part / seconds for op, part in found.by_op.items()}
        by_rank = {str(rank): part / seconds for rank, part in found.by_rank.items()}
        scenarios = [scenario._asdict() for scenario in what_if(self.program, self.costs)]
        return {"critical_path": {"by_op": by_op, "by_rank": by_rank}, "what_if": scenarios}

    def svg(self) -> str:
        """A figure of a step."""
        return svg_grid(self.timeline, title=f"{self.program.name}, {self.title}", timed=False)

    @checks_types
    def html(self, *others: Schedule, facts: dict[str, str] | None = None, limit: float | None = None) -> str:
        """An interactive page of a step, with `others` below it; `facts` are shown beside the title and `limit` in the
        curves of activations."""
        shown = (self, *others)
        names = " and ".join(each.program.name for each in shown)
        facts = {**(facts or {}), "program": ", ".join(each.program.hash[:12] for each in shown)}
        drawn = [SimulatedProgram(each.program, each.costs, each.timeline) for each in shown]
        return schedule_page(drawn, title=f"{names}, {self.title}", facts=facts, limit=limit)

    def csv(self) -> str:
        """The compute order for torch.distributed.pipelining. Raises PentadError if its notation cannot express it."""
        return torch_csv(self.program)

    def lines(self) -> dict[str, str]:
        """What the command line prints about it: text by heading."""
        peaks = ", ".join(f"{peak:g}" for peak in self.peak_activations)
        bubble = self.bubble
        return {
            "schedule": f"{self.program.name}, {self.title}, proven, hash {self.program.hash[:12]}",
            **({"auto": self.chosen} if self.chosen else {}),
            "makespan": f"{self.makespan:g}, bubble {100 * bubble['makespan']:.2f} %",
            "longest": f"{self.longest:g}, bubble {100 * bubble['longest']:.2f} %, where a step needs no barrier",
            "activations": f"{peaks} microbatches at the peak of each rank",
        }

    def grid(self, console: Console) -> list[Text]:
        """The time grid; in a terminal too narrow for it, bars that fill the terminal."""
        lines, coloured = time_grid(self.program, self.timeline, self.costs).splitlines(), is_coloured(console)
        if console.is_terminal and max(map(len, lines)) > console.width:
            return bars(self.timeline, console.width, coloured=coloured)
        if coloured:
            return coloured_grid(time_cells(self.program, self.timeline, self.costs))
        return list(map(Text, lines))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if self.cells <= MOST_CELLS:
            yield from map(line, self.grid(console))
            yield Text()
        for name, text in self.lines().items():
            yield line((f"{name:<12}", "dim"), text)

    __repr__ = as_text
    _repr_svg_ = svg


@checks_types
def schedule(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    chunks: int | None = None,
    group: int | None = None,
    slices: int | None = None,
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
    comm: float = 0.0,
    memory_limit: float | None = None,
    recompute: str | Iterable[int] | None = None,
    max_resident: float | None = None,
    zero: int | None = None,
    max_gathered: int | None = None,
    prefetch: int | None = None,
    post_validation: bool = False,
) -> Schedule:
    """Builds, proves and simulates a program. The arguments are those of `pentad schedule`, which `pentad schedule
    --help` explains; `costs` are those of F, B and W of one microbatch on a whole rank, and `recompute` is 'all' or
    the stages that recompute.

    Raises PentadError for a name, sizes or options that are not allowed, and ScheduleError if the proof fails.
    """
    if len(costs) != 3:
        found = ",".join(f"{each:g}" for each in costs)
        raise PentadError(f"--costs is '{found}': expected three numbers F,B,W such as 1,1,1")
    options = ScheduleOptions(chunks, group, memory_limit, slices)

    def costs_of(placed: Program) -> Costs:
        parts = {"chunks": placed.chunks, "slices": placed.slices}
        return Costs.uniform(placed.stages, *costs, **parts, transfer=comm)

    if name == AUTO:
        choice = choose(ranks, microbatches, costs_of, options)
        order, options, chosen = choice.best.program, ScheduleOptions(), describe(choice)
    else:
        order, chosen = generate(name, ranks, microbatches, options), ""
    memory_options = _memory_options(zero, max_gathered, prefetch, max_resident)._replace(
        recompute=_stages(recompute, order)
    )
    found = costs_of(order)
    program = compile_program(
        name,
        ranks,
        microbatches,
        costs=found,
        replicas=2 if memory_options.zero else 1,  # one replica has nothing to shard
        post_validation=post_validation,
        options=options,
        memory_options=memory_options,
        order=order if chosen else None,  # other orders may depend on the costs, which depend on the order's placement
    )
    return Schedule(program, found, chosen)


def _memory_options(
    zero: int | None, max_gathered: int | None, prefetch: int | None, max_resident: float | None
) -> MemoryOptions:
    """Raises PentadError on options that are out of range, or that need another one."""
    stage, ahead = zero or 0, 1 if prefetch is None else prefetch
    if not 0 <= stage <= 3:
        raise PentadError(f"--zero is {stage}: expected a stage of ZeRO, 0 to 3")
    if max_gathered is not None and (stage < 3 or max_gathered < 1):
        raise PentadError(f"--max-gathered is {max_gathered} with --zero {stage}: expected at least 1 with --zero 3")
    if prefetch is not None and (stage < 1 or ahead < 0):
        raise PentadError(f"--prefetch is {ahead} with --zero {stage}: expected at least 0 with --zero 1, 2 or 3")
    if max_resident is not None and not 0 < max_resident < inf:
        raise PentadError(f"--max-resident is {max_resident:g}: expected a number of microbatches greater than 0")
    return MemoryOptions(stage, ahead, max_gathered, max_resident=max_resident)


def _stages(recompute: str | Iterable[int] | None, order: Program) -> frozenset[int]:
    """The stages that `recompute` names."""
    if recompute in (None, "all"):
        return frozenset(range(order.stages) if recompute else ())
    text = recompute if isinstance(recompute, str) else ",".join(map(str, recompute or ()))
    try:
        found = frozenset(int(part) for part in text.split(","))
    except ValueError:
        found = frozenset({-1})
    if not found <= set(range(order.stages)):
        raise PentadError(f"--recompute is '{text}': expected all or stages of 0 to {order.stages - 1}, such as 0,1")
    return found
