"""Creates .venv and installs pentad into it: `python3 deploy/setup.py run`. `test` adds the test tools, and
`test-all` the servers and libraries that slow tests talk to.

Needs only Python 3.11 and a package index. pip installs uv, which fetches and unpacks all the rest in a fraction of
pip's time. Installs torch first, because the resolver must not choose the build: a plain `torch` brings gigabytes of
CUDA to a machine without a GPU, or replaces the build that a GPU image is made for. `TORCH=cpu` or `TORCH=cuda` in the
environment overrides the choice made here.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - an older Python gets here first
    found = ".".join(map(str, sys.version_info[:3]))
    sys.exit(
        f"this is Python {found}: expected 3.11 or newer (choose another one as in `make train PYTHON=python3.12`)"
    )

import ast
import importlib.metadata
import importlib.util
import os
import platform
import pwd
import subprocess
import sysconfig
import time
import zipfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
UV = VENV / "bin" / "uv"
LOG = VENV / "setup.log"
SHARED = VENV / "shared.txt"  # packages shared from another Python, not to be installed again
TORCH = "torch==2.13.0"
TORCH_FLOOR = (2, 11)
TRITON = "triton==3.6.0"  # for Triton's interpreter, if torch comes without Triton
CONSTRAINTS = ["-c", "constraints.txt"]
SELDOM_IMPORTED = (  # hypothesis: pytest compiles it itself
    r"/site-packages/(transformers/(cli|exporters|models|pipelines)|huggingface_hub/(cli|inference)|hypothesis|pydantic/v1"
    r"|ray/(air|data|llm|rllib|scripts|serve|train|tune)|torch/(_inductor|_vendor|testing)|torchgen|numpy/(distutils|f2py)"
    r"|sympy/(categories|codegen|combinatorics|parsing|physics|stats|testing|vector)|google/(api_core|auth|oauth2)"
    r"|pyasn1(_modules)?|pygments/lexers|networkx|mypyc?|pip|setuptools|virtualenv|distlib|.*/(benchmarks|tests?))/"
)
PIP_TO_UV = {  # uv's names for pip's settings of package sources
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
}
NO_INDEX_SIGNS = (
    "connection broken",
    "ConnectionError",
    "name resolution",
    "timed out",
    "error sending request",
    "dns error",
)
PURPOSES = ("run", "test", "test-all")  # each includes those before it
STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[set-up {time.monotonic() - STARTED:3.0f} s] {text}", flush=True)


def stop(sentence: str) -> None:
    sys.exit(f"[set-up] {sentence}")


def explain(output: str) -> str:
    """Why an installer failed, in one sentence, from what it printed."""
    if any(sign in output for sign in NO_INDEX_SIGNS):
        return f"no package index can be reached, so nothing can be installed; see {LOG}"
    errors = [line for line in output.splitlines() if line.lower().startswith("error")] or ["the installer failed"]
    return f"{errors[-1][:200]}; see {LOG}"


def execute(command: list[str], environment: dict[str, str]) -> str | None:
    """Runs a command, logs its output and shows one line of it every five seconds. Returns the output if it fails."""
    shown, lines = time.monotonic(), []
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            lines.append(line)
            if line.startswith(("Downloading", "Collecting", "Prepared")) and time.monotonic() - shown > 5:
                shown = time.monotonic()
                say(f"    {line.strip()[:100]}")
    return "".join(lines) if process.wait() else None


def environment() -> dict[str, str]:
    """The environment of pip, with the account's pip settings even if HOME is another folder.

    Containers and CI jobs set such a HOME, which hides the package index that the account's settings name.
    """
    try:
        settings = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".config" / "pip" / "pip.conf"
    except KeyError:  # a user id without an account
        return dict(os.environ)
    return {"PIP_CONFIG_FILE": str(settings), **os.environ} if os.access(settings, os.R_OK) else dict(os.environ)


@cache
def uv_environment() -> dict[str, str]:
    """The environment of uv, which ignores pip's settings: passes on those of package sources. As with pip, all indexes
    have the same priority."""
    listed = subprocess.run(
        [PYTHON, "-m", "pip", "config", "list"], env=environment(), capture_output=True, text=True
    ).stdout.splitlines()
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for line in sorted(listed, key=lambda line: line.startswith(":env:")):  # the environment overrides files
        name, _, value = line.partition("=")
        if variable := PIP_TO_UV.get(name.rpartition(".")[2]):
            separator = "," if variable == "UV_FIND_LINKS" else " "
            found[variable] = separator.join(ast.literal_eval(value).split())
    return {**found, **os.environ}


def uv(*arguments: str) -> list[str]:
    shared = ["--excludes", str(SHARED)] if SHARED.exists() else []
    return [str(UV), "pip", "install", "--python", str(PYTHON), *CONSTRAINTS, *shared, *arguments]


def install_uv() -> None:
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--no-compile", "--progress-bar", "off"]
    output = execute([*pip, *CONSTRAINTS, "uv"], environment())
    if output is not None:
        stop(explain(output))


def install(*requirements: str) -> None:
    output = execute(uv(*requirements), uv_environment())
    if output is not None:
        stop(explain(output))


def compile_modules(packages: str) -> subprocess.Popen[bytes]:
    """Starts compiling installed packages on all cores. Modules that no run imports, such as those of a thousand models
    and the packages' own tests, are compiled once imported. The exit status means nothing: some packages contain files
    that no Python can compile."""
    folders = map(str, (VENV / "lib").glob(f"python*/site-packages/{packages}"))
    command = [str(PYTHON), "-m", "compileall", "-qq", "-j", "0", "-x", SELDOM_IMPORTED, str(VENV / "bin"), *folders]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def version(python: str, package: str) -> str | None:
    """The version of a package that an interpreter finds, from its metadata, without importing it."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return answer.stdout.strip() if answer.returncode == 0 else None


