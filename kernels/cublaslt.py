"""An 8-bit product that is added to a matrix, which cuBLASLt has but torch does not offer.

The library is the one that torch has loaded. Names and values are those of cublasLt.h. Its matrices are stored by
columns, so it is asked for the transpose, out^T += b a^T.
"""

from __future__ import annotations

import functools
from ctypes import CDLL, Structure, byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

COMPUTE_32F = 68
TYPES = {torch.float32: 0, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
TRANSA = 3
SCALE_POINTERS = 17, 18  # of the first operand and the second
SCALE_MODES = 31, 32
SCALE_MODE = {ScalingType.TensorWise: 0, ScalingType.RowWise: 3, ScalingType.BlockWise1x128: 4}
MAX_WORKSPACE_BYTES = 1
MIN_ALIGNMENTS = 5, 6, 7, 8
ALIGNMENT = 16  # bytes, of all addresses
NOT_SUPPORTED = 15


class Scaled(NamedTuple):
    """A matrix of 8 bits with its scales."""

    values: Tensor
    scales: Tensor
    scaling: ScalingType


class Algorithm(Structure):
    _fields_ = [("data", c_uint64 * 8)]


class Proposal(Structure):
    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class Product(NamedTuple):
    """out [m, n] += a [m, k] times the transpose of b [n, k]."""

    device: int
    shape: tuple[int, int, int]  # m, n, k
    dtypes: tuple[torch.dtype, torch.dtype]  # of a and b
    scaling: tuple[ScalingType, ScalingType]


class Prepared(NamedTuple):
    """What `cublasLtMatmul` takes besides addresses."""

    operation: c_void_p
    layouts: tuple[c_void_p, c_void_p, c_void_p]  # of b, a and out
    algorithm: Algorithm


ONE = c_float(1.0)


def add_product_(out: Tensor, a: Scaled, b: Scaled) -> bool:
    """out [M, N] += a [M, K] times the transpose of b [N, K], in float32. Does nothing and returns False if cuBLAS has
    no such product that needs no workspace.

    Raises RuntimeError if cuBLAS fails.
    """
    (at_a, at_b), at_out, device = (each.values.data_ptr() for each in (a, b)), out.data_ptr(), out.get_device()
    if (at_a | at_b | at_out) % ALIGNMENT:
        return False
    shape, dtypes = (*out.shape, a.values.shape[1]), (a.values.dtype, b.values.dtype)
    found = _prepared(Product(device, shape, dtypes, (a.scaling, b.scaling)))
    if found is None:
        return False
    library, (of_b, of_a, of_out) = _library(), found.layouts
    for attribute, each in zip(SCALE_POINTERS, (b, a), strict=True):
        _set(library.cublasLtMatmulDescSetAttribute, found.operation, attribute, c_void_p(each.scales.data_ptr()))
    operands = byref(ONE), at_b, of_b, at_a, of_a, byref(ONE), at_out, of_out, at_out, of_out
    stream = torch._C._cuda_getCurrentRawStream(device)
    _check(library.cublasLtMatmul(_handle(device), found.operation, *operands, byref(found.algorithm), None, 0, stream))
    return True


@functools.cache
def _prepared(product: Product) -> Prepared | None:
    """None if cuBLAS has no algorithm."""
    library, operation = _library(), c_void_p()
    _check(library.cublasLtMatmulDescCreate(byref(operation), COMPUTE_32F, TYPES[torch.float32]))
    describe = library.cublasLtMatmulDescSetAttribute
    _set(describe, operation, TRANSA, c_int(1))
    for pointer, mode, scaling in zip(SCALE_POINTERS, SCALE_MODES, reversed(product.scaling), strict=True):
        _set(describe, operation, mode, c_int(SCALE_MODE[scaling]))
        _set(describe, operation, pointer, c_void_p(ALIGNMENT))  # an algorithm is chosen without reading it
    m, n, k = product.shape
    of_a, of_b = product.dtypes
    layouts = _layout(of_b, k, n), _layout(of_a, k, m), _layout(torch.float32, n, m)
    algorithm = _algorithm(product.device, operation, layouts)
    return None if algorithm is None else Prepared(operation, layouts, algorithm)


def _algorithm(device: int, operation: c_void_p, layouts: tuple[c_void_p, c_void_p, c_void_p]) -> Algorithm | None:
    """The algorithm that cuBLAS proposes, if any."""
    library, preference, proposal, count = _library(), c_void_p(), Proposal(), c_int()
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    _set(library.cublasLtMatmulPreferenceSetAttribute, preference, MAX_WORKSPACE_BYTES, c_size_t(0))
    for attribute in MIN_ALIGNMENTS:
        _set(library.cublasLtMatmulPreferenceSetAttribute, preference, attribute, c_uint32(ALIGNMENT))
    given = _handle(device), operation, *layouts, layouts[2], preference
    status = library.cublasLtMatmulAlgoGetHeuristic(*given, 1, byref(proposal), byref(count))
    _check(library.cublasLtMatmulPreferenceDestroy(preference))
    if status == NOT_SUPPORTED:
        return None
    _check(status)
    return proposal.algorithm if count.value else None


def _layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    layout = c_void_p()
    sizes = c_uint64(rows), c_uint64(columns), c_int64(rows)
    _check(_library().cublasLtMatrixLayoutCreate(byref(layout), TYPES[dtype], *sizes))
    return layout


def _set(setter: Any, target: c_void_p, attribute: int, value: Any) -> None:
    _check(setter(target, attribute, byref(value), c_size_t(sizeof(value))))


@functools.cache
def _library() -> CDLL:
    version = torch.version.cuda
    assert version is not None
    library = CDLL(f"libcublasLt.so.{version.split('.')[0]}")
    library.cublasLtMatmul.argtypes = [*14 * [c_void_p], c_size_t, c_void_p]
    return library


@functools.cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(byref(handle)))
    return handle


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status} of cublasStatus_t")
