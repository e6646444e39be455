"""`pentad timeline --explain` and `Run.explain`: where a measured step's time went, and what would shorten it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from pentad.orchestrator.api.comparison import Comparison, compare
from pentad.orchestrator.api.rendering import as_text
from pentad.orchestrator.diagnosis.remedies import (
    Remedy,
    better_schedule,
    left_of_parts,
    place_names,
    remedy_of,
    remedy_of_clocks,
)
from pentad.orchestrator.monitoring.runfolder import JOURNAL, METRICS, RANK_TIMES, saved_config
from pentad.orchestrator.monitoring.tables import fitted_table, line
from pentad.orchestrator.planning.formatting import format_duration, format_percent
from pentad.orchestrator.records.gpu_clocks import GpuClocks, clocks_in
from pentad.orchestrator.records.json_lines import read_lines
from pentad.schedules.diagnosis.attribution import PARTS, Measured, RankStep, attribute, mean_parts
from pentad.schedules.diagnosis.causes import find_causes, saved_by_clock
from pentad.schedules.diagnosis.rank_times import load, measured_of
from pentad.schedules.diagnosis.replay import Replay
from pentad.schedules.diagnosis.step_view import StepView
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.read_costs import read_costs

MOST_CAUSES = 5
MOST_COLUMNS = 8  # ranks that get a column each
LEAST_SHARE = 0.001  # of the step; causes below it get no line


@dataclass(frozen=True, repr=False)
class Explanation:
    """`ranks` have the parts of each rank's step, which add up to its time; `remedies` are the most expensive causes,
    with what would remove each. A replay of the unchanged step takes `replayed` seconds. `clocks` are those of the
    GPUs as last read when the step was recorded, None on CPUs."""

    run: str
    program: str
    step: int
    ranks: tuple[RankStep, ...]
    remedies: tuple[Remedy, ...]
    replayed: float
    layers_measured: bool
    clocks: GpuClocks | None = None

    @property
    def seconds(self) -> float:
        """The step's time, on average over the ranks."""
        return sum(step.nanoseconds for step in self.ranks) / len(self.ranks) / 1e9

    def facts(self) -> dict[str, Any]:
        """What `--json` prints, in seconds."""
        by_rank = [{part: length / 1e9 for part, length in step.parts.items()} for step in self.ranks]
        return {
            "step": self.step,
            "seconds": self.seconds,
            "parts": mean_parts(self.ranks),
            "ranks": [
                {"rank": step.rank, "seconds": step.nanoseconds / 1e9, "parts": parts}
                for step, parts in zip(self.ranks, by_rank, strict=True)
            ],
            "causes": [remedy._asdict() for remedy in self.remedies],
            "replayed_seconds": self.replayed,
            "layers_measured": self.layers_measured,
            "gpus": self.clocks and asdict(self.clocks),
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = options.max_width
        yield line((f" step {self.step}", "bold"), f" of {self.run}, {self.program}: {format_duration(self.seconds)}")
        yield Text()
        yield self._parts_table(width)
        if self.clocks is not None:
            yield line((f" GPUs at {self.clocks}", "dim"))
        yield Text()
        if not self.remedies:
            yield line((" nothing that takes more than 0.1 % of the step has a remedy", "dim"))
            return
        heads = ("saves>", "share>", "cause", "what would remove it")
        rows = [
            (_ms(each.seconds), format_percent(each.seconds / self.seconds), each.cause, each.remedy)
            for each in self.remedies
        ]
        yield fitted_table(heads, rows, width, drop=("share",), wrapped=heads[2:])

    def _parts_table(self, width: int) -> Table:
        """With a column for each rank; if these do not fit, with the rank that has most of each part."""
        if len(self.ranks) <= MOST_COLUMNS:
            table = self._table_of_parts(width, by_rank=True)
            if len(table.columns) >= 2 + len(self.ranks):
                return table
        return self._table_of_parts(width, by_rank=False)

    def _table_of_parts(self, width: int, *, by_rank: bool) -> Table:
        lengths = {part: [step.parts[part] / 1e9 for step in self.ranks] for part in PARTS}
        lengths["step"] = [step.nanoseconds / 1e9 for step in self.ranks]
        means = mean_parts(self.ranks) | {"step": self.seconds}
        last = [f"r{step.rank}>" for step in self.ranks] if by_rank else ["most>", "on>"]
        heads = ["part", "mean>", "share>", *last]
        rows: list[tuple[str, ...]] = []
        for part, own in lengths.items():
            if any(own):
                most = max(range(len(own)), key=own.__getitem__)
                cells = map(_ms, own) if by_rank else (_ms(own[most]), f"rank {self.ranks[most].rank}")
                share = "" if part == "step" else format_percent(means[part] / self.seconds)
                rows.append((part, _ms(means[part]), share, *cells))
        drop = ["share", *(head.rstrip(">") for head in reversed(last))]
        return fitted_table(heads, rows, width, drop=drop)

    __repr__ = as_text


def explain(folder: Path, step: int | None = None) -> Explanation:
    """Explains a measured step, the last one by default. Raises PentadError if the run has not measured it."""
    found = compare(folder, step)
    config, mesh, program = saved_config(folder), found.run.mesh, found.run.program
    row = next((row for row in read_lines(folder / METRICS) if row.get("step") == found.step), {})
    costs = read_costs(program, found.measured) or read_costs(program, found.all_measured)
    assert costs is not None  # `compare` has read them
    measured = _measured(folder, found, row)
    ranks = attribute(program, mesh, found.measured, costs, measured)
    view = StepView(program, mesh, found.measured)
    begins = {rank.rank: view.end(rank.rank) - rank.nanoseconds for rank in ranks}
    on_host = not row.get("peak_bytes")
    replay = Replay(view, begins, measured, blocking_host=on_host)
    places = place_names(read_lines(folder / JOURNAL))
    remedies = [
        remedy_of(cause, config, found.planned.plan, places) for cause in find_causes(replay, left_of_parts(config))
    ]
    if (schedule := better_schedule(program, costs, config)) is not None:
        remedies.append(schedule)
    if (clocks := clocks_in(row)) is not None and clocks.slowdown > 1:
        saved = saved_by_clock(replay, clocks.slowdown)
        remedies.append(remedy_of_clocks(clocks, config, found.planned.plan, saved))
    seconds = sum(rank.nanoseconds for rank in ranks) / len(ranks) / 1e9
    worth = sorted((each for each in remedies if each.seconds > LEAST_SHARE * seconds), key=lambda each: -each.seconds)
    layers = bool(measured.layers) or mesh.tp * mesh.cp * mesh.ep == 1
    given = found.run.name, program.name, found.step, ranks, tuple(worth[:MOST_CAUSES]), replay.makespan()
    return Explanation(*given, layers, clocks)


def _measured(folder: Path, found: Comparison, row: dict[str, Any]) -> Measured:
    """A rank's step begins when its previous step ended; after a pause, when the run went on, as `row` says."""
    path, mesh = folder / RANK_TIMES, found.run.mesh
    times = [each for each in load(path) if each.step == found.step] if path.is_file() else []
    began = dict[int, float]()
    seconds = row.get("step_seconds")
    if seconds is not None:
        since = max(span.end for span in found.measured.spans) - seconds
        before = found.all_measured.of_step(found.step - 1)
        ends = {span.rank: span.end for span in sorted(before.spans, key=lambda s: s.end) if span.lane == "compute"}
        resumes = not ends or since > max(ends.values()) + 1e-6
        began = {rank: since if resumes else ends.get(rank, since) for rank in range(mesh.size)}
    try:
        return measured_of(times, mesh, began)
    except KeyError:
        raise PentadError(f"{path} has a rank that {mesh} lacks: expected the run's own") from None


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
