"""From the optimizer section to what the ranks run."""

from __future__ import annotations

from pentad.orchestrator.config.config import RunConfig
from pentad.schedules.spec.learning_rate import LearningRate
from pentad.schedules.spec.optimizer import OptimizerSpec, ParamGroup


def optimizer_spec(config: RunConfig) -> OptimizerSpec:
    given = config.optimizer
    return OptimizerSpec(
        learning_rate=learning_rate(config),
        beta1=given.beta1,
        beta2=given.beta2,
        eps=given.eps,
        weight_decay=given.weight_decay,
        clip_norm=given.clip_norm,
        name=given.name,
        groups=tuple(ParamGroup(**group.model_dump()) for group in given.groups or ()),
        bf16_state=config.precision.optimizer_state == "bfloat16",
        momentum=given.momentum,
        nesterov=given.nesterov,
        adjust_lr_fn=given.adjust_lr_fn,
    )


def learning_rate(config: RunConfig) -> LearningRate:
    given = config.optimizer
    steps = given.decay_steps or config.run.steps
    warmup = min(100, steps // 10) if given.warmup_steps is None else given.warmup_steps
    stable = max(0, steps - steps // 5 - warmup) if given.stable_steps is None else given.stable_steps
    return LearningRate(
        peak=given.learning_rate,
        minimum=given.learning_rate / 10 if given.min_learning_rate is None else given.min_learning_rate,
        warmup_steps=warmup,
        decay_steps=steps,
        schedule=given.schedule,
        stable_steps=stable if given.schedule == "wsd" else 0,
        decay_shape=given.decay_shape or "linear",
        cycles=given.cycles or 1,
    )
