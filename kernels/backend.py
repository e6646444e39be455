"""What all kernels share: Triton or torch, the dtype of sums, deterministic algorithms."""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils.deterministic as determinism
from torch import Tensor

IGNORE_INDEX = -100  # target of a token without a loss, as in torch.nn.functional.cross_entropy
# A property that torch puts on its module at run time, where no type checker sees it.
FILL = "fill_uninitialized_memory"
P = ParamSpec("P")
R = TypeVar("R")


def ceil_div(a: int, b: int) -> int:
    """Triton's own `cdiv` is made for kernels, and takes longer on the host than the rest of a launch's arithmetic."""
    return -(-a // b)


def shared_memory(device: torch.device) -> int:
    """Bytes of a multiprocessor that a block may have: 227 KiB of an H100, 163 of an A100, 99 of others."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the property
    return int(properties.shared_memory_per_block_optin)


_twins: list[Callable[[], object]] = []  # import the Triton twins of operations


def import_twins() -> None:
    """Imports Triton and the twins of all operations that are imported, which else the first call of each does."""
    for twin in _twins:
        twin()


def triton_on_gpu(reference: Callable[P, R]) -> Callable[P, R]:
    """Decorates an operation in torch, for any dtype and device, that has a Triton twin: the function of the same name
    and arguments in MODULE_triton.py.

    The twin runs if the first argument, or its first field, is a GPU tensor, unless it is float64, which serves
    exactness tests.
    """

    @functools.cache
    def twin() -> Callable[P, R]:
        found: Callable[P, R] = getattr(importlib.import_module(f"{reference.__module__}_triton"), reference.__name__)
        return found

    _twins.append(twin)

    @functools.wraps(reference)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        x = args[0][0] if isinstance(args[0], tuple) else args[0]
        assert isinstance(x, Tensor)
        return (twin() if x.is_cuda and x.dtype != torch.float64 else reference)(*args, **kwargs)

    return operation


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
