"""`import pentad` costs nothing, and offers the names that type checkers see."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from importlib import import_module

import pytest
from paths import ROOT

import pentad
from pentad.schedules.ir.errors import PentadError

FILE = ROOT / "orchestrator" / "namespace" / "__init__.py"


def test_importing_it_imports_the_standard_library_alone() -> None:
    code = """
import json, sys
before = set(sys.modules)
import pentad
print(json.dumps([sorted(set(sys.modules) - before), dir(pentad)]))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".typings")}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    modules, names = json.loads(done.stdout)
    assert {name.partition(".")[0] for name in modules} <= {"pentad", *sys.stdlib_module_names}
    assert [name for name in modules if name.startswith("pentad")] == ["pentad"]
    assert names == sorted([*pentad.__all__, "__version__"])


def test_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    seen = next(node for node in ast.parse(FILE.read_text()).body if isinstance(node, ast.If))
    declared = {
        alias.name: node.module for node in seen.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared == pentad._MODULES and list(pentad._MODULES) == list(pentad.__all__) == sorted(pentad.__all__)


@pytest.mark.parametrize("name", pentad.__all__)
def test_every_name_is_documented_and_is_that_of_its_module(name: str) -> None:
    found = getattr(pentad, name)
    assert found is getattr(import_module(pentad._MODULES[name]), name) is getattr(pentad, name)
    assert found.__doc__
    assert f"pentad.{name}" in (ROOT / "docs" / "python.md").read_text()


def test_no_option_is_called_like_a_section() -> None:
    for function in (pentad.train, pentad.plan, pentad.load_config):
        assert not set(inspect.signature(function).parameters) & set(pentad.RunConfig.model_fields)


def test_other_names_do_not_exist() -> None:
    assert pentad.__version__ and pentad.PentadError is PentadError
    with pytest.raises(AttributeError, match="module 'pentad' has no attribute 'trian'"):
        pentad.trian  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError):
        from pentad import nothing  # type: ignore[attr-defined]  # noqa: F401
