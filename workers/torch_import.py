"""Imports torch without the meta kernels that it has in Python, which take a third of the import.

Fake tensors, torch.compile and torch.export call them, as a custom model may; operations on tensors with data never do.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

META_KERNELS = "torch._meta_registrations"
_DEFERRED = ModuleType(META_KERNELS)


def defer_meta_kernels() -> None:
    """Has torch, which is imported later, leave its meta kernels to `load_meta_kernels`."""
    sys.modules.setdefault(META_KERNELS, _DEFERRED)


def load_meta_kernels() -> None:
    """Registers them, if they were deferred."""
    if sys.modules.get(META_KERNELS) is _DEFERRED:
        del sys.modules[META_KERNELS]
        import_module(META_KERNELS)
