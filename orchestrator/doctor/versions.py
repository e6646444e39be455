"""Versions of what pentad depends on, and of the GPU driver."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from pentad.orchestrator.doctor.finding import Finding, Subject
from pentad.orchestrator.planning.numerics import HOPPER
from pentad.schedules.ir.errors import enumerated
from pentad.workers.health.gpu_facts import Driver, read_driver

# The lowest versions that work, as in pyproject.toml. Triton has no build for some machines, which get no GPU kernels.
WANTED = {"Python": "3.11", "torch": "2.11", "triton": "3.6", "ray": "2.50"}
FRONTEND = "nvidia-cudnn-frontend"  # optional: pentad is slower without it
_INSTALL = "install pentad again with its dependencies: `make`"


def examine_versions(subject: Subject) -> Finding:
    found: dict[str, str | None] = {"Python": platform.python_version()}
    in_order = subject.config.precision.deterministic and any(HOPPER.search(gpu.name) for gpu in subject.gpus)
    for name in (*list(WANTED)[1:], *[FRONTEND] * in_order):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return judge_versions(found, has_gpus=bool(subject.gpus))


def examine_driver(_: Subject) -> Finding:
    import torch  # imported only on machines with GPUs

    return judge_driver(read_driver(), torch.version.cuda)


def judge_versions(found: Mapping[str, str | None], *, has_gpus: bool) -> Finding:
    """Judges versions by package (None: not installed). FRONTEND is in `found` only if attention would use it."""
    figures = {"versions": dict(found)}
    text = ", ".join(f"{name} {number or 'missing'}" for name, number in found.items())
    needed = {name: least for name, least in WANTED.items() if name != "triton" or has_gpus or found[name]}
    wrong = [f"{name} {least}" for name, least in needed.items() if _numbers(found[name] or "") < _numbers(least)]
    if wrong:
        return Finding("failure", f"{text}: expected at least {enumerated(wrong)}", _INSTALL, figures)
    if found.get(FRONTEND, "") is None:
        slower = "attention's backward is deterministic (precision.deterministic), and faster with it"
        return Finding("warning", f"{text}: {slower}", "pip install 'pentad[cudnn]' on all nodes", figures)
    return Finding("ok", text, figures=figures)


def judge_driver(driver: Driver | None, cuda: str | None) -> Finding:
    """Judges the driver for a torch built for `cuda` (None: for CPUs). A driver supports every minor version of its
    major CUDA version."""
    if driver is None:
        return Finding("failure", "it does not answer", "install it again, or reboot")
    text = f"{driver.version} for CUDA {driver.cuda[0]}.{driver.cuda[1]}"
    if cuda is None:
        remedy = "install a torch that is built for CUDA"
        return Finding("failure", f"{text}, but torch is built without CUDA, so no GPU is used", remedy)
    if driver.cuda[0] < int(cuda.partition(".")[0]):
        remedy = f"update the driver to one for CUDA {cuda}, or install a torch for CUDA {driver.cuda[0]}"
        return Finding("failure", f"{text}, but torch is built for CUDA {cuda}", remedy)
    return Finding("ok", f"{text}; torch is built for CUDA {cuda}")


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers of a version: '2.11.0+cu130' gives (2, 11, 0)."""
    matched = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, matched[0].split("."))) if matched else ()
