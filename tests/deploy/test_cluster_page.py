"""docs/cluster.md: its files exist, and its commands are ones that Ray and the tests of deploy/ know.

What needs Kubernetes or Slurm is covered by test_deploy.py and test_slurm.py; tests/docs/test_pages.py checks the
commands of `pentad`, which test_submitted.py runs on a cluster with a token.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from pages import blocks
from paths import ROOT

from pentad.orchestrator.jobs.client_auth import user_token

PAGE = ROOT / "docs" / "cluster.md"
PROGRAMS = {"docker", "export", "kubectl", "pentad", "ray", "sbatch"}


def commands() -> list[list[str]]:
    """The words of each line in the page's blocks of cluster commands."""
    lines = [line for block in blocks(PAGE, "bash") for line in block.text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


def test_the_page_is_short() -> None:
    assert len(PAGE.read_text().splitlines()) <= 150


def test_every_program_is_known_and_every_file_exists() -> None:
    assert {words[0] for words in commands()} == PROGRAMS
    files = {word for words in commands() for word in words if word.startswith("deploy/")}
    assert len(files) >= 5
    assert all((ROOT / file).is_file() for file in files)


def test_ray_knows_its_commands_and_options() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    ray_commands = [words[1:] for words in commands() if words[0] == "ray"]
    assert [words[0] for words in ray_commands] == ["get-auth-token", "start", "start"]
    for name, *arguments in ray_commands:
        known = {option for parameter in scripts.cli.commands[name].params for option in parameter.opts}
        assert {argument.partition("=")[0] for argument in arguments} <= known


def test_ray_and_pentad_find_the_token_in_the_places_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = pytest.importorskip("ray._raylet").AuthenticationTokenLoader.instance()
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        assert name in PAGE.read_text()
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("a" * 64)
    (tmp_path / "other").write_text("b" * 64)
    for variable, value, token in (
        ("RAY_AUTH_MODE", "token", "a" * 64),
        ("RAY_AUTH_TOKEN_PATH", str(tmp_path / "other"), "b" * 64),
        ("RAY_AUTH_TOKEN", "c" * 64, "c" * 64),
    ):
        monkeypatch.setenv(variable, value)
        loader.reset_cache()
        try:
            assert (loader.get_raw_token(ignore_auth_mode=True), user_token()) == (token, token)
        finally:
            loader.reset_cache()


def test_the_secret_of_the_token_is_kuberays() -> None:
    """The operator stores the token under the cluster's name, and serves the head as NAME-head-svc."""
    (name,) = re.findall(
        r"^metadata:\n  name: (\S+)", (ROOT / "deploy/kuberay/raycluster.yaml").read_text(), re.MULTILINE
    )
    lines = [" ".join(words) for words in commands()]
    assert any(f"kubectl get secret {name} " in line for line in lines)
    assert any(f"service/{name}-head-svc" in line for line in lines)
