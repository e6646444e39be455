"""What a resumed run keeps of its optimizer's state and schedule, and what its user is told about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from pydantic import ValidationError

from pentad.orchestrator.config import errors
from pentad.orchestrator.config.config import RunConfig
from pentad.schedules.spec.learning_rate import LearningRate
from pentad.schedules.spec.lora import trained_tensors
from pentad.schedules.spec.optimizer import STATE_KINDS
from pentad.schedules.spec.plan import Plan


def with_decay_steps(config: RunConfig, saved: RunConfig | None) -> tuple[RunConfig, str]:
    """(the configuration with optimizer.decay_steps filled in, a sentence for the user or ''); `saved` is the
    configuration of the run being resumed, if any.

    The number is run.steps when the run first starts and stays the same on every resume, so that raising run.steps does
    not change the learning rates of steps planned before. Raises ConfigError if the saved number contradicts the
    configuration.
    """
    if config.optimizer.decay_steps is None:
        steps = saved.optimizer.decay_steps if saved is not None else None
        config = _with(config, steps or config.run.steps)
    if saved is None:
        return config, ""
    before, now = saved.optimizer.curve(saved.run.steps), config.optimizer.curve(config.run.steps)
    if before != now:
        return config, f"the learning rate has changed: {_change(before, now)}"
    if now.schedule != "constant" and now.decay_steps < config.run.steps:
        kept = f"the learning rate keeps its schedule of optimizer.decay_steps = {now.decay_steps}"
        return config, f"{kept}, after which it is {now.at(now.decay_steps):g}"
    return config, ""


def _with(config: RunConfig, decay_steps: int) -> RunConfig:
    values = config.model_dump()
    values["optimizer"]["decay_steps"] = decay_steps
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise errors.ConfigError(errors.sentences(error, RunConfig)) from None


def _change(before: LearningRate, now: LearningRate) -> str:
    if (new := _shown(now)) != (old := _shown(before)):
        return f"now {new}, before {old}"
    changed = [each.name for each in fields(now) if getattr(now, each.name) != getattr(before, each.name)]
    return " and ".join(f"{name} is {getattr(now, name)}, before {getattr(before, name)}" for name in changed)


def _shown(rate: LearningRate) -> str:
    return f"{rate.schedule} to {rate.minimum:g} over {rate.decay_steps} steps from {rate.peak:g}"


def dropped_state(plan: Plan, stored: Iterable[str]) -> str:
    """A sentence about the optimizer state that is dropped because a checkpoint with the tensors `stored` has another
    optimizer than the plan, or ''. A checkpoint without optimizer state, such as an import, has nothing to drop."""
    spec = plan.optimizer
    names = {name.partition("@")[0] for name in stored if name.startswith("optimizer.")}
    expected = {
        f"{kind}.{tensor.name}"
        for tensor in trained_tensors(plan.model, plan.lora)
        if not tensor.tied_to
        for kind in STATE_KINDS[spec.rule_of(tensor).method]
    }
    dropped, new = names - expected, expected - names
    if not names or not dropped | new:
        return ""
    num_tensors = len({name.split(".", 2)[2] for name in dropped | new})
    changed = f"{num_tensors} tensors change their optimizer"
    return f"{changed}: the old state ({_kinds(dropped)}) is dropped, and the new one ({_kinds(new)}) begins at 0"


def _kinds(names: Iterable[str]) -> str:
    return " and ".join(sorted({".".join(name.split(".", 2)[:2]) for name in names}))
