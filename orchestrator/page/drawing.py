"""Draws figures of many spans in a process of its own, because the driver needs its interpreter lock to keep the ranks
busy.

`python -m pentad.orchestrator.page.drawing FOLDER` writes DRAWN to FOLDER from the files that functions here put there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pentad.orchestrator.monitoring.comparison import DrawnRun, comparison_page, simulate_steps
from pentad.schedules.diagnosis import rank_times
from pentad.schedules.diagnosis.rank_rows import svg_rank_times
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.draw.page_program import DrawnMemory, DrawnMessages
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.plan import Plan

SECONDS = 300.0  # limit for a drawing, even on a busy machine
MODULE = "pentad.orchestrator.page.drawing"
PROGRAM, MEASURED, TIMES, FACTS, DRAWN = "program.arrow", "measured.arrow", "times.arrow", "facts.json", "drawn"
_SIZES = ("global_batch_size", "sequence_length", "microbatches", "replicas")  # batch sizes that pages show


def timeline_html(plan: Plan, measured: Timeline, costs: Costs) -> str:
    """The page of these steps, measured above simulated; `costs` are for steps whose own costs cannot be read. Raises
    PentadError if it cannot be drawn."""
    run = DrawnRun.of_plan(plan)
    facts = {
        "name": run.name,
        "mesh": asdict(run.mesh),
        "batch": [getattr(run.batch, size) for size in _SIZES],
        "model": run.model,
        "memory": run.memory,
        "messages": run.messages,
        "costs": asdict(costs),
    }
    with TemporaryDirectory(prefix="pentad-") as name:
        run.program.save(Path(name) / PROGRAM)
        measured.save(Path(name) / MEASURED)
        return _drawn(Path(name), facts)


def rank_times_svg(times: Iterable[RankTime], mesh: Mesh, title: str) -> str:
    """The figure of every rank beside its peers, by step and op; '' if no rank has peers. Raises PentadError if it
    cannot be drawn."""
    with TemporaryDirectory(prefix="pentad-") as name:
        rank_times.save(times, Path(name) / TIMES)
        return _drawn(Path(name), {"mesh": asdict(mesh), "title": title})


def _drawn(folder: Path, facts: dict[str, Any]) -> str:
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    command = [sys.executable, "-P", "-m", MODULE, str(folder)]
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=True)
        return (folder / DRAWN).read_text(encoding="utf-8")
    except subprocess.TimeoutExpired:
        raise PentadError(f"the figure was not drawn within {SECONDS:.0f} s: expected fewer steps") from None
    except (subprocess.CalledProcessError, OSError) as error:
        lines = (getattr(error, "stderr", None) or b"").decode(errors="replace").splitlines()
        raise PentadError(f"the figure could not be drawn: {(lines or [str(error)])[-1]}") from None


def _draw(folder: Path) -> str:
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    if (folder / TIMES).exists():
        return svg_rank_times(rank_times.load(folder / TIMES), Mesh(**facts["mesh"]), title=facts["title"])
    program, measured = Program.load(folder / PROGRAM), Timeline.load(folder / MEASURED)
    batch = BatchSpec(**dict(zip(_SIZES, facts["batch"], strict=True)))
    memory, messages = DrawnMemory(*facts["memory"]), tuple(DrawnMessages(*each) for each in facts["messages"])
    run = DrawnRun(facts["name"], Mesh(**facts["mesh"]), program, batch, facts["model"], memory, messages)
    costs: dict[str, Any] = {
        name: tuple(map(_tuple, each)) if isinstance(each, list) else each for name, each in facts["costs"].items()
    }
    return comparison_page(run, measured, simulate_steps(run, measured, Costs(**costs)))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    (Path(sys.argv[1]) / DRAWN).write_text(_draw(Path(sys.argv[1])), encoding="utf-8")
