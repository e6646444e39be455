"""Which tests run in one process when several processes share the suite."""

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
    """The group of a test by its node ID. A group runs in one process, in order: files that start clusters, files that
    share the fleet, and every other file by itself. So no two processes ever have a cluster each, nor a fleet."""
    file = test.partition("::")[0]
    return "clusters" if file in CLUSTERS else "fleet" if file in FLEET else file