def is_recent(torch: str | None) -> bool:
    return torch is not None and tuple(map(int, torch.split("+")[0].split(".")[:2])) >= TORCH_FLOOR


def make_venv() -> None:
    """Creates .venv unless there is a working one."""
    check = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
    if PYTHON.exists() and subprocess.run([PYTHON, "-c", check], capture_output=True).returncode == 0:
        return
    if not all(importlib.util.find_spec(module) for module in ("venv", "ensurepip")):
        stop(f"{sys.executable} has no venv module: install it first (Debian and Ubuntu: apt install python3-venv)")
    say(f"creating {VENV.name} with Python {platform.python_version()}")
    command = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(VENV)]
    created = subprocess.run(command, capture_output=True, text=True)
    if created.returncode:
        stop(f"{VENV} cannot be created: {(created.stdout + created.stderr).strip()[-300:]}")
    (packages,) = (VENV / "lib").glob("python*/site-packages")
    zipfile.ZipFile(bundled_pip()).extractall(packages)  # venv would also compile it, which takes seconds


def bundled_pip() -> Path:
    """The wheel of pip that comes with Python; Debian and others keep it in a folder of their own."""
    import ensurepip

    folder = Path(sysconfig.get_config_var("WHEEL_PKG_DIR") or Path(ensurepip.__file__).parent / "_bundled")
    if not (found := list(folder.glob("pip-*.whl"))):
        stop(f"{folder} has no wheel of pip, which comes with Python: choose another one (make train PYTHON=...)")
    return found[0]


def share_packages() -> None:
    """Lets .venv import the packages of the Python that runs this script, after its own.

    If that Python belongs to a venv, `--system-site-packages` would share its base interpreter's packages instead.
    """
    folders = [path for path in sys.path if path.endswith("-packages")]
    lines = ["import site", *(f"import site; site.addsitedir({folder!r})" for folder in folders)]
    own = subprocess.run([PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True)
    Path(own.stdout.decode().strip(), "shared.pth").write_text("\n".join(lines) + "\n")
    SHARED.write_text("".join(f"{name}\n" for name in ("torch", "triton") if version(sys.executable, name)))


def has_gpu() -> bool:
    try:
        return "GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return False


def brings_cuda() -> bool:
    """Whether a plain `torch` would be a CUDA build."""
    answer = subprocess.run(uv("--dry-run", TORCH), cwd=ROOT, env=uv_environment(), capture_output=True, text=True)
    if answer.returncode:
        LOG.write_text(answer.stdout + answer.stderr)
        stop(explain(answer.stderr))
    lines = (line.strip(" +") for line in (answer.stdout + answer.stderr).splitlines())
    return any(line.startswith(("nvidia-", "cuda-", "triton")) for line in lines)


def install_cpu_torch() -> None:
    """Installs torch without CUDA: the build that the index offers, or that of torch's own index."""
    if not brings_cuda():
        install(TORCH)
    elif execute(uv("--torch-backend=cpu", TORCH), uv_environment()) is not None:
        stop(
            f"no CPU build of {TORCH} was found; `TORCH=cuda make train` installs the CUDA build, which also runs on "
            f"CPUs but needs several GB; see {LOG}"
        )


def install_torch() -> None:
    """Makes torch available in .venv: the one already there, the one of this Python, or the build for this machine."""
    choice = os.environ.get("TORCH", "")
    if choice not in ("", "cpu", "cuda"):
        stop(f"TORCH is {choice!r}: expected cpu or cuda")
    if is_recent(version(str(PYTHON), "torch")):
        return
    outer = version(sys.executable, "torch")
    if not choice and is_recent(outer):
        say(f"using torch {outer} of {sys.executable}")
        share_packages()
    elif choice == "cuda" or (not choice and has_gpu()):
        say(f"installing {TORCH} for CUDA")
        install(TORCH)
    else:
        say(f"installing {TORCH} for the CPU")
        install_cpu_torch()


def install_pentad(purpose: str) -> None:
    """Installs this checkout in place, with its dependencies at the versions in constraints.txt."""
    install("setuptools")  # the pinned one builds pentad; an isolated build would take the newest
    extra = []
    if purpose != "run" and version(str(PYTHON), "triton") is None and platform.system() == "Linux":
        extra = [TRITON] if platform.machine() == "x86_64" else []
    install("--no-build-isolation", "-e", "." if purpose == "run" else f".[{purpose}]", *extra)


def main(purpose: str) -> None:
    make_venv()
    LOG.write_text("")
    install_uv()
    install_torch()
    compiling = compile_modules("torch")  # while uv fetches and unpacks the rest
    say("installing pentad" + (" and its test tools" if purpose != "run" else ""))
    install_pentad(purpose)
    compiling.wait()
    compile_modules("").wait()
    for ready in PURPOSES[: PURPOSES.index(purpose) + 1]:
        (VENV / f"ready-to-{ready}").touch()
    say("done")


if __name__ == "__main__":
    main(sys.argv[1])
