"""All checks of one machine, in the order in which they run and are shown."""

from __future__ import annotations

import os

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.doctor import burn, disk, gpus, host, links, nccl, versions
from pentad.orchestrator.doctor.finding import Check, Subject
from pentad.workers.health.gpu_facts import read_gpus

CHECKS = (
    Check("versions", versions.examine_versions),
    Check("driver", versions.examine_driver, needs_gpus=True),
    Check("GPUs", gpus.examine_gpus),
    Check("GPU memory", lambda subject: gpus.judge_memory(subject.gpus, os.getpid()), needs_gpus=True),
    Check("ECC", lambda subject: gpus.judge_ecc(subject.gpus), needs_gpus=True),
    Check("clocks", lambda subject: gpus.judge_clocks(subject.gpus), needs_gpus=True),
    Check("links", links.examine_links, links.seconds_of_links, needs_gpus=True),
    Check("NCCL", nccl.examine_variables),
    Check("open files", host.examine_files),
    Check("/dev/shm", host.examine_shm),
    Check("memory", host.examine_memory),
    Check("pinned memory", host.examine_pinned),
    Check("disk", disk.examine_disk, lambda _: 2 * disk.SECONDS),
    Check("burn", burn.examine_burn, lambda subject: subject.burn),
)


def subject_of(config: RunConfig, seconds: float | None) -> Subject:
    """This machine as a Subject, with a burn-in of `seconds` (None: the default on GPUs, 0 on CPUs)."""
    found = read_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Subject(config, found, (burn.GPU_SECONDS if found else 0.0) if seconds is None else seconds)
