"""A pytest plugin: what tests would have Triton interpret is compiled instead, to PTX, for a GPU that may be absent.

Nothing runs, so the tests' results mean nothing. At the end the kernels that compiled, and the errors of those that did
not, are written as JSON to the file $COMPILED; $CAPABILITY is the GPU's compute capability, such as 90.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

compiled, failed = set[str](), defaultdict[str, set[str]](set)


class Enough(Exception):
    """PTX has been made. The stage after it, ptxas, takes most of the time."""


def pytest_collection() -> None:
    os.environ["TRITON_INTERPRET"] = "0"  # after tests/conftest.py, which asks for the interpreter
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class Absent:
        """The driver of a GPU that launches nothing."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", int(os.environ["CAPABILITY"]), 32)

    add_stages, run = CUDABackend.add_stages, JITFunction.run

    def with_end(backend: Any, stages: dict[str, Any], *arguments: Any) -> None:
        add_stages(backend, stages, *arguments)
        stages["cubin"] = end

    def end(*_: Any) -> None:
        raise Enough

    def launch(kernel: Any, *arguments: Any, **options: Any) -> None:
        name = f"{kernel.module}.{kernel.__name__}"
        try:
            run(kernel, *arguments, **options | {"warmup": True})
        except Enough:
            compiled.add(name)
        except Exception as error:
            failed[name].add(str(error))

    driver.set_active(Absent())
    CUDABackend.add_stages, JITFunction.run = with_end, launch


def pytest_unconfigure(config: pytest.Config) -> None:
    errors = {name: sorted(each) for name, each in failed.items()}
    Path(os.environ["COMPILED"]).write_text(json.dumps({"compiled": sorted(compiled), "failed": errors}))
