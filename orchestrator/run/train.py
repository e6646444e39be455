"""A run from its checks to its summary: plans it, starts Ray's head, and hands over to the driver.

Imports neither Ray nor torch: mistakes are reported within a second, and Ray starts while the driver is imported.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from pentad.orchestrator.checked_folders import check_corpora
from pentad.orchestrator.cluster.local_head import launch
from pentad.orchestrator.cluster.ports import require_free
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.loggers.loggers import check_loggers
from pentad.orchestrator.monitoring import runfolder
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.evaluations import EVAL_KEYS, best_of
from pentad.orchestrator.monitoring.runfolder import check_not_live, has_checkpoint, resumed_config
from pentad.orchestrator.planning.estimate import checkpoint_bytes
from pentad.orchestrator.planning.fit import require_free_memory
from pentad.orchestrator.planning.numerics import optimizer_spec
from pentad.orchestrator.planning.planning import first_plan, with_inputs_of
from pentad.orchestrator.records.checkpoint_places import (
    check_folder,
    check_room,
    check_store,
    checkpoints_of,
    path_of,
)
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.run.init_from import origin_of, start_notes, with_base
from pentad.orchestrator.run.interrupts import Interrupts, OnStep, StepCallback
from pentad.orchestrator.run.measure import typical_pace
from pentad.orchestrator.run.resumed_optimizer import with_decay_steps
from pentad.orchestrator.search.rebalanced_plan import with_rebalanced_layers
from pentad.orchestrator.search.replanned_order import with_replanned_order
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.batch import batch_of
from pentad.schedules.spec.lora import LoraBase, lora_of
from pentad.schedules.spec.optimizer import moment_offset_of
from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint.checkpoint import committed, newest, read_manifest
from pentad.workers.checkpoint.location import Location
from pentad.workers.data.mixture import require_lasting, require_resumable
from pentad.workers.data.sources import check_data, described, open_eval_data, open_sources

RUNNER = "pentad.workers.runtime.runner:Runner"
FILES = {
    "config": runfolder.CONFIG,
    "program": runfolder.PROGRAM,
    "metrics": runfolder.METRICS,
    "evaluations": runfolder.EVALUATIONS,
    "eval_program": runfolder.EVAL_PROGRAM,
    "eval_timeline": runfolder.EVAL_TIMELINE,
    "journal": runfolder.JOURNAL,
    "timeline": runfolder.TIMELINE,
    "trace": runfolder.TRACE,
    "page": runfolder.PAGE,
}


def prepare(config: RunConfig) -> Plan:
    """The plan of a run whose data has been opened. Starts nothing, and writes nothing but a built-in corpus and the
    tables of packed documents. Raises PentadError."""
    sizes, batch, steps = (config.model.vocab, config.batch.sequence_length), config.batch, config.run.steps
    check_corpora(each.path for each in config.data.spec.sources)
    check_data(config.data.spec, *sizes, batch.sizes, steps)
    check_loggers(config.loggers.use)
    plan = _plan_to_train(config)
    data = described(plan.data, open_sources(plan.data, *sizes, verify=True))
    require_lasting(data, batch.sizes, steps)
    return with_eval_fingerprints(replace(plan, data=data))


def _plan_to_train(config: RunConfig) -> Plan:
    """The first plan of a run. Raises PentadError if this machine is to train it but has too little free memory."""
    plan = first_plan(config)
    if config.cluster.address == "local":
        require_free_memory(config, plan)
    return plan


def with_eval_fingerprints(plan: Plan, argument: str = "eval.data") -> Plan:
    """The plan with the fingerprints of its evaluation data. Raises PentadError for data that cannot be read;
    `argument` is the option or key that names it to the user."""
    if plan.eval is None:
        return plan
    sizes, found = (plan.model.vocab, plan.batch.sequence_length, plan.data.cache), []
    for each in plan.eval.data_sets:
        named = "data.path" if each.holdout else argument
        verify = not each.holdout  # a holdout is part of the training data, which has been verified
        part = open_eval_data(each, *sizes, verify=verify, argument=named)
        found.append(each._replace(fingerprint=part.corpus.fingerprint))
    return replace(plan, eval=replace(plan.eval, data_sets=tuple(found)))


def train(
    config: RunConfig,
    *,
    display: Display | None = None,
    runner: str = RUNNER,
    plan: Plan | None = None,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Runs the steps that the run still lacks, and returns its summary.

    The first Ctrl-C, SIGTERM or SIGHUP ends the run after the steps in flight, with a checkpoint, as 'stopped'; the
    second raises KeyboardInterrupt. Raises PentadError for a user's mistake and WorkerError if a rank fails. However it
    ends, all files are complete and no process is left. `display`, which must be open, shows the run (None: nothing
    does); `plan` is the result of `prepare` (None: planned here, without opening the data). `on_step` gets each row of
    metrics.jsonl; an exception that it raises ends the run like the first Ctrl-C and is then re-raised, unless it is
    StopTraining.
    """
    display = display or Display(Console(quiet=True), config.run.name, config.run.steps)
    plan = plan or _plan_to_train(config)
    check_folder(config)
    check_not_live(config)
    if note := check_store(config):
        display.note(note)
    saved = resumed_config(config)
    folder = path_of(config)
    journal = partial(read_lines, folder / runfolder.JOURNAL, ["event"])
    changed = with_replanned_order(with_rebalanced_layers(config, journal), journal, folder / runfolder.ORDER)
    if changed is not config:
        config, plan = changed, with_inputs_of(_plan_to_train(changed), plan)
    if done := _finished_steps(config, plan):
        asked = f"its run.steps = {config.run.steps}"
        more = f"{done} steps, more than {asked}: nothing is left to do"
        display.note(f"the run has already completed {asked if done == config.run.steps else more}")
        return summary(config, done)
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        if note := check_room(config, checkpoint_bytes(plan)):
            display.note(note)
        config, note = with_decay_steps(config, saved)
        if note:
            display.note(note)
        origin = None if has_checkpoint(config) else origin_of(config)  # a mistake shows before Ray starts
        for note in start_notes(config, origin) if saved is None else ():
            display.note(note)
        offset = _moment_offset(config) if origin is None else origin.moment_offset
        plan = replace(plan, optimizer=replace(optimizer_spec(config), moment_offset=offset))
        plan = with_base(plan, _base(config) if origin is None else origin.base)
        display.phase("starting Ray" if config.cluster.address == "local" else f"joining {config.cluster.address}")
        head = stack.enter_context(launch(config.cluster, config.mesh.size))
        from pentad.orchestrator.run.driver import drive  # imports ray

        watchers = []
        if on_step is not None:
            watchers = [callback := StepCallback(on_step, interrupts.stop_run)]
            stack.enter_context(callback.raised())
        steps = drive(config, plan, head, runner, display, interrupts, origin, watchers)
        if steps < config.run.steps:
            display.note(f"stopped after step {steps}")
        return summary(config, steps)


