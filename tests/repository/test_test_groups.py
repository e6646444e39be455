"""How the processes of a run share out tests: all tests of a group run in one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sharing import FILES, FLEET, INDEPENDENT, ORDER, group_of, position


class Process:
    """A worker process, as the scheduler sees it."""

    def __init__(self, name: str) -> None:
        self.gateway, self.shutting_down = SimpleNamespace(id=name), False
        self.assigned: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.assigned += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_the_tests_of_a_group_run_in_one_process(pytestconfig: pytest.Config) -> None:
    """Files of two tests each, in the order of collection, shared out between three processes."""
    files = [*ORDER, *sorted(FLEET), *sorted({*FILES} - {*ORDER} - FLEET)[::8]]
    tests = sorted((f"{file}::test_{number}" for file in files for number in "ab"), key=position)
    config = SimpleNamespace(getvalue=lambda name: ["3*popen"], option=pytestconfig.option, hook=pytestconfig.hook)
    scheduler = pytestconfig.hook.pytest_xdist_make_scheduler(config=config, log=None)
    processes = [Process(f"gw{number}") for number in range(3)]
    for process in processes:
        scheduler.add_node(process)
        scheduler.add_node_collection(process, tests)
    scheduler.schedule()
    done = 0
    while any(done < len(process.assigned) for process in processes):
        for process in processes:
            if done < len(process.assigned):
                scheduler.mark_test_complete(process, process.assigned[done])
        done += 1
    ran = [{group_of(tests[index]) for index in process.assigned} for process in processes]
    assert sorted(index for process in processes for index in process.assigned) == list(range(len(tests)))
    assert all(ran) and sum(map(len, ran)) == len(set.union(*ran))
    assert [process.assigned[0] for process in processes] == [
        next(index for index, test in enumerate(tests) if group_of(test) == group)
        for group in ("shared cluster", "own clusters", "fleet")
    ]


def test_files_that_share_a_cluster_or_the_fleet_or_start_clusters_are_groups() -> None:
    groups = {file: group_of(f"{file}::test[a::b]") for file in FILES}
    run, runtime = "tests/orchestrator/run", "tests/workers/runtime"
    assert {groups[f"{run}/test_{name}.py"] for name in ("training", "driver")} == {"shared cluster"}
    assert groups[f"{run}/test_elastic.py"] == "own clusters"
    assert {groups[f"{runtime}/test_{name}.py"] for name in ("exactness", "zero")} == {"fleet"}
    assert groups["tests/workers/test_abort.py"] == "fleet"
    assert len({group_of(f"{runtime}/test_zero.py::test[{number}]", 16) for number in range(3)}) == 3
    assert groups["tests/schedules/spec/test_mesh.py"] == "tests/schedules/spec/test_mesh.py"
    assert groups.keys() >= set(ORDER)
    assert len({group_of(f"{INDEPENDENT}::test[{number}]") for number in range(3)}) == 3
