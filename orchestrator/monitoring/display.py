"""A run's output on a terminal: its start-up, then a live table; in a log, one line per phase and step."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import IO, Any, cast

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pentad.orchestrator.monitoring.run_state import OVER, RankView
from pentad.orchestrator.monitoring.tables import MOST_RANKS, fitted_table, with_rest
from pentad.orchestrator.planning.formatting import format_duration, format_number, format_percent
from pentad.schedules.ir.errors import printable

_STEPS = 8  # rows of the table of steps
BLOCKS = "▁▂▃▄▅▆▇█"
STATE_COLOURS = {  # states of ranks and runs
    **{"running": "green", "idle": "dim", "waiting": "yellow", "starting": "yellow"},
    **{"hung": "bold red", "lost": "bold red", "failed": "bold red"},
    **{"paused": "yellow", "recovering": "bold yellow", "stopping": "yellow", "finished": "green", "stopped": "dim"},
}


class RunStream:
    """A terminal that may close, or a file whose disk may be full: what is written then is lost, but the run ends
    properly or continues. Closing a pipe means that the run should end, so `on_closed` is called; without one,
    BrokenPipeError is raised."""

    def __init__(self, stream: IO[str], *, is_terminal: bool) -> None:
        self.stream, self.is_terminal = stream, is_terminal
        self.on_closed: Callable[[], None] | None = None

    def write(self, text: str) -> int:
        with self._lossy():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._lossy():
            self.stream.flush()

    @contextmanager
    def _lossy(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, BrokenPipeError) and not self.is_terminal:
                if self.on_closed is None:
                    raise
                self._lead_nowhere()
                self.on_closed()

    def _lead_nowhere(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Display(AbstractContextManager["Display"]):
    """Shows one run, beginning with the phases of its start-up; use it in a `with`. `began` is the monotonic second at
    which the command started, from which the phases' seconds are counted."""

    def __init__(self, console: Console, name: str, steps: int, began: float | None = None) -> None:
        self.console, self.name, self.steps = console, name, steps
        self.began = time.monotonic() if began is None else began
        self.is_live = console.is_terminal and not console.is_dumb_terminal
        self.output = RunStream(console.file, is_terminal=console.is_terminal)
        console.file = cast("IO[str]", self.output)
        self.phases: list[Text] = []
        self.rows: deque[dict[str, Any]] = deque(maxlen=_STEPS)
        self.losses: list[float] = []
        self.evaluations: Sequence[dict[str, Any]] = ()
        self.ranks: Sequence[RankView] = ()
        self.state = "starting"
        self.live: Live | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Restores the terminal. Idempotent."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def phase(self, text: str) -> None:
        """Shows that the phase `text` has begun; a terminal shows all phases until the first step."""
        self.phases.append(Text(f" {time.monotonic() - self.began:5.1f} s  {printable(text)}"))
        self._draw()
        if not self.is_live:
            self.console.print(self.phases[-1], soft_wrap=True)

    def step(self, row: dict[str, Any]) -> None:
        """Shows a finished step; `row` has runfolder.METRIC_KEYS."""
        if not self.rows:
            self.close()  # erases the phases
        self.rows.append(row)
        if row["loss"] is not None and math.isfinite(row["loss"]):
            self.losses.append(row["loss"])
        self._draw()
        if not self.is_live:
            self.console.print(Text(step_line(row, self.steps)), soft_wrap=True)

    def evaluation(self, rows: Sequence[dict[str, Any]]) -> None:
        """Shows a finished evaluation; `rows` are its lines of eval.jsonl, one per data set."""
        self.evaluations = rows
        self._draw()
        if not self.is_live:
            self.console.print(Text(f"{evaluation_line(rows)}  {format_duration(rows[0]['seconds'])}"), soft_wrap=True)

    def set_state(self, state: str) -> None:
        self.state = state
        if self.live is not None:
            self._draw()

    def set_ranks(self, ranks: Sequence[RankView]) -> None:
        """Shows what the ranks do now."""
        self.ranks = ranks
        self._draw()

    def note(self, text: str) -> None:
        """Prints a sentence, above the live table if there is one."""
        text = printable(text)
        if self.is_live:
            self.console.print(Padding(Text(text), (0, 1)))
        else:
            self.console.print(Text(f" {text}"), soft_wrap=True)

    def _draw(self) -> None:
        """Updates a terminal. Until the first step a thread does so too, for the clock, and closing erases the view."""
        if not self.is_live:
            return
        if self.live is None:
            starting = not self.rows
            self.live = Live(console=self.console, get_renderable=self._view, auto_refresh=starting, transient=starting)
            self.live.start()
        self.live.refresh()

    def _view(self) -> RenderableType:
        width = self.console.width
        parts: list[RenderableType] = [Text()]
        if self.rows:
            parts.append(self._header(width))
            if len(self.losses) > 1 and not self.console.options.ascii_only:
                parts.append(self._loss_curve(width))
            if self.evaluations:
                parts.append(Text(f" {evaluation_line(self.evaluations)}", no_wrap=True, overflow="ellipsis"))
            parts += [Text(), steps_table(self.rows, width)]
        else:
            clock = f" {time.monotonic() - self.began:5.1f} s  "
            parts += [*self.phases, Text.assemble((clock, "dim"), (self.state, STATE_COLOURS[self.state]))]
        if self.ranks and self.state not in OVER:
            room = max(1, min(MOST_RANKS, self.console.height - _STEPS - 10))
            parts += [Text(), ranks_table(self.ranks, room, self.rows[-1]["step"] if self.rows else -1, width)]
        return Group(*parts)

    def _header(self, width: int) -> Table:
        """Name, steps, a progress bar if there is room for it, and the time left or the state."""
        done = self.rows[-1]["step"] + 1
        left = (self.steps - done) * sum(row["step_seconds"] for row in self.rows) / len(self.rows)
        rest = Text("done" if done >= self.steps else f"{format_duration(max(1, round(left)))} left", "dim")
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
            parts.insert(1, ProgressBar(self.steps, done, width=room, complete_style="cyan", finished_style="green"))
        head = Table.grid(padding=(0, 2))
        head.add_row(name, *parts)
        return head

    def _loss_curve(self, width: int) -> Text:
        first, last = f"{self.losses[0]:.3f}", f"{self.losses[-1]:.3f}"
        curve = sparkline(self.losses, max(1, min(60, width - len(first) - len(last) - 9)))
        return Text.assemble((" loss ", "dim"), f"{first} ", (curve, "cyan"), f" {last}")


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as a line of at most `width` blocks; a block is the mean of neighbouring values."""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)] if count else [0]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    spread = (high - low) or 1.0
    return "".join(BLOCKS[round((value - low) / spread * (len(BLOCKS) - 1))] for value in means)


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    """Prints the results of a run (see `train.summary`) and where its files are."""
    files = summary["files"]
    measured, planned = (format_percent(summary[f"bubble_{which}"]) for which in ("measured", "planned"))
    facts = {
        summary["state"]: f"{summary['steps']} steps",
        "loss": f"{format_number(summary['first_loss'], '.4f')} at first, {format_number(summary['loss'], '.4f')} now",
        "evaluation": _evaluated(summary["evaluations"]),
        "best": _best(summary["best"]),
        "pace": f"{format_number(summary['tokens_per_second'], ',.0f')} tokens/s",
        "bubble": f"{measured} measured, {planned} planned",
        "folder": summary["folder"],
        "timeline": files.get("page"),
        "trace": f"{files['trace']} (for Perfetto)" if "trace" in files else None,
    }
    console.print()
    for name, fact in facts.items():
        if fact is not None:
            console.print(Text.assemble((f" {name:<10} ", "dim"), fact), soft_wrap=True)


def print_evaluation(console: Console, checkpoint: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the results of `pentad eval`, given as rows of eval.jsonl."""
    console.print(Text(f" {checkpoint}: after {rows[0]['step']} steps, {format_duration(rows[0]['seconds'])}\n"))
    forms = {"perplexity": ",.2f", "tokens": ",", "sequences": ","}
    cells = [
        [row["data"], Text(format_number(row["loss"], ".4f"), "bold")]
        + [format_number(row[key], form) for key, form in forms.items()]
        for row in rows
    ]
    heads = ("data", "loss>", "perplexity>", "tokens>", "sequences>")
    console.print(fitted_table(heads, cells, console.width, drop=("sequences", "tokens")))


