"""`pentad verify`: proves that a run counted each sample of its steps once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.progress import Progress
from typer import Option

from pentad.orchestrator.cli.arguments import Folder, Json

if TYPE_CHECKING:
    from pentad.orchestrator.records.verify import Verdict


def verify(
    run: Folder,
    data: Annotated[bool, Option("--data/--no-data", help="Also read the run's data and compare the samples.")] = True,
    as_json: Json = False,
) -> None:
    """Prove from a run's files that each sample of its steps counted exactly once, whatever failed meanwhile."""
    from pentad.orchestrator.monitoring.runfolder import JOURNAL, METRIC_KEYS, METRICS, resolve_run
    from pentad.orchestrator.records.json_lines import read_lines
    from pentad.orchestrator.records.run_lock import locked
    from pentad.orchestrator.records.verify import verify as verified

    path = resolve_run(run)
    problem = f"RUN is '{run}', which process {{holder}} is running: expected a run that has ended"
    console = Console(stderr=True)
    with locked(path, problem), Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("comparing samples", total=None)
        rows, journal = read_lines(path / METRICS, METRIC_KEYS), read_lines(path / JOURNAL, ["event"])
        show = lambda done, total: progress.update(task, completed=done, total=total)  # noqa: E731
        verdict = verified(path, rows, journal, data=data, on_progress=show)
    if as_json:
        print(json.dumps({"run": path.name, **verdict._asdict()}))
    else:
        print(f"{path.name}: {_sentence(verdict)}")


def _sentence(verdict: Verdict) -> str:
    from pentad.workers.data.corpus_index import plural

    again = f", of which {plural(verdict.undone, 'step')} ran again" if verdict.undone else ""
    steps = f"{plural(verdict.steps, 'step')} in {plural(verdict.generations, 'generation')}{again}"
    count = verdict.samples
    samples = "the samples were not compared" if count is None else f"each of {plural(count, 'sample')} once"
    return f"{steps}: {samples}; {plural(verdict.checkpoints, 'checkpoint')} as committed"
