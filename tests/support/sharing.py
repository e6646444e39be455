"""Which tests must run in the same process when the suite runs in several processes."""

import re

from paths import TESTS

# Files whose tests share one Ray cluster (see shared_cluster), and those that start others, in the order in which they
# run.
SHARED_CLUSTER = (
    "tests/orchestrator/cluster/test_group.py",
    "tests/orchestrator/run/test_driver.py",
    "tests/orchestrator/run/test_training.py",
    "tests/orchestrator/run/test_evaluation.py",
    "tests/orchestrator/run/test_init_from.py",
    "tests/orchestrator/run/test_logged_runs.py",
    "tests/orchestrator/run/test_mixture.py",
    "tests/orchestrator/run/test_peft_runs.py",
    "tests/orchestrator/run/test_flipped_bits.py",
    "tests/orchestrator/run/test_spiky_runs.py",
    "tests/orchestrator/jobs/test_jobs.py",
)
OWN_CLUSTERS = (
    "tests/docs/test_pages.py",
    "tests/orchestrator/api/test_train.py",
    "tests/orchestrator/cluster/test_cluster.py",
    "tests/orchestrator/jobs/test_submitted.py",
    "tests/orchestrator/monitoring/test_ray_timeline.py",
    "tests/orchestrator/run/test_elastic.py",
    "tests/orchestrator/run/test_elastic_copies.py",
    "tests/orchestrator/run/test_everything.py",
    "tests/orchestrator/run/test_fault_series.py",
    "tests/orchestrator/run/test_hanging_saves.py",
    "tests/orchestrator/run/test_lora_runs.py",
    "tests/orchestrator/sweep/test_real_trials.py",
)
ORDER = (*SHARED_CLUSTER, *OWN_CLUSTERS)
INDEPENDENT = "tests/chaos/test_chaos.py"  # runs long, and its tests share nothing
FILES = [path.relative_to(TESTS.parent).as_posix() for path in TESTS.rglob("test_*.py")]
# Tests that use rank processes, which are forked from one server in each process of the run; it takes seconds to start.
RANKS = re.compile(r"fleet|worker_processes|from pool|rank_checks|(calibrated|cp|expert|network)_ranks")
FLEET = {name for name in FILES if name not in ORDER and RANKS.search((TESTS.parent / name).read_text("utf-8"))}


FEW = 3  # processes; with these, one that starts ranks keeps the cores of a small machine busy


def group_of(test: str, processes: int = FEW) -> str:
    """The group of a test, by its node ID. A group runs in one process, in order: all files that share the cluster, all
    that start others, all that use rank processes, and each other file, or each test of it, by itself. With more than a
    few processes, each test that uses ranks is a group."""
    file = file_of(test)
    if file == INDEPENDENT:
        return test
    if file in SHARED_CLUSTER:
        return "shared cluster"
    if file in FLEET:
        return "fleet" if processes <= FEW else test
    return "own clusters" if file in OWN_CLUSTERS else file


def file_of(test: str) -> str:
    return test.partition("::")[0]


def position(test: str) -> int:
    """Sort key of a test: the three long groups come first, so that short ones fill the gaps."""
    file = file_of(test)
    return ORDER.index(file) if file in ORDER else len(ORDER) + (file not in FLEET)
