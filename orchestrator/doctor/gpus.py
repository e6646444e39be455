"""What the driver reports about a machine's GPUs: number, memory, errors, clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pentad.orchestrator.doctor.finding import Finding, Subject, gpus_named
from pentad.orchestrator.planning.formatting import counted, format_bytes
from pentad.schedules.ir.errors import enumerated
from pentad.workers.health.gpu_facts import GpuFacts

TAKEN = 2**30  # bytes; a driver alone uses less


def examine_gpus(subject: Subject) -> Finding:
    section = subject.config.cluster
    expected = subject.config.mesh.size if section.address == "local" and section.device == "cuda" else 0
    return judge_gpus([gpu.name for gpu in subject.gpus], expected)


def judge_gpus(names: Sequence[str], expected: int) -> Finding:
    """Judges GPUs with these names, for `expected` local ranks with a GPU each."""
    if expected > len(names):
        text = f"mesh has {expected} ranks with a GPU each, but this process may use {len(names)}"
        return Finding("failure", text, "choose a smaller mesh, or cluster.address, a Ray cluster with enough GPUs")
    if not names:
        return Finding("not applicable", "no GPU")
    counts = Counter(names)
    text = enumerated([f"{number} x {name}" for name, number in counts.items()])
    if len(counts) > 1:
        return Finding("warning", f"{text}: the slowest sets the pace of a step", "run on GPUs of one kind")
    return Finding("ok", text)


def judge_memory(gpus: Sequence[GpuFacts], own: int) -> Finding:
    """Judges the memory that other processes use; `own` is the PID of this process. A container may not see the host's
    PIDs, so the amount of memory counts too."""
    texts = []
    for gpu in gpus:
        pids = [pid for pid, _ in gpu.processes if pid != own]
        if pids or (gpu.memory_used or 0) > TAKEN:
            who = f" by process{'es' * (len(pids) > 1)} {enumerated(pids)}" if pids else ""
            used = "" if gpu.memory_used is None else f": {format_bytes(gpu.memory_used)}"
            texts.append(f"GPU {gpu.number} is used{who}{used}")
    if texts:
        return Finding("warning", "; ".join(texts), "end what runs there, or leave those GPUs to it")
    free = [gpu.memory_total - (gpu.memory_used or 0) for gpu in gpus if gpu.memory_total is not None]
    if not free:
        return Finding("not applicable", "not reported")
    return Finding("ok", f"{format_bytes(min(free))} free on each, no other process")


def judge_ecc(gpus: Sequence[GpuFacts]) -> Finding:
    failed = [gpu.number for gpu in gpus if gpu.remapping == "failed"]
    if failed:
        text = f"{gpus_named(failed)}: damaged memory could not be replaced by spare rows"
        return Finding("failure", text, "replace the GPU")
    broken = [gpu for gpu in gpus if gpu.ecc_errors or gpu.remapping]
    if broken:
        text = "; ".join(f"GPU {gpu.number}: {_ecc_text(gpu)}" for gpu in broken)
        return Finding("failure", text, "drain the node and reset the GPU (`nvidia-smi -r`); replace it if they return")
    if all(gpu.ecc_errors is None for gpu in gpus):
        return Finding("not applicable", "ECC is off or not supported")
    return Finding("ok", "no uncorrectable error since the driver was loaded")


def _ecc_text(gpu: GpuFacts) -> str:
    number = gpu.ecc_errors or 0
    errors = [counted(number, "uncorrectable error")] if number else []
    return enumerated([*errors, *(["a row to remap at the next reset"] if gpu.remapping else [])])


def judge_clocks(gpus: Sequence[GpuFacts]) -> Finding:
    """Judges the clocks of idle GPUs; a stuck clock shows only in the burn-in."""
    for cause, remedy in (
        ("hardware", "look at power cables and supplies, and for XIDs in `dmesg`"),
        ("thermal", "look at fans, cooling and the temperature of the air"),
    ):
        slowed = [gpu.number for gpu in gpus if cause in gpu.throttles]
        if slowed:
            verb = "is" if len(slowed) == 1 else "are"
            return Finding("failure", f"{gpus_named(slowed)} {verb} throttled ({cause})", remedy)
    most = Counter(gpu.clock_most for gpu in gpus)
    if len(most) > 1 and len({gpu.name for gpu in gpus}) == 1:
        usual = most.most_common(1)[0][0]
        odd = [gpu.number for gpu in gpus if gpu.clock_most != usual]
        text = f"{gpus_named(odd)} may not clock as high as the others"
        return Finding("warning", text, "`nvidia-smi -rgc -rac` removes limits of clocks")
    off = [gpu.number for gpu in gpus if gpu.is_persistent is False]
    if off:
        text = f"persistence mode is off on {gpus_named(off)}, so each start of a process waits for the driver"
        return Finding("warning", text, "`nvidia-smi -pm 1`, or run nvidia-persistenced")
    highest = gpus[0].clock_most
    return Finding("ok", "not throttled" + (f", at most {highest / 1e6:,.0f} MHz" if highest else ""))
