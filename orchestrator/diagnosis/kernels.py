"""`pentad timeline --profile`: what torch's profiler recorded in a profiled step, by op and as a trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.runfolder import saved_config
from pentad.orchestrator.monitoring.tables import fitted_table, line
from pentad.orchestrator.planning.formatting import format_percent
from pentad.orchestrator.records.profiles import SavedProfile, folder_of, load_profile, profiled_steps
from pentad.schedules.draw.trace import trace_bytes
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.step_profile import KERNEL, OpTime, op_times
from pentad.schedules.simulate.timeline import grouped

MOST_NAMES = 5  # kernels or operators listed per op on the terminal
OTHER_COLUMNS = 42  # characters


@dataclass(frozen=True)
class Profile:
    """A profiled step. `times` are sums over all ranks, the longest first."""

    run: str
    folder: Path
    saved: SavedProfile
    times: tuple[OpTime, ...]

    @property
    def step(self) -> int:
        return self.saved.step

    @property
    def default_trace(self) -> Path:
        return folder_of(self.folder, self.step) / "trace.json.gz"

    def by_op(self) -> dict[str, list[OpTime]]:
        """The times by op, the op with the longest sum first; '' stands for outside all instructions."""
        return dict(sorted(grouped(self.times, lambda each: each.op).items(), key=lambda item: -_seconds(item[1])))

    def facts(self) -> dict[str, Any]:
        """What `--json` prints; seconds are sums over all ranks."""
        ops = [
            {"op": op, "seconds": _seconds(times), "kernels": [_kernel(each, times) for each in times]}
            for op, times in self.by_op().items()
        ]
        left_out, problems = self.saved.left_out, self.saved.problems
        ranks = [
            {"rank": rank, "events": len(events), "left_out": left_out.get(rank, 0), "problem": problems.get(rank)}
            for rank, events in self.saved.events.items()
        ]
        return {"step": self.step, "ops": ops, "ranks": ranks}

    def write_trace(self, path: Path) -> None:
        """Writes a trace that opens in Perfetto (.json.gz): each rank's instructions and, below them, its kernels by
        stream and its host operators."""
        names, events = self.saved.names, self.saved.events
        path.write_bytes(trace_bytes([self.saved.timeline], process_names=names, profiles=events))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        has_kernels = any(event.kind == KERNEL for events in self.saved.events.values() for event in events)
        what, ranks = "kernel" if has_kernels else "operator", len(self.saved.events)
        yield line((f" step {self.step}", "bold"), f" of {self.run}, profiled: {what}s of {ranks} ranks together")
        for rank, problem in self.saved.problems.items():
            yield line((f" rank {rank}: {problem}", "dim"))
        if left := sum(self.saved.left_out.values()):
            yield line((f" without the {left:,} shortest ones", "dim"))
        yield Text()
        rows = list[tuple[str, ...]]()
        for op, times in self.by_op().items():
            for index, each in enumerate(times[:MOST_NAMES]):
                share = format_percent(each.seconds / _seconds(times)) if each.seconds else ""
                shown = "" if index else op or "(none)"
                name = _shortened(each.name, options.max_width - OTHER_COLUMNS)
                rows.append((shown, name, f"{each.calls:,}", f"{1e3 * each.seconds:,.2f} ms", share))
        heads = ("op", what, "calls>", "time>", "of op>")
        yield fitted_table(heads, rows, options.max_width, drop=("of op", "calls"), wrapped=[what])


def profile_of(folder: Path, step: int | None = None) -> Profile:
    """A profiled step of a run, by default the newest. Raises PentadError if the step was not profiled, or none was."""
    config, steps = saved_config(folder), profiled_steps(folder)
    if not steps:
        raise PentadError(f"RUN is '{folder}', which has no profiled step: {_expected(config)}")
    if step is not None and step not in steps:
        raise PentadError(f"--step is {step}: expected a profiled step, {', '.join(map(str, steps))}")
    saved = load_profile(folder, steps[-1] if step is None else step)
    return Profile(config.run.name, folder, saved, op_times(saved.events.values()))


def _expected(config: RunConfig) -> str:
    chosen = config.metrics.profile_steps
    if not chosen:
        return "expected a run with metrics.profile_steps, such as [20, 21]"
    return f"expected one that has completed a step of metrics.profile_steps = {chosen} (journal.jsonl says why not)"


def _seconds(times: list[OpTime]) -> float:
    return sum(each.seconds for each in times)


def _kernel(each: OpTime, times: list[OpTime]) -> dict[str, Any]:
    share = each.seconds / total if (total := _seconds(times)) else 0.0
    return {"name": each.name, "calls": each.calls, "seconds": each.seconds, "share": share}


def _shortened(name: str, most: int) -> str:
    most = max(most, 20)
    return name if len(name) <= most else f"{name[: most - 3]}..."