def summary(config: RunConfig, steps: int) -> dict[str, Any]:
    """The summary of a run over all its generations; its tokens per second are the last generation's."""
    folder = path_of(config)
    rows = read_lines(folder / runfolder.METRICS)
    last = rows[-1] if rows else {}
    newest = [row for row in rows if row["generation"] == last["generation"]]
    return {
        "run": config.run.name,
        "folder": str(folder),
        "steps": steps,
        "loss": last.get("loss"),
        "first_loss": rows[0]["loss"] if rows else None,
        "tokens_per_second": typical_pace(newest) if newest else None,
        "bubble_planned": last.get("bubble_planned"),
        "bubble_measured": last.get("bubble_measured"),
        "evaluations": _last_evaluation(folder),
        "best": _best(config, folder),
        "state": "finished" if steps >= config.run.steps else "stopped",
        "files": {name: str(folder / file) for name, file in FILES.items() if (folder / file).exists()},
    }


def _last_evaluation(folder: Path) -> list[dict[str, Any]]:
    rows = read_lines(folder / runfolder.EVALUATIONS, EVAL_KEYS)
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def _best(config: RunConfig, folder: Path) -> dict[str, Any] | None:
    """The checkpoint kept by checkpoint.keep_best."""
    by_step = committed(checkpoints_of(config))
    best = best_of(read_lines(folder / runfolder.EVALUATIONS, EVAL_KEYS), config.checkpoint.keep_best, by_step)
    return best and {**best._asdict(), "checkpoint": str(by_step[best.step])}


def _finished_steps(config: RunConfig, plan: Plan) -> int:
    """The step of the newest intact checkpoint if the run has completed its run.steps, else 0.

    Raises PentadError if its checkpoints are of another corpus, or a port is taken.
    """
    require_free("metrics.port", config.metrics.host, config.metrics.port)
    require_free("metrics.control_port", config.metrics.host, config.metrics.control_port)
    require_free("metrics.page_port", config.metrics.host, config.metrics.page_port)
    checkpoints = checkpoints_of(config)
    step, meta = _newest_manifest(checkpoints)
    if meta.get("data"):
        batches = batch_of(step, meta["skipped_batches"])
        require_resumable(plan.data, plan.batch.sizes, batches, meta["data"])
    if step < config.run.steps:
        return 0
    found = newest(checkpoints).checkpoint
    return found.step if found is not None and found.step >= config.run.steps else 0


def _base(config: RunConfig) -> LoraBase | None:
    """The checkpoint with the frozen weights of a LoRA run that has checkpoints of its own. Raises PentadError if its
    own checkpoints hold all parameters."""
    if config.lora.rank is None:
        return None
    _, meta = _newest_manifest(checkpoints_of(config))
    if not meta:
        return origin_of(config).base
    lora = lora_of(meta)
    if lora is None:
        expected = f"null, or another run.name than {config.run.name}, whose checkpoints have all parameters"
        raise PentadError(f"lora.rank is {config.lora.rank}: expected {expected}")
    return lora.base


def _moment_offset(config: RunConfig) -> int:
    """The moment offset of a run that has checkpoints of its own."""
    _, meta = _newest_manifest(checkpoints_of(config))
    return moment_offset_of(meta)


def _newest_manifest(checkpoints: Location) -> tuple[int, dict[str, Any]]:
    """Step and metadata of the newest committed checkpoint, (0, {}) without one; reads no tensors."""
    folders = list(committed(checkpoints).values())
    if not folders:
        return 0, {}
    manifest = read_manifest(folders[-1])
    return manifest.step, manifest.meta
