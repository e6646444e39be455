"""Tables of findings and the verdicts on them."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from pentad.orchestrator.config.config import load
from pentad.orchestrator.doctor import links as doctor_links
from pentad.orchestrator.doctor.burn import judge_burn, norms
from pentad.orchestrator.doctor.disk import Speed, judge_disk
from pentad.orchestrator.doctor.finding import Finding, Subject, worst
from pentad.orchestrator.doctor.gpus import judge_clocks, judge_ecc, judge_gpus, judge_memory
from pentad.orchestrator.doctor.host import judge_files, judge_pinned, judge_shm
from pentad.orchestrator.doctor.host import judge_memory as judge_host_memory
from pentad.orchestrator.doctor.links import examine_links, judge_links, seconds_of_links, usual_bandwidth
from pentad.orchestrator.doctor.nccl import judge_variables
from pentad.orchestrator.doctor.probe import ProbeError
from pentad.orchestrator.doctor.versions import FRONTEND, WANTED, judge_driver, judge_versions
from pentad.orchestrator.planning import fit
from pentad.workers.health.gpu_facts import Driver, GpuFacts
from pentad.workers.health.results import Burned, Link

GIB, H200 = 2**30, "NVIDIA H200"
GPU = GpuFacts(0, "GPU-0", H200, 140 * GIB, GIB // 2, (), 0, "", (), 345e6, 1980e6, True)
BURNED = Burned("GPU 0", H200, "a", 100, 0, 0.1, 660e12, 1500e6, 1980e6)
CORE = BURNED._replace(unit="CPU 0", model="", clock=None, clock_most=None)
LINK = Link(0, 1, 380e9, 6e-6, True)


def gpus(**second: Any) -> list[GpuFacts]:
    return [GPU, GPU._replace(number=1, **second)]


def burned(count: int = 4, **last: Any) -> list[Burned]:
    units = [BURNED._replace(unit=f"GPU {gpu}") for gpu in range(count)]
    return [*units[:-1], units[-1]._replace(**last)]


def links(**last: Any) -> list[Link]:
    found = [LINK._replace(source=a, target=b) for a in range(3) for b in range(3) if a != b]
    return [*found[:-1], found[-1]._replace(**last)]


def burn_of(units: list[Burned], seconds: float) -> Finding:
    return judge_burn(units, seconds, norms(units))


def links_of(found: list[Link]) -> Finding:
    return judge_links(found, usual_bandwidth(found))


FOUND = dict(WANTED)
DRIVER = Driver("580.82", (13, 0))
CASES = {
    "versions": (judge_versions(FOUND, has_gpus=True), "ok", "torch 2.11"),
    "old torch": (judge_versions({**FOUND, "torch": "2.9.1+cu128"}, has_gpus=True), "failure", "at least torch 2.11"),
    "no triton": (judge_versions({**FOUND, "triton": None}, has_gpus=True), "failure", "at least triton 3.6"),
    "no triton on CPUs": (judge_versions({**FOUND, "triton": None}, has_gpus=False), "ok", "triton missing"),
    "a frontend": (judge_versions({**FOUND, FRONTEND: "1.32.0"}, has_gpus=True), "ok", "nvidia-cudnn-frontend 1.32"),
    "no frontend": (judge_versions({**FOUND, FRONTEND: None}, has_gpus=True), "warning", "faster with it"),
    "driver": (judge_driver(DRIVER, "13.2"), "ok", "580.82 for CUDA 13.0"),
    "old driver": (judge_driver(Driver("570.1", (12, 8)), "13.0"), "failure", "built for CUDA 13.0"),
    "torch for CPUs": (judge_driver(DRIVER, None), "failure", "built without CUDA"),
    "no driver": (judge_driver(None, None), "failure", "does not answer"),
    "GPUs": (judge_gpus([H200, H200], 2), "ok", "2 x NVIDIA H200"),
    "two kinds": (judge_gpus([H200, "NVIDIA L4"], 0), "warning", "1 x NVIDIA H200 and 1 x NVIDIA L4"),
    "too few": (judge_gpus([H200], 4), "failure", "4 ranks with a GPU each, but this process may use 1"),
    "wanted, but none": (judge_gpus([], 1), "failure", "this process may use 0"),
    "none": (judge_gpus([], 0), "not applicable", "no GPU"),
    "free": (judge_memory(gpus(processes=((9, 0),)), 9), "ok", "139.5 GiB free"),
    "used": (judge_memory(gpus(processes=((7, 0), (8, 0))), 9), "warning", "GPU 1 is used by processes 7 and 8"),
    "used unseen": (judge_memory(gpus(memory_used=40 * GIB), 9), "warning", "GPU 1 is used: 40.0 GiB"),
    "ECC": (judge_ecc(gpus()), "ok", "no uncorrectable error"),
    "ECC errors": (judge_ecc(gpus(ecc_errors=2)), "failure", "GPU 1: 2 uncorrectable errors"),
    "rows to remap": (judge_ecc(gpus(remapping="pending")), "failure", "GPU 1: a row to remap"),
    "no spare rows": (judge_ecc(gpus(remapping="failed")), "failure", "GPU 1: damaged memory"),
    "no ECC": (judge_ecc([GPU._replace(ecc_errors=None)]), "not applicable", "ECC is off"),
    "clocks": (judge_clocks(gpus()), "ok", "at most 1,980 MHz"),
    "hot": (judge_clocks(gpus(throttles=("thermal",))), "failure", "GPU 1 is throttled (thermal)"),
    "power brake": (judge_clocks(gpus(throttles=("hardware", "thermal"))), "failure", "(hardware)"),
    "limited": (judge_clocks([*gpus(), GPU._replace(number=2, clock_most=1e9)]), "warning", "GPU 2 may not clock"),
    "persistence": (judge_clocks(gpus(is_persistent=False)), "warning", "off on GPU 1"),
    "links": (links_of(links()), "ok", "380 GB/s by the copy engine, 6 us a small copy"),
    "slow link": (links_of(links(bandwidth=300e9)), "warning", "slow from GPU 2 to 1 (300 GB/s)"),
    "broken link": (links_of(links(bandwidth=20e9)), "failure", "380 GB/s is usual"),
    "no peers": (links_of([LINK._replace(has_peer_access=False)]), "warning", "no peer access on 1 of 1"),
    "burn": (burn_of(burned(), 30), "ok", "4 GPUs, 30 s: 400 equal products, 660 TFLOP/s each"),
    "7 % slower": (burn_of(burned(rate=614e12), 30), "ok", "614 to 660 TFLOP/s each"),
    "8 % slower": (burn_of(burned(rate=607e12), 30), "failure", "GPU 3 is 8% slower than its peers at 1,500 MHz"),
    "hot under load": (burn_of(burned(2, rate=4e14, throttles=("thermal",)), 30), "failure", "throttled (thermal)"),
    "stuck clock": (burn_of(burned(1, clock=345e6), 30), "failure", "GPU 0 is stuck at 345 MHz of 1,980"),
    "slow and alone": (burn_of(burned(1, rate=100e12), 30), "failure", "attains 10% of its data sheet's rate"),
    "other bits": (burn_of(burned(digest="b"), 30), "failure", "GPU 3 computes wrong results: other bits than 3 of 4"),
    "two that differ": (
        burn_of(burned(2, digest="b"), 30),
        "failure",
        "GPU 0 or one of its peers computes wrong results",
    ),
    "other models": (burn_of(burned(2, digest="b", model="NVIDIA L4", rate=6e13), 30), "ok", "2 GPUs"),
    "wrong now and then": (burn_of(burned(differing=3), 30), "failure", "GPU 3 computes wrong results: 3 of 100"),
    "always wrong": (burn_of(burned(1, error=40.0), 30), "failure", "GPU 0 computes wrong results: 40 times"),
    "slow core": (burn_of([CORE, CORE._replace(unit="CPU 1", rate=1e9)], 1), "ok", "2 CPUs, 1 s"),
    "wrong and another": (
        burn_of(burned(2, digest="b", differing=9), 30),
        "failure",
        "GPU 1 computes wrong results: 9 of 100",
    ),
    "variables": (
        judge_variables({"NCCL_SOCKET_IFNAME": "eth,lo"}, ["lo", "eth0"]),
        "ok",
        "NCCL_SOCKET_IFNAME=eth,lo",
    ),
    "no interface": (judge_variables({"NCCL_SOCKET_IFNAME": "ib"}, ["lo", "eth0"]), "failure", "none of lo, eth0"),
    "exact": (judge_variables({"NCCL_SOCKET_IFNAME": "=eth"}, ["eth0"]), "failure", "NCCL_SOCKET_IFNAME is '=eth'"),
    "all others": (judge_variables({"NCCL_SOCKET_IFNAME": "^lo"}, ["lo", "eth0"]), "ok", ""),
    "none left": (judge_variables({"NCCL_SOCKET_IFNAME": "^eth,lo"}, ["lo", "eth0"]), "failure", "selects none"),
    "Gloo's is exact": (judge_variables({"GLOO_SOCKET_IFNAME": "eth"}, ["eth0"]), "failure", "GLOO_SOCKET_IFNAME"),
    "no P2P": (judge_variables({"NCCL_P2P_DISABLE": "1"}, []), "warning", "NCCL_P2P_DISABLE=1: copies between GPUs"),
    "P2P": (judge_variables({"NCCL_P2P_DISABLE": "0"}, []), "ok", ""),
    "algorithm": (judge_variables({"NCCL_ALGO": "Ring"}, []), "warning", "NCCL_ALGO=Ring"),
    "files": (judge_files(20000, 20000), "ok", "at most 20,000"),
    "soft limit": (judge_files(1024, 2**20), "warning", "at most 1,024"),
    "few files": (judge_files(256, 4096), "failure", "at most 256"),
    "no limit": (judge_files(-1, -1), "ok", "no limit"),
    "shm": (judge_shm(8 * GIB, 8 * GIB, 8), "ok", "8.0 GiB free"),
    "Docker's shm": (judge_shm(2**26, 2**26, 2), "failure", "Ray and NCCL need 384.0 MiB"),
    "Docker's shm on CPUs": (judge_shm(2**26, 2**26, 0), "warning", "Ray and NCCL need 256.0 MiB"),
    "memory": (judge_host_memory(64 * GIB, 60 * GIB, None, 0), "ok", "60.0 GiB free of 64.0 GiB"),
    "container": (
        judge_host_memory(64 * GIB, 60 * GIB, 8 * GIB, 15 * GIB // 2),
        "failure",
        "of 8.0 GiB, the container's",
    ),
    "little": (judge_host_memory(64 * GIB, 4 * GIB, 2**62, 0), "warning", "4.0 GiB free of 64.0 GiB"),
    "pinned": (judge_pinned(2**23, has_rdma=False), "ok", "for InfiniBand only"),
    "pinned RDMA": (judge_pinned(2**23, has_rdma=True), "failure", "too little for NCCL over InfiniBand"),
    "disk": (judge_disk(Speed(2e9, 3e9, 1e-3, 100 * GIB)), "ok", "write 2 GB/s, read 3 GB/s, fsync 1 ms"),
    "in memory": (judge_disk(Speed(2e9, None, 1e-5, 100 * GIB)), "ok", "write 2 GB/s, fsync 10 us"),
    "slow disk": (judge_disk(Speed(2e9, 4e7, 1e-3, 100 * GIB)), "warning", "read 40 MB/s"),
    "slow fsync": (judge_disk(Speed(2e9, 3e9, 0.2, 100 * GIB)), "warning", "fsync 200 ms"),
    "full disk": (judge_disk(Speed(2e9, 3e9, 1e-3, GIB)), "warning", "1.0 GiB free"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_finding_has_its_verdict_and_names_its_cause(case: str) -> None:
    finding, verdict, text = CASES[case]
    assert finding.verdict == verdict and text in finding.text
    assert bool(finding.remedy) == (verdict in ("warning", "failure"))
    assert not finding.text.endswith(".")


def test_a_cache_does_not_count_as_used_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "CGROUP", tmp_path)
    assert fit.container_bytes() is None
    (tmp_path / "memory.max").write_text("8000\n")
    (tmp_path / "memory.current").write_text("7900\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 7000\n")
    assert fit.container_bytes() == (8000, 900)
    (tmp_path / "memory.max").write_text("max\n")
    assert fit.container_bytes() is None


def test_the_verdict_of_all_is_the_worst() -> None:
    assert worst(["ok", "warning", "failure"]) == "failure"
    assert worst(["not applicable", "ok"]) == "ok"
    assert worst([]) == "not applicable"


def test_the_versions_wanted_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = " ".join([*project["dependencies"], *project["optional-dependencies"]["test"]]).replace("[default]", "")
    assert project["requires-python"] == f">={WANTED['Python']}"
    assert all(f"{name}>={WANTED[name]}" in text for name in ("torch", "ray", "triton"))


def test_links_are_judged_by_what_their_probe_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single GPU has no links; a failed probe is itself the finding."""
    config = load(None, ["cluster.device=cpu"])
    assert examine_links(Subject(config, (GPU,), 0)).verdict == "not applicable"
    subject, asked = Subject(config, tuple(gpus()), 0), list[float]()

    def measured(name: str, *, seconds: float) -> list[dict[str, Any]]:
        asked.append(seconds)
        return [link._asdict() for link in links(bandwidth=100e9)]

    monkeypatch.setattr(doctor_links, "probe", measured)
    assert examine_links(subject) == links_of(links(bandwidth=100e9)) and asked == [20 * seconds_of_links(subject)]

    def failing(name: str, *, seconds: float) -> list[dict[str, Any]]:
        raise ProbeError("CUDA error: device-side assert")

    monkeypatch.setattr(doctor_links, "probe", failing)
    found = examine_links(subject)
    assert found.verdict == "failure" and found.text == "copies between GPUs failed: CUDA error: device-side assert"
