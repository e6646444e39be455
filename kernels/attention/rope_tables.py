"""Tables of rotary angles, position * theta^(-2 i / width) for pair i, and their scaling: wavelengths made longer, as
Llama 3.1 and YaRN do it, so that a model reads longer texts than it was first trained with."""

import math
from typing import Protocol

import torch
from torch import Tensor


class RopeScalingLike(Protocol):
    """What a scaling says; `RopeScaling` of schedules/spec/model.py explains the fields."""

    @property
    def rope_type(self) -> str: ...
    @property
    def factor(self) -> float: ...
    @property
    def original_max_position_embeddings(self) -> int: ...
    @property
    def low_freq_factor(self) -> float: ...
    @property
    def high_freq_factor(self) -> float: ...
    @property
    def attention_factor(self) -> float: ...


def rope_tables(
    length: int,
    width: int,
    theta: float,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    scaling: RopeScalingLike | None = None,
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [length, width / 2], of what is rotated: a head, or its rotary part.

    The angles are formed in float64: in float32 an angle of 100,000 radians is off by 0.004.
    """
    frequency = inverse_frequencies(width, theta, scaling, device)
    angle = torch.outer(torch.arange(length, dtype=torch.float64, device=device), frequency)
    by = 1.0 if scaling is None else scaling.attention_factor
    return (by * angle.cos()).to(dtype), (by * angle.sin()).to(dtype)


def inverse_frequencies(
    width: int, theta: float, scaling: RopeScalingLike | None, device: torch.device | str
) -> Tensor:
    """Radians a position turns each pair by, [width / 2], float64."""
    pair = torch.arange(width // 2, dtype=torch.float64, device=device)
    plain = theta ** (-2.0 * pair / width)
    if scaling is None:
        return plain
    kept = (
        _kept_by_llama3(plain, scaling) if scaling.rope_type == "llama3" else _kept_by_yarn(width, theta, scaling, pair)
    )
    return kept * plain + (1 - kept) * plain / scaling.factor


def _kept_by_llama3(plain: Tensor, scaling: RopeScalingLike) -> Tensor:
    """How much of each frequency stays: all of those with more than `high` turns in the original length, none of those
    with fewer than `low`, and a share that is linear in the turns between."""
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    return ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)


def _kept_by_yarn(width: int, theta: float, scaling: RopeScalingLike, pair: Tensor) -> Tensor:
    """The same with a share that is linear in the pair's number, whose ends are whole (arXiv 2309.00071, 3.2)."""

    def pair_with(turns: float) -> float:
        return (
            width * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
        )

    first = max(math.floor(pair_with(scaling.high_freq_factor)), 0)
    last = min(math.ceil(pair_with(scaling.low_freq_factor)), width - 1)
    return 1 - ((pair - first) / max(last - first, 0.001)).clamp(0, 1)
