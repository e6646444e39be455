"""What a terminal shows of a run: a live table, or one line per step if the output is not a terminal."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pentad.orchestrator.monitoring.plan_view import MOST_RANKS, RankPlacement, plan_view, with_rest
from pentad.orchestrator.monitoring.progress_bars import sparkline
from pentad.orchestrator.monitoring.tables import fitted_table
from pentad.orchestrator.planning.quantities import duration, number, percent
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.mesh import Coordinates
from pentad.schedules.spec.plan import Plan

_STEPS = 8  # rows of the table of steps
STATE_COLOURS = {  # of ranks and runs
    **{"running": "green", "idle": "dim", "waiting": "yellow", "starting": "yellow"},
    **{"hung": "bold red", "lost": "bold red", "failed": "bold red"},
    **{"paused": "yellow", "recovering": "bold yellow", "stopping": "yellow", "finished": "green", "stopped": "dim"},
}
ENDED = ("finished", "stopped", "failed")  # states of a run that has no ranks


class RankState(NamedTuple):
    """What a rank does; `instruction` is empty between steps."""

    rank: int
    coordinates: Coordinates
    state: str
    instruction: str
    step: int


class Display:
    """Shows one run. Use it in a `with`, which restores the terminal however the run ends."""

    def __init__(self, console: Console, name: str, steps: int) -> None:
        self.console, self.name, self.steps = console, name, steps
        self.is_live = console.is_terminal and not console.is_dumb_terminal
        self.rows: deque[dict[str, Any]] = deque(maxlen=_STEPS)
        self.losses: list[float] = []
        self.states: Sequence[RankState] = ()
        self.state = "starting"
        self.live: Live | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def plan(self, plan: Plan, costs: Costs, placements: Sequence[RankPlacement] = ()) -> None:
        """Prints a plan with a step simulated at `costs`."""
        for part in plan_view(self.console, plan, costs, placements):
            self.console.print(part)

    def step(self, row: dict[str, Any], states: Sequence[RankState] = ()) -> None:
        """Shows a finished step; `row` has runfolder.METRIC_KEYS."""
        self.rows.append(row)
        if row["loss"] is not None and math.isfinite(row["loss"]):
            self.losses.append(row["loss"])
        if self.is_live:
            self.refresh(states or self.states)
        else:
            self.console.print(Text(step_line(row, self.steps)), soft_wrap=True)

    def set_state(self, state: str) -> None:
        self.state = state
        if self.live is not None:
            self.refresh(self.states)

    def refresh(self, states: Sequence[RankState]) -> None:
        """Shows what the ranks do now."""
        self.states = states
        if not self.is_live:
            return
        if self.live is None:
            self.live = Live(console=self.console, auto_refresh=False)
            self.live.start()
        self.live.update(self._view(), refresh=True)

    def note(self, text: str) -> None:
        """Prints a sentence above the live table, or as one line."""
        if self.is_live:
            self.console.print(Padding(Text(text), (0, 1)))
        else:
            self.console.print(Text(f" {text}"), soft_wrap=True)

    def _view(self) -> RenderableType:
        width = self.console.width
        parts: list[RenderableType] = [Text(), self._header(width)]
        if len(self.losses) > 1 and not self.console.options.ascii_only:
            parts.append(self._loss_curve(width))
        if self.rows:
            parts += [Text(), steps_table(self.rows, width)]
        if self.states and self.state not in ENDED:
            room = max(1, min(MOST_RANKS, self.console.height - _STEPS - 10))
            parts += [Text(), states_table(self.states, room, self.rows[-1]["step"] if self.rows else -1, width)]
        return Group(*parts)

    def _header(self, width: int) -> Table:
        """Name, steps, a bar if there is room for it, and the time left or the state."""
        done = self.rows[-1]["step"] + 1 if self.rows else 0
        paces = [row["step_seconds"] for row in self.rows]
        left = (self.steps - done) * sum(paces) / len(paces) if paces else 0.0
        rest = Text("done" if done >= self.steps else f"{duration(round(left))} left", "dim")
        if self.state not in ("starting", "running", "finished"):
            rest = Text(self.state, STATE_COLOURS[self.state])
        count = f"{done}/{self.steps} steps"
        room = width - cell_len(count) - 12  # a name of 8 characters or more
        parts: list[RenderableType] = [count, rest] if cell_len(str(rest)) <= room else [count]
        room = width - sum(cell_len(str(part)) + 2 for part in parts) - 4
        name = Text(f" {self.name}", "bold")
        name.truncate(max(room, 8), overflow="ellipsis")
        room = min(40, room - cell_len(str(name)))
        if room >= 10:
            bar = ProgressBar(self.steps, done, width=room, complete_style="cyan", finished_style="green")
            parts.insert(1, bar)
        head = Table.grid(padding=(0, 2))
        head.add_row(name, *parts)
        return head

    def _loss_curve(self, width: int) -> Text:
        first, last = f"{self.losses[0]:.3f}", f"{self.losses[-1]:.3f}"
        curve = sparkline(self.losses, max(1, min(60, width - len(first) - len(last) - 9)))
        return Text.assemble((" loss ", "dim"), f"{first} ", (curve, "cyan"), f" {last}")


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    """Prints the results of a run (the driver's summary) and where its files are."""
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


def steps_table(rows: Sequence[dict[str, Any]] | deque[dict[str, Any]], width: int) -> Table:
    heads = ("step>", "loss>", "grad norm>", "lr>", "tokens/s>", "step time>", "bubble>", "planned>")
    cells = [
        (
            str(row["step"]),
            Text(number(row["loss"], ".4f"), "bold"),
            number(row["grad_norm"], ".3f"),
            number(row["lr"], ".2e"),
            number(row["tokens_per_second"], ",.0f"),
            duration(row["step_seconds"]),
            percent(row["bubble_measured"]),
            Text(percent(row["bubble_planned"]), "dim"),
        )
        for row in rows
    ]
    drop = ("planned", "lr", "grad norm", "step time", "bubble", "tokens/s")
    return fitted_table(heads, cells, width, drop=drop)


def states_table(states: Sequence[RankState], most: int, newest: int, width: int) -> Table:
    """A row per rank, `most` in all. A report from before step `newest` is shown only for a lost rank."""
    rows = []
    for s in states[:most]:
        is_current = s.step >= newest or s.state == "lost"
        now = Text(s.state, STATE_COLOURS.get(s.state, "")), str(s.step) if s.step >= 0 else "-", s.instruction
        rows.append((str(s.rank), str(s.coordinates), *(now if is_current else ("-", "-", ""))))
    heads = ("rank>", "place", "state", "step>", "instruction")
    return with_rest(fitted_table(heads, rows, width, drop=("step", "instruction", "place")), len(states))


def step_line(row: dict[str, Any], steps: int) -> str:
    """A step as one line of a log."""
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
