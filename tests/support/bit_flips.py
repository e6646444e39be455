"""Flips a bit in a rank: in its state, or in what it computes."""

from __future__ import annotations

from typing import Any

import torch

from pentad.kernels.optimizer.param_remainders import SplitFloat32


def flip(runner: Any, where: str, element: int = 3) -> None:
    """Flips a bit once in 'master', 'm', 'v' or 'compute', in a norm or, with 'matrix ' in front, in a matrix; or from
    now on in every result of 'F', 'B' or 'W' of the rank's first stage ('F once': only in the next one)."""
    parameters = next(iter(runner.state.parameters.values()))
    if hasattr(parameters, name := where.removeprefix("matrix ")):
        if name != where:
            element = next(start for local, start, _ in parameters.spans() if len(local.shape) > 1)
        flip_bit(getattr(parameters, name), element)
        return
    stage, (kind, *once) = next(iter(runner.stages.values())), where.split()
    name = {"F": "forward", "B": "backward_input", "W": "backward_weight"}[kind]
    real, count = getattr(stage, name), 0

    def flipped(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if once and count > 1:
            return real(*arguments)
        return (
            _with_flipped_gradient(stage, real, *arguments) if kind == "W" else _with_flipped_result(real(*arguments))
        )

    setattr(stage, name, flipped)


def flip_bit(tensor: torch.Tensor, element: int, bit: int = 5) -> None:
    if isinstance(tensor, SplitFloat32):
        tensor = tensor.low
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    tensor.view(-1)[element : element + 1].view(integers).bitwise_xor_(1 << bit)


def _with_flipped_result(task: Any) -> Any:
    result = yield from task
    changed = result[0] if isinstance(result, tuple) else result
    if changed is not None:
        flip_bit(changed, 3)
    return result


def _with_flipped_gradient(stage: Any, real: Any, *arguments: Any) -> None:
    real(*arguments)
    flip_bit(stage.param_buffers[0].gradients.flat, 3)
