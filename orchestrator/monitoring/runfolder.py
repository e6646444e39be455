"""The folder of a run: what it was asked to do, what it did, and how to open it again."""

from __future__ import annotations

import difflib
import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pentad.orchestrator.config.config import RunConfig, dump, load
from pentad.orchestrator.planning.planning import spread
from pentad.schedules.draw.html import timeline_page
from pentad.schedules.draw.trace import write_trace
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import parameters
from pentad.workers.hf.hf_files import MODEL_FILE, TOKENIZER_FILES

CONFIG, PROGRAM, METRICS, JOURNAL = "config.yaml", "program.arrow", "metrics.jsonl", "journal.jsonl"
TIMELINE, TRACE, PAGE, CHECKPOINTS = "timeline.arrow", "trace.json.gz", "timeline.html", "checkpoints"
# Every line of metrics.jsonl has these; bubbles are shares of the makespan, null where a step was not measured.
METRIC_KEYS = (
    *("step", "loss", "grad_norm", "lr", "tokens", "step_seconds", "tokens_per_second"),
    *("mfu", "bubble_planned", "bubble_measured", "generation"),
)
_FIXED = ("model.", "batch.", "data.path", "run.seed")  # what a resumed run may not change


class RunFolder:
    """One live run's hold on its folder; close it, or use it in a `with`, so that the next one may open it."""

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        """Creates the folder, with `config.yaml` and `program.arrow`, or opens it to resume.

        Raises PentadError when another live run holds it, or the folder is of a run that does not fit `config`.
        """
        self.path = Path(config.run.folder).expanduser() / config.run.name
        self.plan = plan
        self.resumed = (self.path / CONFIG).exists()
        _refuse_strangers(self.path, config)
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.lock = _lock(self.path, config.run.name)
        except OSError as error:
            text = f"run.folder is '{config.run.folder}', where {self.path} cannot be written ({error.strerror})"
            raise PentadError(f"{text}: expected a folder of your own") from None
        try:
            for name in (METRICS, JOURNAL):
                _trim(self.path / name)
            if not self.resumed:
                self.begin(config)
        except BaseException:
            self.close()
            raise

    def begin(self, config: RunConfig) -> None:
        """Writes `config.yaml` and `program.arrow`: from here on the folder's steps are of this program."""
        _replace(self.path / CONFIG, dump(config))
        _replace(self.path / PROGRAM, self.plan.program.to_bytes())

    @property
    def checkpoints(self) -> Path:
        """Absolute: the ranks that write and read there may stand in other folders than the user."""
        return (self.path / CHECKPOINTS).absolute()

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint after `step` steps, as workers/checkpoint/checkpoint.py calls it."""
        return self.checkpoints / f"step-{step:08d}"

    def saved(self) -> list[int]:
        """Steps of the committed checkpoints, whole or damaged."""
        return sorted(int(path.parent.name[5:]) for path in self.checkpoints.glob("step-*/manifest.json")
                      if path.parent.name[5:].isdecimal())  # fmt: skip

    def metrics(self, row: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl; `row` has at least METRIC_KEYS."""
        missing = [key for key in METRIC_KEYS if key not in row]
        assert not missing, f"metrics without {missing}"
        _append(self.path / METRICS, row)

    def event(self, event: str, **facts: Any) -> dict[str, Any]:
        """Adds a line to journal.jsonl: what happened to the run's ranks and checkpoints, and when (Unix seconds).

        Returns it.
        """
        entry = {"time": time.time(), "event": event, **facts}
        _append(self.path / JOURNAL, entry)
        return entry

    def replan(self, plan: Plan) -> None:
        """From here on steps are of this plan, on another mesh perhaps."""
        self.plan = plan
        _replace(self.path / PROGRAM, plan.program.to_bytes())

    def rewind(self, step: int) -> None:
        """Forgets the metrics of `step` and later, which the run is about to do again."""
        kept = [row for row in read_lines(self.path / METRICS, METRIC_KEYS) if row["step"] < step]
        _replace(self.path / METRICS, "".join(json.dumps(row) + "\n" for row in kept))

    def timelines(self, measured: Timeline, simulated: Timeline) -> None:
        """Writes timeline.arrow (measured), trace.json.gz and timeline.html; `simulated` is over pipeline ranks."""
        if not measured.spans:
            return
        with _whole(self.path / TIMELINE) as partial:
            measured.save(partial)
        names = process_names(self.plan)
        with _whole(self.path / TRACE) as partial:
            write_trace(partial, [measured, spread(simulated, self.plan.mesh)], process_names=names)
        _replace(self.path / PAGE, comparison_page(self.plan, measured, simulated))

    def close(self) -> None:
        os.close(self.lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse_live(config: RunConfig) -> None:
    """Raises PentadError when a live run has the folder of `config`: asked early, for that run may have all places."""
    path = Path(config.run.folder).expanduser() / config.run.name
    with suppress(OSError):  # RunFolder tells
        if (path / ".lock").exists():
            os.close(_lock(path, config.run.name))


def resolve_run(name: str, folder: Path = Path("runs")) -> Path:
    """The folder of a run given by its path or by its name below `folder`. Raises PentadError if there is none."""
    for path in (Path(name), folder / name):
        if (path / CONFIG).is_file():
            return path
    known = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    there = f"the runs there are {', '.join(known)}" if known else "there are none"
    raise PentadError(f"RUN is '{name}'{hint}: expected a run's folder or a name under {folder}/: {there}")


def saved_config(path: Path) -> RunConfig:
    """The configuration that a run folder's last run had."""
    return load(path / CONFIG, [])


def read_lines(path: Path, keys: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, if there is one; a last line that a crash tore is left out.

    Raises PentadError for any other line that is no JSON object with `keys`.
    """
    if not path.exists():
        return []
    with _storage(path, "read"):
        lines = path.read_bytes().split(b"\n")[:-1]
    return [_row(line, f"{path} line {number}", keys) for number, line in enumerate(lines, 1)]


def process_names(plan: Plan) -> dict[int, str]:
    """Rank -> how drawings call it, 'rank 2 (dp0 pp2)'."""
    return {rank: f"rank {rank} ({plan.mesh.coordinates(rank)})" for rank in range(plan.mesh.size)}


def comparison_page(plan: Plan, measured: Timeline, simulated: Timeline) -> str:
    """The HTML page of a run's timelines; `simulated` is over pipeline ranks."""
    program = plan.program
    facts = {
        "schedule": f"{program.name}, {program.microbatches} microbatches",
        "mesh": str(plan.mesh),
        "model": f"{parameters(plan.model):,} parameters, {plan.model.layers} layers",
        "batch": f"{plan.batch.global_batch_size} x {plan.batch.length} tokens",
        "program": program.hash[:12],
    }
    return timeline_page(spread(simulated, plan.mesh), measured, title=f"pentad run {plan.name}", facts=facts)


def _refuse_strangers(path: Path, config: RunConfig) -> None:
    advice = f"choose another run.name than {config.run.name}"
    if not (path / CONFIG).exists():
        ours = {".lock", CHECKPOINTS, MODEL_FILE, *TOKENIZER_FILES}  # of an import as well
        if path.exists() and (not path.is_dir() or {inside.name for inside in path.iterdir()} - ours):
            raise PentadError(f"{path} exists and is no run's folder: expected a new one: {advice}")
        return
    before, now = _flat(saved_config(path)), _flat(config)
    for key in now:
        if key.startswith(_FIXED) and before[key] != now[key]:
            raise PentadError(f"{key} is {now[key]}, but the run in {path} has {before[key]}: {advice}")


def _flat(config: RunConfig) -> dict[str, Any]:
    sections = config.model_dump()
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


def _lock(path: Path, name: str) -> int:
    """A descriptor that holds the folder's lock until it is closed, at the latest when the process ends."""
    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 20, 0).decode() or "unknown"
        os.close(descriptor)
        raise PentadError(
            f"run.name is {name}, which is running already (process {holder}): expected another"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _row(line: bytes, where: str, keys: Iterable[str]) -> dict[str, Any]:
    advice = "mend or remove the line"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PentadError(f"{where} is no JSON ({error}): expected an object: {advice}") from None
    missing = [key for key in keys if key not in row] if isinstance(row, dict) else [*keys]
    if missing or not isinstance(row, dict):
        raise PentadError(f"{where} is {line[:60]!r}: expected an object with {', '.join(missing)}: {advice}")
    return row


def _append(path: Path, row: dict[str, Any]) -> None:
    with _storage(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({key: _json_value(value) for key, value in row.items()}, allow_nan=False) + "\n")


def _json_value(value: Any) -> Any:
    """JSON has no word for a number that is not finite: null stands for it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _trim(path: Path) -> None:
    """Cuts off the end of a line that a crash tore, so that the next line is whole."""
    with _storage(path):
        if path.exists():
            text = path.read_bytes()
            os.truncate(path, text.rfind(b"\n") + 1)


def _replace(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all."""
    with _whole(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A file to write, which takes the name `path` at the end, and is gone when the block fails."""
    partial = path.with_name(f".{path.name}.partial")
    with _storage(path):
        try:
            yield partial
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextmanager
def _storage(path: Path, verb: str = "written") -> Iterator[None]:
    """Makes one PentadError of what the storage of a run's file answers: full, read-only, gone."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise PentadError(f"{path} cannot be {verb} ({reason}): expected a run.folder with room") from None
