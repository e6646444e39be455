"""`pentad curves` and `Run.curves`: a run's losses by step, in training and on held-out data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType

from pentad.orchestrator.api.rendering import as_text
from pentad.orchestrator.config.data_sections import DataSection
from pentad.orchestrator.monitoring.display import sparkline
from pentad.orchestrator.monitoring.evaluations import EVAL_KEYS
from pentad.orchestrator.monitoring.runfolder import EVALUATIONS, JOURNAL, METRIC_KEYS, METRICS, saved_config
from pentad.orchestrator.monitoring.tables import fitted_table
from pentad.orchestrator.records.json_lines import read_lines
from pentad.schedules.draw.losses import Evaluation, LossCurve, Window, svg_losses
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.eval_spec import HOLDOUT

_WINDOWS = 40  # of training, in a figure
_BLOCKS = 24  # of a curve in the table
_Row = Mapping[str, Any]


@dataclass(frozen=True, repr=False)
class Curves:
    """The losses of each corpus, and the steps in which their mixture changed."""

    run: str
    curves: tuple[LossCurve, ...]
    steps: int
    tokens: int
    changes: tuple[int, ...] = ()

    def facts(self) -> dict[str, Any]:
        """All points, in nats per target token; those of training are means over steps `first` to `end` - 1."""
        found = [
            {
                "name": curve.name,
                "training": [window._asdict() for window in curve.training],
                "held_out": [evaluation._asdict() for evaluation in curve.held_out],
            }
            for curve in self.curves
        ]
        return {"steps": self.steps, "tokens": self.tokens, "changes": list(self.changes), "curves": found}

    def svg(self) -> str:
        """A figure for light and dark pages."""
        title = f"{self.run}: {self.tokens:,} tokens in {self.steps:,} steps"
        return svg_losses(self.curves, title=title, changes=self.changes)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        rows = []
        for curve in self.curves:
            trained = [window.loss for window in curve.training if window.loss is not None]
            for kind, losses in (("held out", [each.loss for each in curve.held_out]), ("training", trained)):
                if losses:
                    figures = (f"{loss:.4f}" for loss in (losses[0], losses[-1], min(losses)))
                    rows.append((curve.name, kind, *figures, sparkline(losses, _BLOCKS)))
        heads = ("corpus", "loss", "first>", "last>", "lowest>", "curve")
        yield fitted_table(heads, rows, options.max_width, drop=("curve",))

    __repr__ = as_text
    _repr_svg_ = svg


def curves_of(folder: Path) -> Curves:
    """The curves of the run in `folder`. Raises PentadError if it has no finite loss yet."""
    rows = read_lines(folder / METRICS, METRIC_KEYS)
    for number, row in enumerate(rows, 1):
        if not row.keys() & {"sources", "target_tokens"}:
            raise PentadError(f"{folder / METRICS} line {number} has no target_tokens: expected those of its sources")
    corpora = _corpora(saved_config(folder).data)
    events = read_lines(folder / JOURNAL, ("event",))
    changes = {event["step"] for event in events if event["event"] == "mixture" and "step" in event}
    training = _training(rows, list(corpora.values()), changes)
    held_out = _held_out(read_lines(folder / EVALUATIONS, EVAL_KEYS), corpora)
    names = dict.fromkeys([*training, *held_out])
    curves = tuple(LossCurve(name, training.get(name, ()), held_out.get(name, ())) for name in names)
    if not any(curve.losses for curve in curves):
        raise PentadError(f"RUN is '{folder}', which has no finite loss in {METRICS}: expected a run that has trained")
    tokens = rows[-1]["total_tokens"] if rows else 0
    return Curves(folder.resolve().name, curves, len(rows), tokens, tuple(sorted(changes)))


def _corpora(data: DataSection) -> dict[str, str]:
    """The name of each training corpus, by the name of the data set held out of it."""
    if data.path is not None:
        return {HOLDOUT: data.path.removeprefix("builtin:").rstrip("/").rpartition("/")[2]}
    return {f"{HOLDOUT}-{source.name}": source.name for source in data.spec.sources}


def _held_out(rows: Sequence[_Row], corpora: Mapping[str, str]) -> dict[str, tuple[Evaluation, ...]]:
    found: dict[str, list[Evaluation]] = {}
    for row in rows:
        if row["loss"] is not None:
            found.setdefault(corpora.get(row["data"], row["data"]), []).append(Evaluation(row["step"], row["loss"]))
    return {name: tuple(evaluations) for name, evaluations in found.items()}


def _training(rows: Sequence[_Row], names: Sequence[str], changes: Collection[int]) -> dict[str, tuple[Window, ...]]:
    """Windows by corpus, the same for all: of equal numbers of steps, but cut where the mixture changes."""
    length = max(1, -(-len(rows) // _WINDOWS))
    starts = [index for index, row in enumerate(rows) if row["step"] in changes]
    bounds = [0, *starts, len(rows)]
    parts = [rows[i : min(i + length, end)] for start, end in pairwise(bounds) for i in range(start, end, length)]
    return {name: tuple(_window(part, name, names[0]) for part in parts) for name in names}


def _window(rows: Sequence[_Row], name: str, first: str) -> Window:
    """Rows without `sources` belong to the first corpus alone."""
    found = [row.get("sources", {first: row}).get(name, {"loss": None, "target_tokens": 0}) for row in rows]
    counted = [each for each in found if each["loss"] is not None]
    tokens = sum(each["target_tokens"] for each in counted)
    loss = sum(each["loss"] * each["target_tokens"] for each in counted) / tokens if tokens else None
    return Window(rows[0]["step"], rows[-1]["step"] + 1, loss, tokens)
