"""Imports torch without its meta kernels written in Python, which take a third of the import.

Fake tensors, torch.compile and torch.export call them, as a custom model may; operations on real tensors never do.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

META_KERNELS = "torch._meta_registrations"
_DEFERRED = ModuleType(META_KERNELS)


def defer_meta_kernels() -> None:
    """Makes the import of torch, which follows, leave its meta kernels to `load_meta_kernels`."""
    sys.modules.setdefault(META_KERNELS, _DEFERRED)


def load_meta_kernels() -> None:
    """Registers the meta kernels if they were deferred."""
    if sys.modules.get(META_KERNELS) is _DEFERRED:
        del sys.modules[META_KERNELS]
        import_module(META_KERNELS)
