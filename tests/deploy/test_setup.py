"""The set-up script: which torch a machine gets, and one sentence for every failure."""

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from paths import ROOT

SCRIPT = ROOT / "deploy" / "setup.py"
PLAIN = "Would install 2 packages\n + sympy==1.14.0\n + torch==2.13.0"
CUDA = "Would install 2 packages\n + nvidia-cublas==13.0\n + torch==2.13.0"


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with an empty folder as .venv and an empty PATH."""
    spec = importlib.util.spec_from_file_location("pentad_setup", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path)
    monkeypatch.setattr(module, "PYTHON", tmp_path / "bin" / "python")
    monkeypatch.setattr(module, "UV", tmp_path / "bin" / "uv")
    monkeypatch.setattr(module, "SHARED", tmp_path / "shared.txt")
    write_program(module.PYTHON, "")
    monkeypatch.setattr(module, "LOG", tmp_path / "setup.log")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TORCH", raising=False)
    return module


@pytest.fixture
def commands(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the installers' commands instead of running them; no Python has torch."""
    recorded: list[str] = []
    monkeypatch.setattr(setup, "execute", lambda command, environment: recorded.append(" ".join(command)))
    monkeypatch.setattr(setup, "version", lambda python, package: None)
    monkeypatch.setattr(setup, "share_packages", lambda: recorded.append("share"))
    return recorded


def write_program(path: Path, text: str, status: int = 0) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{text}\nEND\nexit {status}\n")
    path.chmod(0o755)


def test_the_torch_of_this_python_is_used(
    setup: ModuleType, commands: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {str(setup.PYTHON): None}
    monkeypatch.setattr(setup, "version", lambda python, package: versions.get(python, "2.11.0+cu130"))
    setup.install_torch()
    assert commands == ["share"]


@pytest.mark.parametrize(
    ("version", "recent"),
    [("2.11.0+cu130", True), ("2.13.0", True), ("3.0.0a1", True), ("2.9.1", False), (None, False)],
)
def test_only_torch_2_11_or_newer_is_used(setup: ModuleType, version: str | None, recent: bool) -> None:
    assert setup.is_recent(version) is recent


@pytest.mark.parametrize(
    ("gpu", "report", "choice", "backend"),
    [
        (True, CUDA, "", False),
        (True, PLAIN, "cpu", False),
        (True, CUDA, "cpu", True),
        (False, PLAIN, "", False),
        (False, CUDA, "", True),
        (False, CUDA, "cuda", False),
    ],
)
def test_only_machines_with_gpus_get_the_cuda_build(
    setup: ModuleType,
    commands: list[str],
    monkeypatch: pytest.MonkeyPatch,
    gpu: bool,
    report: str,
    choice: str,
    backend: bool,
) -> None:
    if gpu:
        write_program(setup.VENV / "nvidia-smi", "GPU 0: NVIDIA H200")
    write_program(setup.UV, report)
    monkeypatch.setenv("TORCH", choice)
    setup.install_torch()
    (command,) = commands
    assert command.endswith(setup.TORCH) and ("--torch-backend=cpu" in command) is backend


def test_a_new_venv_has_pip(setup: ModuleType) -> None:
    setup.PYTHON.unlink()
    setup.make_venv()
    assert subprocess.run([setup.PYTHON, "-m", "pip", "--version"], capture_output=True).stdout.startswith(b"pip ")
    setup.PYTHON.parent.joinpath("kept").touch()
    setup.make_venv()
    assert setup.PYTHON.parent.joinpath("kept").exists(), "a working one stays"


def test_packages_come_from_where_pip_would_take_them(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = """:env:.index-url='https://mine/simple'
global.index-url='https://theirs/simple'
global.extra-index-url='\\nfile:///a\\nfile:///b'
global.find-links='/wheels /more'
global.timeout='60'"""
    write_program(setup.PYTHON, listed)
    monkeypatch.setenv("SSL_CERT_FILE", "/ca.crt")
    found = setup.uv_environment()
    assert (found["UV_DEFAULT_INDEX"], found["UV_INDEX"]) == ("https://mine/simple", "file:///a file:///b")
    assert (found["UV_FIND_LINKS"], found["SSL_CERT_FILE"]) == ("/wheels,/more", "/ca.crt")
    assert setup.os.environ.items() <= found.items()


def test_what_another_python_has_is_not_installed_again(setup: ModuleType) -> None:
    assert "--excludes" not in setup.uv("ray")
    setup.SHARED.write_text("torch\n")
    assert setup.uv("ray")[-3:] == ["--excludes", str(setup.SHARED), "ray"]


@pytest.mark.parametrize(
    ("act", "printed", "sentence"),
    [
        (lambda setup: setup.install("ray"), "error: Failed to fetch\n  error sending request", "no package index"),
        (lambda setup: setup.install("ray"), "error: No solution found when resolving", "No solution found"),
        (lambda setup: setup.install_uv(), "ERROR: No matching distribution found for uv", "No matching distribution"),
        (lambda setup: setup.brings_cuda(), "", "the installer failed"),
    ],
)
def test_a_failed_install_is_one_sentence(
    setup: ModuleType, act: Callable[[ModuleType], None], printed: str, sentence: str
) -> None:
    for program in (setup.PYTHON, setup.UV):
        write_program(program, printed, status=1)
    with pytest.raises(SystemExit, match=sentence) as stopped:
        act(setup)
    assert str(stopped.value).count("\n") == 0
    assert str(setup.LOG) in str(stopped.value)


def test_an_unknown_choice_of_torch_is_refused(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH", "rocm")
    with pytest.raises(SystemExit, match=r"TORCH is 'rocm': expected cpu or cuda"):
        setup.install_torch()


def test_a_python_without_venv_is_named(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None)
    setup.PYTHON.unlink()
    with pytest.raises(SystemExit, match="has no venv module"):
        setup.make_venv()


def test_shared_packages_come_after_the_venvs_own(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([setup.sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    outer = tmp_path / "outer" / "site-packages"
    outer.mkdir(parents=True)
    (outer / "shared.py").write_text("")
    monkeypatch.setattr(setup, "PYTHON", tmp_path / "venv" / "bin" / "python")
    monkeypatch.setattr(setup.sys, "path", [str(outer)])
    setup.share_packages()
    code = "import shared, sys; print([path for path in sys.path if path.endswith('-packages')][-1])"
    answer = subprocess.run([setup.PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == str(outer)
    assert "torch" in setup.SHARED.read_text().split()
