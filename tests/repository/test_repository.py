"""Laws of the repository: who may import whom, what no file may contain; and the wheel carries every file."""

import ast
import gc
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from os import environ
from pathlib import Path

import pytest
from paths import ROOT

FOLDERS = ("schedules", "kernels", "workers", "orchestrator")
NAMESPACE = ROOT / "orchestrator" / "namespace"  # the package `pentad` itself
MAY_IMPORT = {
    "schedules": {"pyarrow", "numpy", "pentad.schedules"},
    "kernels": {"cudnn", "torch", "triton", "pentad.kernels"},
    "workers": {
        *("cuda", "fastokens", "jinja2", "numpy", "pyarrow", "pynvml", "safetensors", "tokenizers", "torch"),
        *("pentad.workers", "pentad.schedules", "pentad.kernels"),
    },
    "orchestrator": {
        *(
            "cryptography",
            "google.protobuf",
            "grpc",
            "grpc_health",
            "mlflow",
            "numpy",
            "prometheus_client",
            "pyarrow",
            "pydantic",
            "pydantic_core",
            "ray",
        ),
        *("rich", "safetensors", "tensorboardX", "tokenizers", "torch", "transformers", "typer", "wandb", "yaml"),
        *("pentad.orchestrator", "pentad.workers", "pentad.schedules"),
    },
}
# Subfolders, top ones first: each imports only from those below it. "" is the package's own folder.
LAYERS = {
    "schedules": ("search", "", "diagnosis", "verify", "draw", "passes", "generators", "spec", "simulate", "ir"),
    "kernels": ("heads", "attention", "fp8", "moe", "optimizer", ""),
    "workers": (
        "health",
        "runtime",
        "lanes",
        "integrity",
        "evaluation",
        "dcp",
        "hf",
        "preprocess",
        "data",
        "custom",
        "model",
        "linear",
        "transport",
        "parallel",
        "params",
        "replication",
        "checkpoint",
        "text",
        "",
    ),
    "orchestrator": (
        "namespace",
        "cli/commands",
        "cli",
        "sweep",
        "api",
        "run",
        "calibration",
        "doctor",
        "page",
        "recovery",
        "control",
        "jobs",
        "loggers",
        "diagnosis",
        "monitoring",
        "records",
        "cluster",
        "search",
        "memory",
        "simulation",
        "planning",
        "activations",
        "gpus",
        "config",
        "",
    ),
}
MOST_FILES = 16  # of a source folder
RUNS_WHAT_IT_READS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
# In parts, so that this file does not contain what it forbids.
FORBIDDEN_WORDS = [
    *("/".join(("", *parts)) for parts in [("work", ""), ("root", ""), ("opt", "wheels"), ("opt", "pypi")]),
    *(
        ".".join(parts)
        for parts in [
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("download", "pytorch", "org"),
            ("npmjs", "org"),
            ("deb", "debian", "org"),
            ("conda", "anaconda", "org"),
            ("ghcr", "io"),
            ("quay", "io"),
            ("nvcr", "io"),
            ("docker", "io"),
        ]
    ),
]


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(), str(path))))


