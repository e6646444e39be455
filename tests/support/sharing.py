"""Which tests must run in the same process when the suite runs in several processes."""

from paths import TESTS

# Files whose tests start Ray clusters of their own.
CLUSTERS = {
    "tests/docs/test_pages.py",
    "tests/orchestrator/cluster/test_cluster.py",
    "tests/orchestrator/cluster/test_group.py",
    "tests/orchestrator/jobs/test_jobs.py",
    "tests/orchestrator/jobs/test_submitted.py",
    "tests/orchestrator/monitoring/test_ray_timeline.py",
    "tests/orchestrator/run/test_driver.py",
    "tests/orchestrator/run/test_elastic.py",
    "tests/orchestrator/run/test_training.py",
}
FILES = [path.relative_to(TESTS.parent).as_posix() for path in TESTS.rglob("test_*.py")]
FLEET = {name for name in FILES if "fleet" in (TESTS.parent / name).read_text("utf-8")}


def group_of(test: str) -> str:
    """The group of a test by its node ID. A group runs in one process, in order: all files that start clusters, all
    files that share the fleet, and each other file by itself. So at most one process has a cluster, and one a fleet."""
    file = test.partition("::")[0]
    return "clusters" if file in CLUSTERS else "fleet" if file in FLEET else file
