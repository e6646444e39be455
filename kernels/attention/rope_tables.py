"""Tables of rotary angles, position * theta^(-2 i / width) for pair i, scaled as in Llama 3.1 or YaRN, all pairs alike,
or not at all.

Scaling lengthens wavelengths, so that a model reads longer texts than it was first trained on.
"""

import math
from typing import Protocol

import torch
from torch import Tensor


class RopeScalingLike(Protocol):
    """The fields of `RopeScaling` in schedules/spec/model.py, which explains them."""

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
    @property
    def truncate(self) -> bool: ...


def rope_tables(
    length: int,
    width: int,
    theta: float,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    scaling: RopeScalingLike | None = None,
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [length, width / 2], for the rotated part of a head, of this width.

    Angles are computed in float64: in float32 one of 100,000 radians is off by 0.004.
    """
    frequencies = inverse_frequencies(width, theta, scaling, device)
    angle = torch.outer(torch.arange(length, dtype=torch.float64, device=device), frequencies)
    factor = 1.0 if scaling is None else scaling.attention_factor
    return (factor * angle.cos()).to(dtype), (factor * angle.sin()).to(dtype)


def inverse_frequencies(
    width: int, theta: float, scaling: RopeScalingLike | None, device: torch.device | str
) -> Tensor:
    """Radians by which one position rotates each pair, [width / 2], float64."""
    pair = torch.arange(width // 2, dtype=torch.float64, device=device)
    plain = theta ** (-2.0 * pair / width)
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    is_llama = scaling.rope_type == "llama3"
    unscaled = _unscaled_llama3(plain, scaling) if is_llama else _unscaled_yarn(width, theta, scaling, pair)
    return unscaled * plain + (1 - unscaled) * plain / scaling.factor


def _unscaled_llama3(plain: Tensor, scaling: RopeScalingLike) -> Tensor:
    """The fraction of each frequency that is not scaled: 1 above `high_freq_factor` rotations in the original length, 0
    below `low_freq_factor`, linear in between."""
    rotations = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    return ((rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)


def _unscaled_yarn(width: int, theta: float, scaling: RopeScalingLike, pair: Tensor) -> Tensor:
    """The same, but linear in the index of the pair, between two ends (arXiv 2309.00071, section 3.2)."""

    def pair_with(rotations: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(theta))

    first, last = pair_with(scaling.high_freq_factor), pair_with(scaling.low_freq_factor)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return 1 - ((pair - first) / max(last - first, 0.001)).clamp(0, 1)
