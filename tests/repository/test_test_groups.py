"""What two processes share out between them: each group of tests is one process's."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict

import pytest
from paths import ROOT
from sharing import CLUSTERS, group_of
from sharing import FILES as ALL_FILES

FILES = (
    "tests/schedules/spec/test_mesh.py",
    "tests/schedules/draw/test_palette.py",
    "tests/schedules/draw/test_svg.py",
)

pytestmark = pytest.mark.timeout(120)


def test_the_tests_of_a_group_run_in_one_process() -> None:
    command = [sys.executable, "-m", "pytest", "-n", "2", "-v", "-p", "no:cacheprovider", *FILES]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True).stdout
    ran: dict[str, set[str]] = defaultdict(set)
    for process, file in re.findall(r"^\[(gw\d)\].* (tests/[\w/]+\.py)::", out, re.MULTILINE):
        ran[file].add(process)
    assert set(ran) == set(FILES)
    assert all(len(processes) == 1 for processes in ran.values()), ran
    assert len(set.union(*ran.values())) == 2


def test_clusters_are_a_group_and_so_are_the_files_that_share_the_fleet() -> None:
    groups = {file: group_of(f"{file}::test[a::b]") for file in ALL_FILES}
    run, runtime = "tests/orchestrator/run", "tests/workers/runtime"
    assert {groups[f"{run}/test_{name}.py"] for name in ("elastic", "training", "driver")} == {"clusters"}
    assert {groups[f"{runtime}/test_{name}.py"] for name in ("exactness", "zero", "axes")} == {"fleet"}
    assert groups["tests/schedules/spec/test_mesh.py"] == "tests/schedules/spec/test_mesh.py"
    assert groups.keys() >= set(CLUSTERS)