@pytest.fixture(scope="module", autouse=True)
def trees_are_dropped() -> Iterator[None]:
    """Syntax trees are a million objects, which garbage collection would traverse again and again, even in later
    tests."""
    gc.disable()
    yield
    nodes.cache_clear()
    gc.enable()


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def imports(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Every module a file names in an import, at its top or inside a function, also through import_module("...")."""
    for node in nodes(path):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, node) for alias in names)
            case ast.ImportFrom(module=module, level=level, names=names):
                name = "." * level + (module or "")
                # `from pentad import workers` names pentad.workers.
                yield from ((f"{name}.{alias.name}" if name == "pentad" else name, node) for alias in names)
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(name))]):
                if called in ("import_module", "__import__"):
                    yield name, node


def _modules(path: Path, known: set[str]) -> Iterator[str]:
    """The modules of pentad that a file needs when imported or run; imports for type checkers are left out."""
    unseen = {
        id(inner)
        for node in nodes(path)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in unseen:
            found = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            yield from found & known


def is_within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def git_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_follow_the_arrows(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | sys.stdlib_module_names
    wrong = [
        f"{place(path, node)} imports {module}"
        for path in sources(folder)
        for module, node in imports(path)
        if not is_within(module, allowed)
    ]
    assert not wrong


@pytest.mark.parametrize("package", FOLDERS)
def test_sub_folders_import_downward_only(package: str) -> None:
    layers = LAYERS[package]
    assert {path.parent.relative_to(ROOT / package).as_posix() for path in sources(package)} == {
        layer or "." for layer in layers
    }
    wrong = []
    for path in sources(package):
        upper = layers.index(path.parent.relative_to(ROOT / package).as_posix().removeprefix("."))
        for module, node in imports(path):
            if is_within(module, {f"pentad.{package}"}):
                parts = module.split(".")[2:]
                lower = layers.index(parts[0] if parts and parts[0] in layers else "")
                if lower < upper:
                    wrong.append(f"{place(path, node)} imports {module}, which lies above it")
    assert not wrong


def test_no_module_imports_itself_through_others() -> None:
    """Cycles are searched for at every level, and count even if an import is inside a function."""
    names = {
        path: f"pentad.{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}"
        for path in sources(*FOLDERS)
    }
    graph = {name: {m for m in _modules(path, set(names.values())) if m != name} for path, name in names.items()}
    assert list(TopologicalSorter(graph).static_order())


def test_no_source_folder_holds_too_many_files() -> None:
    folders = {path.parent for path in git_files() if path.relative_to(ROOT).parts[0] in FOLDERS}
    counts = {folder: sum(path.is_file() for path in folder.iterdir()) for folder in folders}
    assert not {folder: count for folder, count in counts.items() if count > MOST_FILES}


def test_no_file_imports_a_folder_by_its_bare_name() -> None:
    wrong = [
        f"{place(path, node)} imports {module}"
        for path in sources(*FOLDERS, "tests", "deploy")
        for module, node in imports(path)
        if module.startswith(".") or is_within(module, set(FOLDERS))
    ]
    assert not wrong


def test_schedules_load_neither_torch_nor_ray() -> None:
    files = [path.relative_to(ROOT).with_suffix("") for path in sources("schedules") if path.stem != "__init__"]
    modules = [f"pentad.{'.'.join(file.parts)}" for file in files]
    heavy = ("torch", "ray", "triton", "pydantic", "pentad.workers", "pentad.kernels", "pentad.orchestrator")
    code = f"import sys, {', '.join(modules)}; print([name for name in {heavy!r} if name in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**environ, "PYTHONPATH": str(ROOT / ".typings")},
        capture_output=True,
        text=True,
    )
    assert (answer.stdout.strip(), answer.stderr) == ("[]", "")


def test_no_code_runs_what_it_reads() -> None:
    wrong = []
    for path in sources(*FOLDERS, "deploy"):
        wrong += [f"{place(path, n)} imports {m}" for m, n in imports(path) if is_within(m, RUNS_WHAT_IT_READS)]
        for node in nodes(path):
            match node:
                case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                    wrong.append(f"{place(path, node)} calls {name}")
                case ast.Attribute(value=ast.Name(id="torch" | "yaml" as module), attr="load" | "unsafe_load"):
                    wrong.append(f"{place(path, node)} calls {module}.load")
    assert not wrong


def test_files_and_functions_stay_short() -> None:
    wrong = []
    for path in sources(*FOLDERS, "tests", "deploy"):
        if (lines := len(path.read_text().splitlines())) > 400:
            wrong.append(f"{path.relative_to(ROOT)} has {lines} lines, the limit is 400")
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > 60:
                    wrong.append(f"{place(path, node)} {node.name} has {lines} lines, the limit is 60")
    assert not wrong


def test_no_file_names_a_machine_or_a_registry() -> None:
    wrong = []
    for path in git_files():
        text = path.read_text(errors="replace")
        wrong += [f"{path.relative_to(ROOT)} holds {word}" for word in FORBIDDEN_WORDS if word in text]
    assert not wrong


def test_readme_names_only_targets_that_exist() -> None:
    if not (ROOT / "README.md").exists():
        pytest.skip("no README.md")
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = re.findall(r"```.*?```|`[^`\n]+`", (ROOT / "README.md").read_text(), re.DOTALL)
    named = {target for block in code for target in re.findall(r"(?:^|[`\s;&$])make ([a-z][a-z-]*)", block)}
    assert {"train", "test"} <= targets
    assert named <= targets


def test_link_farm_mirrors_the_folders() -> None:
    farm = ROOT / ".typings" / "pentad"
    top = {path.name: path for path in NAMESPACE.iterdir() if path.is_file()}
    links = [path for path in farm.iterdir() if path.name != "__pycache__"]
    assert {link.name: link.resolve() for link in links} == top | {name: ROOT / name for name in FOLDERS}
    assert all(link.is_symlink() for link in links)


def test_every_folder_of_sources_is_a_package_of_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        path.parent
        for path in git_files()
        if path.name == "__init__.py" and path.relative_to(ROOT).parts[0] in FOLDERS and path.parent != NAMESPACE
    }
    names = (f"pentad.{folder.relative_to(ROOT).as_posix().replace('/', '.')}" for folder in folders)
    assert listed == ["pentad", *sorted(names)]


def test_wheel_holds_every_file_of_the_tree(tmp_path: Path) -> None:
    pytest.importorskip("build")
    pytest.importorskip("setuptools")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    files = {path.relative_to(tmp_path) for folder in FOLDERS for path in (tmp_path / folder).rglob("*.*")}
    top = NAMESPACE.relative_to(ROOT)
    tree = {f"pentad/{path.name if path.parent == top else path}" for path in files}
    command = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == tree
