"""What all kernels share: Triton or torch, the dtype of sums, deterministic algorithms."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.utils.deterministic as determinism
from torch import Tensor

IGNORE_INDEX = -100  # target of a token without a loss, as in torch.nn.functional.cross_entropy
# A property that torch puts on its module at run time, where no type checker sees it.
FILL = "fill_uninitialized_memory"


def runs_in_triton(x: Tensor) -> bool:
    """True for GPU tensors in a training dtype; float64, which serves exactness tests, takes the torch reference."""
    return x.is_cuda and x.dtype != torch.float64


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def deterministic_algorithms(mode: str = "error") -> Iterator[None]:
    """Asks torch for deterministic algorithms, without filling fresh memory as it otherwise would.

    An operation that has none raises in mode "error", and warns in mode "warn".
    """
    previous, fill = torch.get_deterministic_debug_mode(), getattr(determinism, FILL)
    torch.set_deterministic_debug_mode(mode)
    setattr(determinism, FILL, False)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(previous)
        setattr(determinism, FILL, fill)