def _evaluated(rows: Sequence[dict[str, Any]]) -> str | None:
    found = (f"{row['data']} {format_number(row['loss'], '.4f')} after {row['step']} steps" for row in rows)
    return ", ".join(found) or None


def _best(best: dict[str, Any] | None) -> str | None:
    if best is None:
        return None
    return f"{format_number(best['loss'], '.4f')} after {best['step']} steps, {best['checkpoint']}"


def steps_table(rows: deque[dict[str, Any]], width: int) -> Table:
    styles = {"loss": "bold", "planned": "dim"}
    cells = [[Text(cell, styles.get(head, "")) for head, cell in _figures(row).items()] for row in rows]
    drop = ("planned", "lr", "grad norm", "step time", "bubble", "tokens/s")
    return fitted_table([f"{head}>" for head in _figures(rows[0])], cells, width, drop=drop)


def ranks_table(ranks: Sequence[RankView], most: int, newest: int, width: int) -> Table:
    """A row per rank, at most `most`. A status from before step `newest` is shown only for a lost rank."""
    rows = []
    for at in ranks[:most]:
        is_current = at.step >= newest or at.state == "lost"
        now = Text(at.state, STATE_COLOURS.get(at.state, "")), str(at.step) if at.step >= 0 else "-", at.instruction
        rows.append((str(at.rank), str(at.coordinates), *(now if is_current else ("-", "-", ""))))
    heads = ("rank>", "place", "state", "step>", "instruction")
    return with_rest(fitted_table(heads, rows, width, drop=("step", "instruction", "place")), len(ranks))


def step_line(row: dict[str, Any], steps: int) -> str:
    """A step as one line of a log."""
    step, loss, norm, lr, tokens, seconds, bubble, planned = _figures(row).values()
    parts = [f"step {step:>{len(str(steps))}}", f"loss {loss}", f"grad norm {norm}", f"lr {lr}", f"{tokens} tokens/s"]
    return "  ".join([*parts, seconds, f"bubble {bubble} (planned {planned})"])


def evaluation_line(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of an evaluation as one line."""
    losses = (
        f"{row['data']} loss {format_number(row['loss'], '.4f')} "
        f"(perplexity {format_number(row['perplexity'], ',.1f')})"
        for row in rows
    )
    return printable("  ".join([f"evaluation after {rows[0]['step']} steps", *losses]))


def _figures(row: dict[str, Any]) -> dict[str, str]:
    """The figures of a step as text, by column head."""
    return {
        "step": str(row["step"]),
        "loss": format_number(row["loss"], ".4f"),
        "grad norm": format_number(row["grad_norm"], ".3f"),
        "lr": format_number(row["lr"], ".2e"),
        "tokens/s": format_number(row["tokens_per_second"], ",.0f"),
        "step time": format_duration(row["step_seconds"]),
        "bubble": format_percent(row["bubble_measured"]),
        "planned": format_percent(row["bubble_planned"]),
    }
