"""The folder of a run: its configuration, metrics, journal, timelines and checkpoints; and how it is reopened."""

from __future__ import annotations

import difflib
import json
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pentad.orchestrator.config.config import RunConfig, dump, load
from pentad.orchestrator.config.errors import shown
from pentad.orchestrator.monitoring.comparison import DrawnRun, comparison_page, run_trace, simulate_steps
from pentad.orchestrator.monitoring.evaluations import EVAL_KEYS, Best, best_of
from pentad.orchestrator.records.checkpoint_places import (
    CHECKPOINTS,
    CONFIG,
    are_elsewhere,
    checkpoints_in,
    checkpoints_of,
    home_of,
    path_of,
    saved_config,
    store_files,
    stored_config,
)
from pentad.orchestrator.records.hash_chain import AUDIT, hash_of, linked
from pentad.orchestrator.records.json_lines import line_of, read_lines, reported, trim
from pentad.orchestrator.records.profiles import PROFILES, drop_profiles
from pentad.orchestrator.records.run_files import (
    SETTLE_SECONDS,
    WAIT_SECONDS,
    Change,
    RunFiles,
    drop_steps,
    replace_file,
)
from pentad.orchestrator.records.run_lock import RunLock
from pentad.schedules.diagnosis.rank_rows import svg_rank_times
from pentad.schedules.diagnosis.rank_times import RankTime, to_bytes
from pentad.schedules.ir.errors import PentadError, enumerated
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.plan import Plan
from pentad.workers.background import within
from pentad.workers.checkpoint.checkpoint import (
    Checkpoint,
    committed,
    folder_of,
    has_manifest,
    has_manifests,
    newest,
    open_checkpoint,
)
from pentad.workers.checkpoint.location import Location, location
from pentad.workers.hf import kept_files
from pentad.workers.hf.names import MODEL_FILE

PROGRAM, METRICS, JOURNAL = "program.arrow", "metrics.jsonl", "journal.jsonl"
EVALUATIONS, EVAL_PROGRAM, EVAL_TIMELINE = "eval.jsonl", "eval-program.arrow", "eval-timeline.arrow"
TIMELINE, RANK_TIMES, TRACE, PAGE = "timeline.arrow", "rank-times.arrow", "trace.json.gz", "timeline.html"
RANK_TIMES_SVG, EXPERT_LOAD, ORDER = "rank-times.svg", "expert-load.json", "order.arrow"  # the order re-planned to
TIMED_STEPS = 200  # newest steps whose times by rank are kept
_MOST_NAMES = 10  # most run names listed in an error
# Keys of every line of metrics.jsonl; bubbles are shares of the makespan, null where a step was not measured.
METRIC_KEYS = (
    *("step", "time", "loss", "grad_norm", "lr", "tokens", "total_tokens", "step_seconds", "tokens_per_second"),
    *("mfu", "bubble_planned", "bubble_measured", "generation"),
)
# Keys, by prefix, that a resumed run may not change.
FIXED = ("model.", "batch.", "lora.", "data.packing", "data.holdout", "run.seed", "checkpoint.path")
_OWN = ("run.name", "run.folder")
Changes = dict[str, tuple[Any, Any]]  # (old value, new value) by key


