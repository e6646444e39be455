"""A file is merged with those it includes, and a mistake names the file it is in."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.orchestrator.config.config import RunConfig, dump, load
from pentad.orchestrator.config.includes import leaves, merged
from pentad.orchestrator.config.yaml_text import dump_yaml
from pentad.schedules.ir.errors import PentadError

QUICKSTART = load(None)
trees = st.recursive(
    st.none() | st.integers() | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
mappings = st.dictionaries(st.sampled_from("abc"), trees, max_size=3)
Write = Callable[[str, dict[str, Any] | str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, content: dict[str, Any] | str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else dump_yaml(content))
        return path

    return write


@given(mappings, mappings)
def test_what_lies_on_top_is_kept_and_what_it_leaves_out_is_that_below(base: dict, over: dict) -> None:
    found = merged(base, over)
    assert merged(found, over) == found
    assert set(leaves(over)) <= set(leaves(found)) <= {*leaves(base), *leaves(over)}
    for key in base.keys() - over.keys():
        assert found[key] == base[key]
    assert merged(base, {}) == merged({}, base) == merged(base, base) == base


def test_own_keys_replace_included_ones_and_later_files_earlier_ones(write: Write) -> None:
    write("base.yaml", dump(QUICKSTART))
    write("parts/long.yaml", {"run": {"steps": 900}, "mesh": {"pp": 2}, "optimizer": {"beta1": 0.8}})
    write("parts/wide.yaml", {"include": "long.yaml", "mesh": {"pp": 1, "dp": 2}})
    path = write("run.yaml", {"include": ["base.yaml", "parts/wide.yaml"], "run": {"name": "mine"}})
    expected = QUICKSTART.model_dump()
    expected["run"] |= {"steps": 900, "name": "mine"}
    expected["mesh"] |= {"pp": 1, "dp": 2}
    expected["optimizer"]["beta1"] = 0.8
    assert load(path) == RunConfig.model_validate(expected)
    assert load(path, ["mesh.dp=1"]).mesh.dp == 1
    assert load(load(path)) == load(path) == load(write("copy.yaml", dump(load(path))))  # dumped completely


def test_a_file_may_be_included_twice_but_not_by_itself(write: Write) -> None:
    write("base.yaml", dump(QUICKSTART))
    write("a.yaml", {"include": "base.yaml", "run": {"seed": 1}})
    write("b.yaml", {"include": "base.yaml", "mesh": {"cp": 2}})
    both = load(write("run.yaml", {"include": ["a.yaml", "b.yaml"]}))
    assert (both.run.seed, both.mesh.cp) == (QUICKSTART.run.seed, 2)  # b.yaml includes base.yaml again
    first = write("one.yaml", "include: ./two.yaml")
    second = write("two.yaml", "include: [base.yaml, one.yaml]")
    with pytest.raises(PentadError) as caught:
        load(first)
    circle = f"{first} -> {second} -> {first}"
    assert (
        str(caught.value) == f"include of {second} is 'one.yaml', which leads back to it ({circle}): expected no circle"
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("include: none.yaml", r"include of .*run.yaml is '.*none.yaml', which cannot be read \(No such file or direc"),
        ("include: 3", "include of .*run.yaml is 3: expected a YAML file's path or a list of them"),
        ("include: [3]", r"include of .*run.yaml is \[3\]: expected a YAML file's path or a list"),
        ("include: list.yaml", r"list.yaml holds \[1\]: expected a mapping of sections"),
        ("include: broken.yaml", "broken.yaml line 1, column 5: "),
        ("include: wrong.yaml", r"^.*/wrong.yaml: mesh.pp is 0: expected at least 1\n.*/wrong.yaml: mesh.ppp is unk"),
        ("include: wrong.yaml\nmesh: {pp: -1}", r"^.*/run.yaml: mesh.pp is -1: expected at least 1\n.*/wrong.yaml: me"),
    ],
)
def test_a_mistake_names_the_file_it_is_in(write: Write, content: str, sentence: str) -> None:
    write("base.yaml", dump(QUICKSTART))
    write("list.yaml", "[1]")
    write("broken.yaml", "a: [")
    write("wrong.yaml", {"include": "base.yaml", "mesh": {"pp": 0, "ppp": 4}})
    with pytest.raises(PentadError) as caught:
        load(write("run.yaml", content))
    lines = "\n".join(sorted(str(caught.value).splitlines(), key=lambda line: "unknown" in line))
    assert re.search(sentence, lines), lines


def test_an_override_that_is_wrong_is_no_files_mistake(write: Write) -> None:
    write("base.yaml", dump(QUICKSTART))
    path = write("run.yaml", "include: base.yaml")
    with pytest.raises(PentadError, match=r"^mesh.pp is 0: expected at least 1$"):
        load(path, ["mesh.pp=0"])
    with pytest.raises(PentadError, match=r"^mesh.pp is 0: expected at least 1$"):
        load(path, sections={"mesh": {"pp": 0}})


def test_a_mapping_is_a_configuration_and_is_left_as_it_was(write: Write) -> None:
    raw = QUICKSTART.model_dump()
    before = load(raw).model_dump()
    assert load(raw, ["mesh.dp=2"], {"run": {"steps": 7}}).run.steps == 7
    assert raw == before == QUICKSTART.model_dump()
    path = write("base.yaml", dump(QUICKSTART))
    assert load({"include": str(path), "run": {"seed": 3}}).run.seed == 3
