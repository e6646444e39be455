"""Which tests run, and which share a process. Tests marked gpu run only with CUDA, those marked quiet only if tests run
one after another, and those marked slow or realmodel only on request."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from dataclasses import is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from sharing import SHARED_CLUSTER, file_of, group_of, position

# Triton reads this when it is first imported, by whichever test comes first.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Else gRPC keeps running in a forked process, whose files Python has closed, and may kill it before exec, as when Ray
# starts its nodes (grpc/grpc#43055). No child here needs the support, which is for gRPC without exec.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# Tests do not expect rates to which this machine was once calibrated.
os.environ["PENTAD_CACHE"] = "/nonexistent"

EXAMPLES = {"default": 10, "slow": 100}  # per property test
TESTS, LONGEST_NAME = str(Path(__file__).parent), 40  # characters of a parameter's name
SLOW_SECONDS = 300  # after which a slow test is taken to hang, even on a busy machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", help="those of test_fault_series.py, with commas between them; default: all")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, and more examples of random data")


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis has no deadlines, as a busy machine is no failure, and no randomness, so that runs are repeatable."""
    late = [hypothesis.HealthCheck.too_slow]
    for name, number in EXAMPLES.items():
        hypothesis.settings.register_profile(
            name, deadline=None, derandomize=True, suppress_health_check=late, max_examples=number
        )
    hypothesis.settings.load_profile("slow" if config.getoption("slow") else "default")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedules groups in the order of collection, each on one process."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    config.option.loadscopereorder = False
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = partial(group_of, processes=scheduler.numnodes)
    return scheduler


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Every second process collects from the end. Else, when nothing is compiled yet, processes would compile the same
    files at the same time; this way, each finds what the others have compiled."""
    report = yield
    if isinstance(collector, pytest.Directory) and os.environ.get("PYTEST_XDIST_WORKER", "")[-1:] in {*"13579"}:
        report.result.reverse()
    return report


def pytest_make_parametrize_id(val: object) -> str | None:
    """Short names for values that pytest would number: that of its constant for a dataclass, such as a model; ep2 for
    sizes {'ep': 2}; the values of a named tuple of words and numbers."""
    name = None
    if is_dataclass(val):
        modules = [each for each in tuple(sys.modules.values()) if TESTS in (getattr(each, "__file__", None) or "")]
        name = next((name for each in modules for name, found in vars(each).items() if found is val), None)
    elif isinstance(val, dict) and {*map(type, val.values())} == {int}:
        name = "-".join(f"{key}{value}" for key, value in val.items())
    elif isinstance(val, tuple) and hasattr(val, "_fields") and {*map(type, val)} <= {str, int, float, bool}:
        name = "-".join(map(str, val))
    return name if name and len(name) <= LONGEST_NAME else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (position(item.nodeid), file_of(item.nodeid)))
    marks = {item: {mark.name for mark in item.iter_markers()} for item in items}
    mark_unsampled(items, marks)
    unwanted = set() if has_cuda() else {"gpu"}
    if not config.getoption("slow") and "slow" not in config.getoption("markexpr"):
        unwanted.add("slow")
    if "realmodel" not in config.getoption("markexpr"):
        unwanted.add("realmodel")
    if "PYTEST_XDIST_WORKER" in os.environ:
        unwanted.add("quiet")
    leave_out(config, items, {item for item in items if marks[item] & unwanted})
    for item in items:
        if "slow" in marks[item] and "timeout" not in marks[item]:
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


def pytest_sessionstart() -> None:
    """Collected tests live as long as the process: garbage collection need not traverse them, now or later."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def mark_unsampled(items: list[pytest.Item], marks: dict[pytest.Item, set[str]]) -> None:
    """Marks all cases of a test marked sampled(count) slow, except `count` evenly spaced ones."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if "sampled" in marks[item] and "slow" not in marks[item]:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        (count,) = found[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        kept = {number * len(found) // count for number in range(count)}
        for number, item in enumerate(found):
            if number not in kept:
                item.add_marker(pytest.mark.slow)
                marks[item].add("slow")


def leave_out(config: pytest.Config, items: list[pytest.Item], unwanted: set[pytest.Item]) -> None:
    """Deselects tests, since skipping thousands of them, each with set-up and report, would take seconds."""
    items[:] = [item for item in items if item not in unwanted]
    if unwanted:
        config.hook.pytest_deselected(items=list(unwanted))


@cache
def has_cuda() -> bool:
    """Counts devices without making a CUDA context, which a later fork would not survive."""
    import torch

    return torch.cuda.device_count() > 0


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    """Seeds torch, once imported, for tests that draw from it. Without a GPU, only the CPU generator is seeded, since
    torch.manual_seed records its caller for each kind of device, which takes milliseconds."""
    if torch := sys.modules.get("torch"):
        (torch if has_cuda() else torch.default_generator).manual_seed(0)


@pytest.fixture
def hangup() -> Iterator[None]:
    """Restores the default effect of SIGHUP, here and in processes that a test starts: under nohup it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module", autouse=True)
def only_its_files_see_the_shared_cluster(request: pytest.FixtureRequest) -> None:
    """A process can connect to one Ray cluster at a time, and has its token in the environment."""
    if "shared_cluster" in sys.modules and file_of(request.node.nodeid) not in SHARED_CLUSTER:
        sys.modules["shared_cluster"].stop_shared_cluster()


@pytest.fixture(scope="session", autouse=True)
def no_cluster_is_left() -> Iterator[None]:
    yield
    if "shared_cluster" in sys.modules:
        sys.modules["shared_cluster"].stop_shared_cluster()


@pytest.fixture(scope="session")
def fleet():
    """Four rank processes, shared by all tests that train."""
    from fleet import Fleet

    made = Fleet(4)
    yield made
    made.stop()


@pytest.fixture(scope="session")
def rank_processes():
    from worker_processes import WorkerProcess

    made = [WorkerProcess() for _ in range(4)]
    yield made
    for worker in made:
        worker.stop()


@pytest.fixture
def workers(rank_processes, request):
    """Four rank processes that can be killed, shared by all tests; they are replaced after a test that fails."""
    failed = request.session.testsfailed
    yield rank_processes
    if request.session.testsfailed > failed:
        for worker in rank_processes:
            worker.stop()
        rank_processes[:] = [type(worker)() for worker in rank_processes]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small English corpus with the vocabulary size of the models in `plans`."""
    from plans import MODEL

    from pentad.workers.data.sources import builtin_corpus

    return str(builtin_corpus("pydoc", MODEL.vocab, tmp_path_factory.mktemp("cache")))
