"""Which code and which width of arithmetic a tensor gets; shared by every kernel of this folder."""

import torch
from torch import Tensor

IGNORE_INDEX = -100  # target of a token without a loss or a gradient, as in torch.nn.functional.cross_entropy


def runs_in_triton(x: Tensor) -> bool:
    """True for a tensor on a GPU in a dtype that is trained in; float64 serves proofs and takes the torch reference."""
    return x.is_cuda and x.dtype != torch.float64


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over `dtype` are kept: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
