"""What all kernels share: which implementation runs, the dtype of sums, deterministic algorithms."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple, ParamSpec, TypeVar, get_type_hints

import torch
import torch.utils.deterministic as determinism
from torch import Tensor

IGNORE_INDEX = -100  # target of a token without a loss, as in torch.nn.functional.cross_entropy
# A property that torch puts on its module at run time, where no type checker sees it.
FILL = "fill_uninitialized_memory"
# For launches of kernels whose bits must not depend on where an element is, or on what else is written: in each branch
# and each variant of a kernel, the compiler chooses anew which products and sums to fuse.
NO_FMA: dict[str, Any] = {"enable_fp_fusion": False}
P = ParamSpec("P")
R = TypeVar("R")

# Tensors that an operation accepts although only their last dimension is contiguous, or none.
DenseRows = Annotated[Tensor, "stride(-1) is 1"]
Strided = Annotated[Tensor, "any strides"]
Layout = tuple[str, Callable[[Tensor], bool]]
CONTIGUOUS: Layout = "contiguous", Tensor.is_contiguous
LAYOUTS: dict[Any, Layout] = {  # by the type hint of a parameter
    Tensor: CONTIGUOUS,
    Tensor | None: CONTIGUOUS,
    DenseRows: ("a contiguous last dimension", lambda x: x.stride(-1) == 1),
}


def ceil_div(a: int, b: int) -> int:
    """Triton's own `cdiv` is made for kernels, and takes longer on the host than the rest of a launch's arithmetic."""
    return -(-a // b)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may have: 227 KiB on an H100, 163 on an A100, 99 on others."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the property
    return int(properties.shared_memory_per_block_optin)


KernelKey = tuple[str | int, ...]  # an operation, and the sizes that decide which implementation is fastest


class KernelsInUse(NamedTuple):
    """Which implementations run. With 'auto', the one `measured` as fastest, or else the one that usually is; with
    'triton' or 'cudnn', that one wherever it serves a call; with 'torch', the references of all operations here, on
    GPUs too. `cudnn_frontend`: whether cuDNN's deterministic backward of attention may be used."""

    name: str = "auto"
    measured: Mapping[KernelKey, str] = {}
    cudnn_frontend: bool = False


_in_use = KernelsInUse()


def use_kernels(kernels: KernelsInUse) -> KernelsInUse:
    """Sets the kernels of all calls in this process from now on; returns those in use before."""
    global _in_use
    before, _in_use = _in_use, kernels
    return before


def usual_kernels(device: torch.device) -> KernelsInUse:
    """The kernels that this process usually uses on a device, given what is installed."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return KernelsInUse(cudnn_frontend=is_hopper and is_frontend_installed())


def kernels_name() -> str:
    """The name of the kernels in use."""
    return _in_use.name


def is_frontend_installed() -> bool:
    return importlib.util.find_spec("cudnn") is not None


def has_cudnn_frontend() -> bool:
    """`cudnn_frontend` of the kernels in use."""
    return _in_use.cudnn_frontend


def choose_kernel(serving: Sequence[str], key: KernelKey = ()) -> str:
    """The implementation to run, of those that serve a call; the first one is usually the fastest."""
    name, measured, _ = _in_use
    found = measured.get(key, "") if name == "auto" else name
    return found if found in serving else serving[0]


_twins: list[Callable[[], object]] = []  # functions that import the Triton twins of operations


def import_twins() -> None:
    """Imports Triton and the twins of all imported operations, which otherwise the first call of each does."""
    for twin in _twins:
        twin()


def triton_on_gpu(reference: Callable[P, R]) -> Callable[P, R]:
    """Decorates an operation in torch, for any dtype and device, that has a Triton twin: the function of the same name
    and arguments in MODULE_triton.py.

    The twin runs if the first argument, or its first field, is a GPU tensor, unless it is float64 (for exactness tests)
    or the references are in use. Kernels read memory by shapes alone: a tensor that is not contiguous raises ValueError
    on any device, unless its parameter is annotated `DenseRows` or `Strided`.
    """

    @functools.cache
    def twin() -> Callable[P, R]:
        found: Callable[P, R] = getattr(importlib.import_module(f"{reference.__module__}_triton"), reference.__name__)
        return found

    _twins.append(twin)
    hints = enumerate(get_type_hints(reference, include_extras=True).items())
    required = [(place, name, *LAYOUTS[hint]) for place, (name, hint) in hints if hint in LAYOUTS and name != "return"]

    @functools.wraps(reference)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        for place, name, layout, has_layout in required:
            each: Any = args[place] if place < len(args) else kwargs.get(name)
            if each is not None and not has_layout(each):
                found = f"{name} of {reference.__name__} has shape {tuple(each.shape)} and strides {each.stride()}"
                raise ValueError(f"{found}: expected {layout}")
        x = args[0][0] if isinstance(args[0], tuple) else args[0]
        assert isinstance(x, Tensor)
        has_twin = x.is_cuda and x.dtype != torch.float64 and kernels_name() != "torch"
        return (twin() if has_twin else reference)(*args, **kwargs)

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