class RunFolder(AbstractContextManager["RunFolder"]):
    """The folder of a live run, locked against others until it is closed; use it in a `with`.

    `changes` are the configuration keys that a resumed run changes.
    """

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        """Creates the folder, with `config.yaml` and `program.arrow`, or opens it to resume.

        Raises PentadError if another live run has locked it, or it holds a run that cannot resume with `config`.
        """
        self.path, self.config = path_of(config), config
        self.files = RunFiles(self.path)
        self.checkpoints = checkpoints_of(config)
        self.plan, self.keep_best = plan, config.checkpoint.keep_best
        self.rank_times: deque[tuple[RankTime, ...]] = deque(maxlen=TIMED_STEPS)  # those of the last steps
        self.steps, self.totals = array("q"), array("d")  # `step` and `total_tokens` of the lines of metrics.jsonl
        saved = resumed_config(config)
        self.resumed, self.changes = saved is not None, changed_keys(saved, config) if saved else {}
        try:
            (self.path if are_elsewhere(config) else self.path / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            self.lock = RunLock(self.path, _running(config.run.name))
        except OSError as error:
            text = f"run.folder is '{config.run.folder}', where {self.path} cannot be written ({error.strerror})"
            raise PentadError(f"{text}: expected a folder of your own") from None
        self.generation = self.lock.generation  # the newest of all events, written or not
        try:
            self._open_lines()
            self.audit_hash = hash_of(trim(self.path / AUDIT), str(self.path / AUDIT))
            if not self.resumed:
                self.begin(config)
        except BaseException:
            self.close()
            raise

    def begin(self, config: RunConfig) -> None:
        """Writes `config.yaml` and the programs, which apply to the steps from now on."""
        text = dump(config)
        replace_file(self.path / CONFIG, text.encode())
        store_files(config, {CONFIG: text.encode()})
        self._audit({"event": "configuration", "yaml": text})
        self.replan(self.plan)
        self.files.flush(SETTLE_SECONDS)  # a run must not begin on a full disk

    def _open_lines(self) -> None:
        """Reads the lines into memory, so that no reader depends on a disk that may hang later."""
        for name, keys in ((METRICS, METRIC_KEYS), (EVALUATIONS, EVAL_KEYS), (JOURNAL, ("event",))):
            trim(self.path / name)
            if name != METRICS:
                self.files.open(self.path / name, keys)
        for row in read_lines(self.path / METRICS, METRIC_KEYS):
            self._add_total(row["step"], row["total_tokens"])

    def _add_total(self, step: int, tokens: int) -> None:
        self.steps.append(step)
        self.totals.append(tokens)

    def checkpoint(self, step: int) -> Location:
        """The folder of the checkpoint after `step` steps."""
        return folder_of(self.checkpoints, step)

    def saved(self) -> list[int]:
        """Steps of the committed checkpoints, lowest first."""
        return list(committed(self.checkpoints))

    def metrics(self, *rows: dict[str, Any]) -> list[dict[str, Any]]:
        """Appends the rows of steps, with `total_tokens` (of all steps so far), to metrics.jsonl and returns these
        lines; rows must have all other METRIC_KEYS. Before that, the steps' `batch` and `samples` go to audit.jsonl."""
        audited = ("step", "generation", "batch", "samples", "loss", "target_tokens")
        self._audit(*({"event": "step", **{key: row[key] for key in audited if key in row}} for row in rows))
        lines = []
        for row in rows:
            self._add_total(row["step"], row["tokens"] + (self.totals[-1] if self.totals else 0))
            line = {key: value for key, value in row.items() if key not in ("batch", "samples")}
            lines.append(line | {"total_tokens": int(self.totals[-1])})
            missing = [key for key in METRIC_KEYS if key not in lines[-1]]
            assert not missing, f"metrics without {missing}"
        self.files.append(self.path / METRICS, *lines)
        return lines

    def evaluated(self, rows: Sequence[dict[str, Any]]) -> None:
        """Appends an evaluation to eval.jsonl."""
        self.files.append(self.path / EVALUATIONS, *rows)

    def evaluations(self) -> list[dict[str, Any]]:
        """The lines of eval.jsonl."""
        return self.files.rows(self.path / EVALUATIONS)

    def journal(self) -> list[dict[str, Any]]:
        """The lines of journal.jsonl."""
        return self.files.rows(self.path / JOURNAL)

    def best(self, saving: int) -> Best | None:
        """The checkpoint that checkpoint.keep_best keeps, counting one after `saving` steps as committed."""
        return best_of(self.evaluations(), self.keep_best, {*self.saved(), saving}) if self.keep_best else None

    def event(self, event: str, **facts: Any) -> dict[str, Any]:
        """Appends an event, with its Unix time, to journal.jsonl and audit.jsonl, and returns it."""
        entry = {"time": time.time(), "event": event, **facts}
        if (generation := facts.get("generation", 0)) > self.generation:
            self.generation = generation
            with suppress(OSError):  # written in place, even to a full disk, so that no generation number is reused
                within(WAIT_SECONDS, partial(self.lock.save, generation))
        with self.files.lock:
            self.files.append(self.path / JOURNAL, entry)
            self._audit(entry)
        return entry

    def keep_files(self, checkpoint: Location) -> None:
        """Keeps the files that came with the imported weights from which the run starts, for an export."""
        files = kept_files.read_files(home_of(checkpoint) / kept_files.FOLDER)
        with reported(self.path / kept_files.FOLDER):
            kept_files.write_files(self.path / kept_files.FOLDER, files)
        store_files(self.config, {f"{kept_files.FOLDER}/{name}": content for name, content in files.items()})

    def replan(self, plan: Plan) -> None:
        """Writes the programs of the plan that steps follow from now on, perhaps on another mesh."""
        self.plan = plan
        self.files.replace(self.path / PROGRAM, plan.program.to_bytes())
        if plan.eval is not None:
            self.files.replace(self.path / EVAL_PROGRAM, plan.eval.program.to_bytes())

    def save_order(self, order: Program) -> None:
        """Writes the compute order that the run is re-planned to."""
        self.files.replace(self.path / ORDER, order.to_bytes())

    def rewind(self, step: int) -> None:
        """Drops the metrics and profiles of step `step` and later ones, which the run will replay, and evaluations
        after more than `step` steps."""
        self._audit({"event": "rewind", "step": step})
        self.files.change(Change(self.path / PROFILES, partial(drop_profiles, self.path, step)))
        if (evaluations := self.evaluations()) and max(row["step"] for row in evaluations) > step:
            kept = [row for row in evaluations if row["step"] <= step]
            self.files.replace_rows(self.path / EVALUATIONS, kept)
        still = [times for times in self.rank_times if times and times[0].step < step]
        self.rank_times = deque(still, maxlen=TIMED_STEPS)
        end = bisect_left(self.steps, step)
        del self.steps[end:], self.totals[end:]
        self.files.change(Change(self.path / METRICS, partial(drop_steps, self.path / METRICS, step)))

    def _audit(self, *entries: dict[str, Any]) -> None:
        """Appends entries to audit.jsonl, which only grows."""
        with self.files.lock:
            last, chain = self.audit_hash, []
            for entry in entries:
                chain.append(linked(json.loads(line_of(entry)), last))
                last = chain[-1]["hash"]
            self.audit_hash = last  # before the append: after Ctrl-C the lines are written later
            self.files.append(self.path / AUDIT, *chain)

    def timelines(self, measured: Timeline, costs: Costs, program: int = 0, plan: Plan | None = None) -> None:
        """Writes timeline.arrow, trace.json.gz and timeline.html (the latter two with simulated steps), rank times, and
        to program.arrow the program that the steps ran: number `program` of their `plan` (None: the present plan).
        `costs` are for steps whose own costs cannot be read. May be called from any thread. Raises PentadError if the
        disk does not take them."""
        if not measured.spans:
            return
        with self.files.lock:
            is_present, plan = plan in (None, self.plan), (plan or self.plan).with_program(program)
            if is_present:  # otherwise `replan` has written another one
                self.files.replace(self.path / PROGRAM, plan.program.to_bytes())
        names, simulated = process_names(plan), simulate_steps(plan, measured, costs)
        times = [each for step in list(self.rank_times) for each in step]  # a copy: another thread may extend it
        drawing = svg_rank_times(times, plan.mesh, title=f"{plan.name}: ranks beside their peers")
        page = comparison_page(DrawnRun.of_plan(plan), measured, simulated, drawing)
        drawn = {
            TIMELINE: measured.to_bytes(),
            TRACE: run_trace(plan, measured, simulated.of_step(measured.steps[-1]), names),
            RANK_TIMES: to_bytes(times),
            PAGE: page.encode(),
        }
        self._write(drawn | ({RANK_TIMES_SVG: drawing.encode()} if drawing else {}))

    def eval_timeline(self, measured: Timeline) -> None:
        """Writes eval-timeline.arrow. Raises PentadError if the disk does not take it."""
        if measured.spans:
            self._write({EVAL_TIMELINE: measured.to_bytes()})

    def _write(self, drawn: Mapping[str, bytes]) -> None:
        """Writes drawings directly rather than through `files`, whose records must not wait for them."""

        def write() -> None:
            for name, content in drawn.items():
                replace_file(self.path / name, content)

        if problem := self.files.problem():
            raise PentadError(problem)
        try:
            within(SETTLE_SECONDS, write)
        except TimeoutError:
            raise PentadError(f"{self.path} has not taken {', '.join(drawn)} in {SETTLE_SECONDS:g} s") from None

    def save_expert_load(self, step: int, layers: Mapping[int, Sequence[int]]) -> None:
        """Writes expert-load.json: the tokens that each expert of a layer got in this step."""
        self.files.replace(self.path / EXPERT_LOAD, json.dumps({"step": step, "layers": dict(layers)}).encode())

    def close(self) -> None:
        self.files.close()  # before the lock is released, or the next driver may find the last lines torn
        self.lock.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def has_checkpoint(config: RunConfig) -> bool:
    """Whether the run has committed a checkpoint, intact or not."""
    return has_manifests(checkpoints_of(config))


def check_not_live(config: RunConfig) -> None:
    """Raises PentadError if a live run has locked the folder of `config`."""
    path = path_of(config)
    with suppress(OSError):  # RunFolder reports it
        if (path / ".lock").exists():
            RunLock(path, _running(config.run.name)).close()


def resolve_run(name: str, folder: Path = Path("runs"), argument: str = "RUN") -> Path:
    """The folder of a run given by its path, or by its name below `folder`. Raises PentadError if there is none, or it
    cannot be read."""
    try:
        for path in (Path(name), folder / name):
            if (path / CONFIG).is_file():
                return path
    except OSError as error:
        reason = f"which cannot be read ({error.strerror}): expected a run of yours"
        raise PentadError(f"{argument} is '{name}', {reason}") from None
    known = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    there = f"the runs there are {enumerated(known, _MOST_NAMES)}" if known else "there are none"
    raise PentadError(f"{argument} is '{name}'{hint}: expected a run's folder or a name under {folder}/: {there}")


def find_checkpoint(text: str, argument: str, runs: Path = Path("runs")) -> Checkpoint:
    """A verified checkpoint given by its folder, or the newest one of a run (a folder, or a name below `runs`) or an
    import; a folder may be in a store.

    Raises PentadError, naming `argument`, if there is none.
    """
    folder = location(text)
    if is_checkpoint(folder):
        return open_checkpoint(folder)
    checkpoint = newest(find_checkpoints(text, argument, runs)).checkpoint
    if checkpoint is None:
        raise PentadError(f"{argument} is '{text}', which has no valid checkpoint: expected at least one")
    return checkpoint


def is_checkpoint(folder: Location) -> bool:
    """Whether this is the folder of a single checkpoint rather than of a run."""
    is_folder = not isinstance(folder, Path) or folder.is_dir()
    return folder.name.startswith("step-") or (is_folder and has_manifest(folder))


def find_checkpoints(text: str, argument: str, runs: Path = Path("runs")) -> Location:
    """The folder with all checkpoints of a run (a folder, or a name below `runs`) or an import. Raises PentadError."""
    folder = location(text)
    if not isinstance(folder, Path):
        return folder / CHECKPOINTS
    home = next((path for path in (folder, runs / text) if (path / CHECKPOINTS).is_dir()), None)
    return checkpoints_in(home or resolve_run(text, runs, argument))


def process_names(plan: Plan | DrawnRun) -> dict[int, str]:
    """Names of the ranks in drawings, such as 'rank 2 (dp0 pp2)'."""
    return {rank: f"rank {rank} ({plan.mesh.coordinates(rank)})" for rank in range(plan.mesh.size)}


def resumed_config(config: RunConfig) -> RunConfig | None:
    """The configuration of the run that `config` resumes; None for a new one.

    Raises PentadError if its folder holds another run, or something other than a run.
    """
    path, advice = path_of(config), f"choose another run.name than {config.run.name}"
    if not (path / CONFIG).exists():
        known = {".lock", CHECKPOINTS, MODEL_FILE, kept_files.FOLDER}  # the latter two from import-hf
        if path.exists() and (not path.is_dir() or {inside.name for inside in path.iterdir()} - known):
            raise PentadError(f"{path} exists and is not a run's folder: expected a new one: {advice}")
    try:
        saved = saved_config(path) if (path / CONFIG).exists() else stored_config(config)
    except PentadError as error:
        raise PentadError(f"the run in {path} cannot be resumed: {error}: {advice}") from None
    for key, (before, now) in changed_keys(saved, config).items() if saved else ():
        if key.startswith(FIXED):
            hint = f"run.init_from={config.run.name} starts a new run from its weights"
            raise PentadError(f"{key} is {shown(now)}, but the run in {path} has {shown(before)}: {advice} ({hint})")
    return saved


def with_kept_division(config: RunConfig) -> RunConfig:
    """The configuration in which a resumed run keeps the values found at its first start for data.capacity_factor: auto
    and data.document_costs: auto, so that it forms the same groups on any devices."""
    data = config.data
    is_open = data.balance != "none" and "auto" in (data.capacity_factor, data.document_costs)
    saved = resumed_config(config) if is_open else None
    if saved is None or saved.data.balance != data.balance:
        return config
    kept = {"capacity_factor": saved.data.capacity_factor, "document_costs": saved.data.document_costs}
    words = [f"data.{key}={value}" for key, value in kept.items() if getattr(data, key) == "auto" != value]
    return load(config, words) if words else config


def changed_keys(before: RunConfig, now: RunConfig) -> Changes:
    """The keys whose values differ, except for the run's name and folder."""
    old, new = _flat(before), _flat(now)
    return {key: (old[key], new[key]) for key in new if old[key] != new[key] and key not in _OWN}


def _flat(config: RunConfig) -> dict[str, Any]:
    sections = config.model_dump()
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


def _running(name: str) -> str:
    return f"run.name is {name}, which is running already (process {{holder}}): expected another"
