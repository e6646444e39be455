"""From the optimizer section to what the ranks run."""

from __future__ import annotations

from pentad.orchestrator.config.config import RunConfig
from pentad.schedules.spec.optimizer import OptimizerSpec, ParamGroup


def optimizer_spec(config: RunConfig) -> OptimizerSpec:
    given = config.optimizer
    return OptimizerSpec(
        learning_rate=given.curve(config.run.steps),
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
        z_loss=given.z_loss,
    )
