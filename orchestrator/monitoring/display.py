"""What a person sees of a run: its plan, a live table in a terminal, or a line a step anywhere else."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pentad.orchestrator.monitoring.progress_bars import bars, is_coloured, legend, sparkline
from pentad.orchestrator.planning.estimate import memories
from pentad.orchestrator.planning.quantities import count, duration, number, percent, size
from pentad.schedules.draw.palette import LOOKS
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Bubble
from pentad.schedules.spec.mesh import Coordinates
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import parameters

_LINES = 8  # steps in the live table
_MOST_RANKS = 32  # rows of a table of ranks
COLOURS = {  # of the states of ranks and runs
    **{"running": "green", "idle": "dim", "waiting": "yellow", "starting": "yellow"},
    **{"hung": "bold red", "lost": "bold red", "failed": "bold red"},
    **{"paused": "yellow", "recovering": "bold yellow", "stopping": "yellow", "finished": "green", "stopped": "dim"},
}
OVER = ("finished", "stopped", "failed")  # states of a run without ranks


class RankPlacement(NamedTuple):
    """Where a rank sits. `device` is say 'GPU 0' or 'CPU'; `pid` -1 where no process runs yet."""

    rank: int
    coordinates: Coordinates
    node: str
    device: str
    pid: int = -1


class RankState(NamedTuple):
    """What a rank does; `instruction` is empty between steps."""

    rank: int
    coordinates: Coordinates
    state: str
    instruction: str
    step: int


class Display:
    """Tells of one run; use it in a `with`, which gives the terminal back however the run ends."""

    def __init__(self, console: Console, name: str, steps: int) -> None:
        self.console, self.name, self.steps = console, name, steps
        self.moves = console.is_terminal and not console.is_dumb_terminal
        self.rows: deque[dict[str, Any]] = deque(maxlen=_LINES)
        self.losses: list[float] = []
        self.states: Sequence[RankState] = ()
        self.state = "starting"
        self.live: Live | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def plan(self, plan: Plan, costs: Costs, seats: Sequence[RankPlacement] = ()) -> None:
        """Prints what will run, where, in how much memory, and a step as simulated with `costs`."""
        for part in plan_view(self.console, plan, costs, seats):
            self.console.print(part)

    def step(self, row: dict[str, Any], states: Sequence[RankState] = ()) -> None:
        """Shows a finished step: `row` has runfolder.METRIC_KEYS."""
        self.rows.append(row)
        if row["loss"] is not None and math.isfinite(row["loss"]):
            self.losses.append(row["loss"])
        if not self.moves:
            self.console.print(Text(step_line(row, self.steps)), soft_wrap=True)
            return
        self.refresh(states or self.states)

    def turn(self, state: str) -> None:
        """The run is in another state now."""
        self.state = state
        if self.live is not None:
            self.refresh(self.states)

    def refresh(self, states: Sequence[RankState]) -> None:
        """Shows what the ranks do now, in a terminal."""
        self.states = states
        if not self.moves:
            return
        if self.live is None:
            self.live = Live(console=self.console, auto_refresh=False)
            self.live.start()
        self.live.update(self._table(), refresh=True)

    def note(self, text: str) -> None:
        """Prints a sentence above the live table; in a log it is one line, however long."""
        if self.moves:
            self.console.print(Padding(Text(text), (0, 1)))
        else:
            self.console.print(Text(f" {text}"), soft_wrap=True)

    def _stop(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _table(self) -> RenderableType:
        parts: list[RenderableType] = [Text(), self._header()]
        if self.rows:
            parts += [Text(), steps_table(self.rows)]
        if self.states and self.state not in OVER:
            room = max(1, min(_MOST_RANKS, self.console.height - _LINES - 10))
            parts += [Text(), states_table(self.states, room, self.rows[-1]["step"] if self.rows else -1)]
        return Group(*parts)

    def _header(self) -> RenderableType:
        done = self.rows[-1]["step"] + 1 if self.rows else 0
        head = Table.grid(padding=(0, 2))
        wide = max(10, min(40, self.console.width - 50))
        bar = ProgressBar(self.steps, done, width=wide, complete_style="cyan", finished_style="green")
        pace = [row["step_seconds"] for row in self.rows]
        left = (self.steps - done) * sum(pace) / len(pace) if pace else 0.0
        rest = Text("done" if done >= self.steps else f"{duration(round(left))} left", "dim")
        if self.state not in ("starting", "running", "finished"):
            rest = Text(self.state, COLOURS[self.state])
        head.add_row(Text(f" {self.name}", "bold"), f"{done}/{self.steps} steps", bar, rest)
        if len(self.losses) < 2 or self.console.options.ascii_only:
            return head
        room = max(10, min(60, self.console.width - 30))
        curve = (sparkline(self.losses, room), "cyan")
        return Group(head, Text.assemble((" loss ", "dim"), f"{self.losses[0]:.3f} ", curve, f" {self.losses[-1]:.3f}"))


def ending(console: Console, summary: dict[str, Any]) -> None:
    """Prints what came out of a run (the driver's summary) and where the files are."""
    files = summary["files"]
    facts = {
        summary["state"]: f"{summary['steps']} steps",
        "loss": f"{number(summary['first_loss'], '.4f')} at first, {number(summary['loss'], '.4f')} now",
        "pace": f"{number(summary['tokens_per_second'], ',.0f')} tokens/s",
        "bubble": f"{percent(summary['bubble_measured'])} measured, {percent(summary['bubble_planned'])} planned",
        "folder": summary["folder"],
        "timeline": files.get("page"),
        "trace": f"{files['trace']} (for Perfetto)" if "trace" in files else None,
    }
    console.print()
    for name, fact in facts.items():
        if fact is not None:
            console.print(Text.assemble((f" {name:<9} ", "dim"), fact), soft_wrap=True)


def plan_view(console: Console, plan: Plan, costs: Costs, seats: Sequence[RankPlacement]) -> list[RenderableType]:
    """The parts of a plan, to be printed one below the other."""
    coloured = is_coloured(console)
    timeline = simulate(plan.program, costs)
    label = len(str(plan.program.ranks - 1)) + 2
    rows = bars(timeline, max(20, console.width - label - 1), coloured=coloured)
    drawing = [Text.assemble((f"{rank:>{label - 1}} ", "dim"), row, no_wrap=True) for rank, row in enumerate(rows)]
    ops = [op for op in LOOKS if any(span.op == op for span in timeline.compute)]
    when = Text.assemble(
        (" one step, simulated", "bold"),
        (f"  {duration(timeline.makespan)} of compute  bubble {bubble_text(timeline.bubble())}", ""),
    )
    parts: list[RenderableType] = [facts_table(plan), Text(), seats_table(plan, seats), memory_line(plan), Text(), when]
    return [*parts, *drawing, Text.assemble(" " * label, legend(ops, coloured=coloured))]


def facts_table(plan: Plan) -> Table:
    m, b, program = plan.model, plan.batch, plan.program
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    kinds = f"{plan.dtype} on {'GPUs' if plan.device == 'cuda' else 'CPUs'}, {plan.transport} transfers"
    table.add_row(Text(" run"), Text(plan.name, "bold"))
    own = f"{m.custom.text}, " if m.custom is not None else ""
    table.add_row(
        " model", f"{own}{count(parameters(m))} parameters: {m.layers} layers of {m.hidden}, vocabulary of {m.vocab:,}"
    )
    table.add_row(" batch", f"{b.global_batch_size} sequences of {b.length} = {b.tokens:,} tokens a step")
    table.add_row(" mesh", f"{plan.mesh}: {plan.mesh.size} ranks, {kinds}")
    parts = f"{program.microbatches} microbatches of {b.rows}" + f" in {program.slices} slices" * (program.slices > 1)
    if plan.zero:
        shards = max(map(plan.shards, plan.shares))
        table.add_row(" zero", f"stage {plan.zero}, {shards} shards of a pipeline stage")
    table.add_row(" program", f"{program.name}, {parts}, hash {program.hash[:12]}")
    if plan.recompute:
        stages = [stage for stage, mode in enumerate(plan.recompute) if mode != "none"]
        where = "" if len(stages) == program.stages else f" of stages {', '.join(map(str, stages))}"
        table.add_row(" recompute", f"{max(plan.recompute, key=('none', 'selective', 'full').index)}{where}")
    return table


def seats_table(plan: Plan, seats: Sequence[RankPlacement]) -> Table:
    """A row a rank: its place in the mesh, its layers, where it runs and the most memory it needs."""
    table = table_of("rank>", "place", "layers", *(("node", "device", "pid>") if seats else ()), "memory>")
    table.columns[2].no_wrap = False  # of many chunks
    by_rank, each = {seat.rank: seat for seat in seats}, memories(plan)
    for rank in range(min(plan.mesh.size, _MOST_RANKS)):
        cells = [str(rank), str(plan.mesh.coordinates(rank)), layers_text(plan, *plan.stages_of(rank))]
        if seats:
            seat = by_rank[rank]
            cells += [seat.node, seat.device, str(seat.pid) if seat.pid >= 0 else "-"]
        table.add_row(*map(Text, [*cells, size(each[rank]["total"])]))
    return _with_more(table, plan.mesh.size)


def memory_line(plan: Plan) -> RenderableType:
    """What the fullest rank's memory is for."""
    each = memories(plan)
    fullest = max(range(plan.mesh.size), key=lambda rank: each[rank]["total"])
    apart = {"total", "host"}
    text = ", ".join(f"{name} {size(part)}" for name, part in each[fullest].items() if part and name not in apart)
    total, host = each[fullest]["total"], max(parts["host"] for parts in each)
    text += f"; up to {size(host)} of a rank's activations wait on its host" if host else ""
    return Padding(Text(f"rank {fullest} is the fullest with {size(total)}: {text}", "dim"), (0, 1))


def layers_text(plan: Plan, *stages: int) -> str:
    """Stages that follow each other are one span."""
    spans: list[tuple[int, int]] = []
    for first, end in (plan.layers[stage] for stage in stages):
        spans = [*spans[:-1], (spans[-1][0], end)] if spans and spans[-1][1] == first else [*spans, (first, end)]
    text = ", ".join(f"{first}-{end - 1}" if end - first > 1 else str(first) for first, end in spans)
    if plan.model.custom is not None:
        return text
    ends = any(plan.layers[stage][1] == plan.model.layers for stage in stages)
    return f"{'embed ' if 0 in stages else ''}{text}{' head' if ends else ''}"


def steps_table(rows: Sequence[dict[str, Any]] | deque[dict[str, Any]]) -> Table:
    table = table_of("step>", "loss>", "grad norm>", "lr>", "tokens/s>", "step time>", "bubble>", "planned>")
    for row in rows:
        table.add_row(
            Text(str(row["step"])),
            Text(number(row["loss"], ".4f"), "bold"),
            number(row["grad_norm"], ".3f"),
            number(row["lr"], ".2e"),
            number(row["tokens_per_second"], ",.0f"),
            duration(row["step_seconds"]),
            Text(percent(row["bubble_measured"])),
            Text(percent(row["bubble_planned"]), "dim"),
        )
    return table


def states_table(states: Sequence[RankState], most: int, newest: int = -1) -> Table:
    """A row a rank. What was heard before step `newest` ended is not shown, for only of a lost rank it is still so."""
    table = table_of("rank>", "place", "state", "step>", "instruction")
    for s in states[:most]:
        known = s.step >= newest or s.state == "lost"
        now = (Text(s.state, COLOURS.get(s.state, "")), str(s.step) if s.step >= 0 else "-", Text(s.instruction))
        table.add_row(str(s.rank), str(s.coordinates), *(now if known else ("-", "-", "")))
    return _with_more(table, len(states))


def step_line(row: dict[str, Any], steps: int) -> str:
    """A step on one line, for logs."""
    parts = [
        f"step {row['step']:>{len(str(steps))}}",
        f"loss {number(row['loss'], '.4f')}",
        f"grad norm {number(row['grad_norm'], '.3f')}",
        f"lr {number(row['lr'], '.2e')}",
        f"{number(row['tokens_per_second'], ',.0f')} tokens/s",
        duration(row["step_seconds"]),
        f"bubble {percent(row['bubble_measured'])} (planned {percent(row['bubble_planned'])})",
    ]
    return "  ".join(parts)


def bubble_text(bubble: Bubble) -> str:
    return f"{percent(bubble.longest)} longest, {percent(bubble.makespan)} makespan"


def table_of(*heads: str) -> Table:
    """A table without lines; a head that ends in '>' is of a column of numbers."""
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=True)
    for head in heads:
        table.add_column(head.rstrip(">"), justify="right" if head.endswith(">") else "left", no_wrap=True)
    return table


def _with_more(table: Table, rows: int) -> Table:
    if rows > table.row_count:
        table.add_row("", Text(f"and {rows - table.row_count} more", "dim"))
    return table
