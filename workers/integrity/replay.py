"""What a rank computes from one microbatch that all replicas of its stages draw alike."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pentad.schedules.spec.plan import Plan
from pentad.workers.integrity.digest import digest
from pentad.workers.model.base_stage import BaseStage, StageInputs
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.params.param_init import derive_seed
from pentad.workers.params.parameters import DTYPES


def replay(plan: Plan, rank: int, stage: BaseStage, index: int, step: int) -> dict[str, torch.Tensor]:
    """Digests of the results of F, B and W of one microbatch on a stage of a rank, between two steps: of activations,
    gradients of activations, and gradients of weights.

    Inputs are drawn from the run's seed, the step, the stage and the rank's coordinates except dp, so ranks that differ
    only in dp, and DualPipe's mirrors, have the same names, and must get the same bits. Overwrites gradients. All ranks
    of the mesh must call it.
    """
    at = plan.mesh.coordinates(rank)
    where = f"stage {index} tp{at.tp} cp{at.cp} ep{at.ep}"
    with stage.replaying(step):
        return {f"{where} {what}": value for what, value in _run(plan, rank, stage, index, step)}


def _run(plan: Plan, rank: int, stage: BaseStage, index: int, step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Runs the first microbatch: its slices in order forward, and in reverse backward."""
    draw, slices = Draw(plan, rank, index, step, stage.device), range(plan.program.slices)
    for number in slices:
        result = run_to_completion(stage.forward(number, draw.inputs(stage)))
        for part in result if isinstance(result, tuple) else [] if result is None else [result]:
            yield f"F{number}", digest(part)
        if stage.last:
            yield f"F{number} loss", digest(stage.loss_sums)
    for number in reversed(slices):
        if stage.recompute_mode != "none":
            stage.recompute(number)
        gradient = run_to_completion(stage.backward_input(number, None if stage.last else draw.activation()))
        if gradient is not None:
            yield f"B{number}", digest(gradient)
        stage.backward_weight(number)
    stage.complete_gradients()
    for kind, buffers in enumerate(stage.param_buffers):
        assert buffers.gradients is not None
        yield f"W of {'experts' if kind else 'weights'}", digest(buffers.gradients.flat)


def new_generator(device: torch.device) -> torch.Generator:
    """Like torch.Generator(device), which on a CPU needs the kernels that `torch_import.defer_meta_kernels` defers."""
    return torch.default_generator.clone_state() if device.type == "cpu" else torch.Generator(device)


class Draw:
    """Random inputs of a stage, slice by slice."""

    def __init__(self, plan: Plan, rank: int, stage: int, step: int, device: torch.device) -> None:
        at = plan.mesh.coordinates(rank)
        self.plan, self.device = plan, device
        purpose = "replay", step, stage, at.cp, at.ep
        self.tokens, self.residual = (
            new_generator(device).manual_seed(derive_seed(plan.seed, *purpose, *tp)) for tp in ((), (at.tp,))
        )

    def inputs(self, stage: BaseStage) -> StageInputs:
        """What F reads; targets only if the stage has a loss."""
        plan = self.plan
        inputs = StageInputs(tokens=self._tokens()) if stage.first else StageInputs(self.activation())
        if stage.last:
            mtp = self._tokens(plan.model.mtp_layers) if plan.model.mtp_layers else None
            inputs = inputs._replace(targets=self._tokens(), mtp_targets=mtp)
        return inputs

    def activation(self) -> torch.Tensor:
        """[T / tp, H] of a rank's residual stream, or of its gradient."""
        shape = self.plan.sequence_parallel_tokens, self.plan.model.hidden
        dtype = DTYPES[self.plan.dtype]
        return torch.randn(shape, dtype=dtype, device=self.device, generator=self.residual)

    def _tokens(self, *rows: int) -> torch.Tensor:
        """[*rows, T], the same on all tp ranks."""
        shape = *rows, self.plan.slice_tokens
        return torch.randint(self.plan.model.vocab, shape, device=self.device, generator=self.tokens)
