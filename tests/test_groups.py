"""What two processes share out between them: each group of tests is one process's."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import conftest
import pytest

ROOT = Path(__file__).resolve().parent
FILES = ("test_mesh.py", "test_palette.py", "test_svg.py")

pytestmark = pytest.mark.timeout(120)


def test_the_tests_of_a_group_run_in_one_process() -> None:
    command = [sys.executable, "-m", "pytest", "-n", "2", "-v", "-p", "no:cacheprovider", *FILES]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True).stdout
    ran: dict[str, set[str]] = defaultdict(set)
    for process, file in re.findall(r"^\[(gw\d)\].* (?:tests/)?(test_\w+\.py)::", out, re.MULTILINE):
        ran[file].add(process)
    assert set(ran) == set(FILES)
    assert all(len(processes) == 1 for processes in ran.values()), ran
    assert len(set.union(*ran.values())) == 2


def test_clusters_are_a_group_and_so_are_the_files_that_share_the_fleet() -> None:
    groups = {path.stem: conftest.group_of(f"tests/{path.name}::test[a::b]") for path in ROOT.glob("test_*.py")}
    assert {groups[name] for name in ("test_elastic", "test_jobs", "test_driver")} == {"clusters"}
    assert {groups[name] for name in ("test_exactness", "test_zero", "test_axes")} == {"fleet"}
    assert groups["test_mesh"] == "test_mesh"
    assert groups.keys() >= conftest.CLUSTERS
