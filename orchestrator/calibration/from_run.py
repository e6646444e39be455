"""Refines the table that a run's plan was made with by what the run has measured, read from its folder."""

from __future__ import annotations

from pathlib import Path

from pentad.orchestrator.calibration.refine import Refined, refine
from pentad.orchestrator.gpus.rate_table import CPU, place_of, read_table
from pentad.orchestrator.monitoring.runfolder import METRICS, resolve_run
from pentad.orchestrator.page.ended_run import EndedRun
from pentad.orchestrator.records.checkpoint_places import saved_config
from pentad.orchestrator.records.json_lines import read_lines
from pentad.schedules.diagnosis.slow_ranks import WARM_UP
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import expanded


def refined_by(run: str) -> tuple[Refined, Path]:
    """The table that a run's plan takes its rates from, refined by the run, and its file. Raises PentadError."""
    folder = resolve_run(run)
    page = EndedRun(folder)
    plan, given = page.bus.folder.plan, saved_config(folder).cluster.rates
    gpu = CPU if plan.device == "cpu" else plan.gpu
    path = place_of(gpu) if given in ("auto", "builtin") else expanded(given)
    if not path.exists():
        raise PentadError(
            f"RUN is '{run}', of {gpu}, which has no table of rates: expected {path} (`pentad calibrate`)"
        )
    steps = list(page.times)[WARM_UP:]
    numbers = {each[0].step for each in steps}
    rows = [row for row in read_lines(folder / METRICS, ["step"]) if row["step"] in numbers]
    return refine(read_table(path, gpu), plan, steps, [row["step_seconds"] for row in rows], run), path
