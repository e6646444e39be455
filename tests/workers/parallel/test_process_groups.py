"""Groups of an aborted generation are given up without waiting for their threads."""

from __future__ import annotations

import ast
import threading
import weakref
from pathlib import Path

import pytest

from pentad.workers.parallel import process_groups

pytestmark = pytest.mark.timeout(30)
WORKERS = Path(process_groups.__file__).parents[1]
COLLECTIVES = "all_reduce", "broadcast", "all_to_all_single", "all_gather", "reduce_scatter", "barrier", "send", "recv"
UNFENCED = {"health", "parallel/process_groups.py"}  # not part of a run, or for NCCL


class Group:
    def __init__(self, freed_by: list[threading.Thread]) -> None:
        weakref.finalize(self, lambda: freed_by.append(threading.current_thread()))


def test_the_last_reference_to_a_group_ends_on_a_thread_of_its_own(monkeypatch):
    monkeypatch.setattr(process_groups, "RELEASE_SECONDS", 0.01)
    freed_by = list[threading.Thread]()
    group = Group(freed_by)
    thread = threading.Thread(target=process_groups._give_up, args=([group],))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and not freed_by
    del group
    thread.join(10)
    assert freed_by == [thread]


def test_a_rank_waits_for_others_only_where_an_abort_can_leave_it_behind():
    sources = {str(file.relative_to(WORKERS)): file.read_text() for file in WORKERS.rglob("*.py")}
    files = {name for name, source in sources.items() if "dist" in source and blocking_calls(source)}
    assert {name for name in files if not UNFENCED & {name, name.split("/")[0]}} == set()
    assert "parallel/process_groups.py" in files


def blocking_calls(source: str) -> list[int]:
    """Lines of collectives on which the host blocks outside `with rank_waits.abandonable()`."""
    lines, nodes = list[int](), list[ast.AST]([ast.parse(source)])
    while nodes:
        node = nodes.pop()
        match node:
            case ast.With(items=[first, *_]) if "rank_waits.abandonable()" in ast.unparse(first):
                continue
            case ast.Call(func=ast.Attribute(value=ast.Name(id="dist"), attr=name) | ast.Name(id=name)):
                if name in COLLECTIVES and all(keyword.arg != "async_op" for keyword in node.keywords):
                    lines.append(node.lineno)
        nodes += ast.iter_child_nodes(node)
    return lines
