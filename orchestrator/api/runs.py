"""`pentad.Run`: what a run has left in its folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring import runfolder
from pentad.orchestrator.monitoring.evaluations import EVAL_KEYS
from pentad.orchestrator.monitoring.runfolder import resolve_run, saved_config
from pentad.orchestrator.planning.formatting import format_number
from pentad.orchestrator.records.checkpoint_places import checkpoints_in
from pentad.orchestrator.records.json_lines import read_lines
from pentad.schedules.ir.argument_types import checks_types
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import committed
from pentad.workers.checkpoint.location import Location

if TYPE_CHECKING:
    import pyarrow as pa

    from pentad.orchestrator.api.comparison import Comparison
    from pentad.orchestrator.api.curves import Curves
    from pentad.orchestrator.api.explanation import Explanation
    from pentad.schedules.ir.program import Program
    from pentad.schedules.simulate.timeline import Timeline


class Run:
    """A run, live or not, by its folder or by its name under runs/. Everything is read on demand.

    Raises PentadError if there is no such run.
    """

    @checks_types
    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.folder = resolve_run(os.fspath(run)).absolute()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def config(self) -> RunConfig:
        """The configuration of the last start."""
        return saved_config(self.folder)

    @checks_types
    def status(self, timeout_seconds: float = 5.0) -> dict[str, Any]:
        """What `pentad status --json` prints: state, step (the number of completed steps), loss, mesh and so on; for a
        live run also what its ranks do. Raises PentadError if a live run does not answer in time."""
        from pentad.orchestrator.control.control_client import NotLive, connect

        try:
            with connect(self.folder) as client:
                return client.status(timeout_seconds)
        except NotLive as error:
            return error.last

    def metrics(self) -> pa.Table:
        """A row for each step, with the columns of metrics.jsonl (docs/observability.md). `.to_pandas()` turns it into
        a data frame, if pandas is installed."""
        return _table(read_lines(self.folder / runfolder.METRICS), runfolder.METRIC_KEYS)

    def evaluations(self) -> pa.Table:
        """A row for each evaluation and data set, with the columns of eval.jsonl (docs/evaluation.md)."""
        return _table(read_lines(self.folder / runfolder.EVALUATIONS), EVAL_KEYS)

    def journal(self) -> list[dict[str, Any]]:
        """Every event of the run's ranks and checkpoints, with its Unix time."""
        return read_lines(self.folder / runfolder.JOURNAL)

    def program(self) -> Program:
        """The instructions of each pipeline rank in the last plan."""
        from pentad.schedules.ir.program import Program

        return Program.load(self.folder / runfolder.PROGRAM)

    @checks_types
    def timeline(self, *, evaluation: bool = False) -> Timeline:
        """When every instruction of the last steps ran, or of the last round of each of the last evaluations;
        `.to_arrow()` turns it into a table. Raises PentadError if the run has measured none or has not ended."""
        from pentad.orchestrator.api.comparison import measured_timeline

        return measured_timeline(self.folder, evaluation=evaluation)

    @checks_types
    def compare(self, step: int | None = None, *, evaluation: bool = False) -> Comparison:
        """A measured step (None: the last), or the last round of an evaluation after this many steps, beside its
        simulation, as `pentad timeline` shows it."""
        from pentad.orchestrator.api.comparison import compare

        return compare(self.folder, step, evaluation=evaluation)

    @checks_types
    def explain(self, step: int | None = None) -> Explanation:
        """Where the time of a measured step (None: the last) went, by rank, and what would shorten it, as `pentad
        timeline --explain` shows it."""
        from pentad.orchestrator.api.explanation import explain

        return explain(self.folder, step)

    def curves(self) -> Curves:
        """The losses by step, as `pentad curves` shows them. Raises PentadError if there is none yet."""
        from pentad.orchestrator.api.curves import curves_of

        return curves_of(self.folder)

    def checkpoints(self) -> dict[int, Location]:
        """The folders of the committed checkpoints, by their number of steps, oldest first; without damaged ones."""
        return committed(checkpoints_in(self.folder))

    def __repr__(self) -> str:
        try:
            status = self.status()
        except PentadError:
            return f"<Run {self.name}: does not answer, in {self.folder}>"
        steps, loss = f"{status['step']} of {status['steps']} steps", format_number(status["loss"], ".4f")
        return f"<Run {self.name}: {status['state']}, {steps}, loss {loss}, in {self.folder}>"


def _table(rows: list[dict[str, Any]], keys: Iterable[str]) -> pa.Table:
    """A table with a column for each of `keys` and for every other key of a row; null where a row lacks it."""
    import pyarrow as pa

    names = dict.fromkeys([*keys, *(name for row in rows for name in row)])
    return pa.table({name: [row.get(name) for row in rows] for name in names})
