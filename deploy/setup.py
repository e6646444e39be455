"""Makes .venv and installs pentad into it: `python3 deploy/setup.py run`, or `test` for the test tools as well.

Needs Python 3.11 and a package index, nothing else. torch comes first, because which build it is must not be left to
the resolver: by its plain name it brings gigabytes of CUDA to a machine without a GPU, and replaces the build that a
GPU image was made around. `TORCH=cpu` or `TORCH=cuda` in the environment overrules the choice.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - this script is what a newcomer's older Python meets first
    found = ".".join(map(str, sys.version_info[:3]))
    sys.exit(
        f"pentad needs Python 3.11 or newer, but this is {found}; name another as in `make train PYTHON=python3.12`"
    )

import importlib.metadata
import importlib.util
import json
import os
import platform
import pwd
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
TORCH = "torch==2.13.0"
TORCH_FLOOR = (2, 11)
TRITON = "triton==3.6.0"  # for Triton's interpreter where torch brings no Triton of its own
CONSTRAINTS = ["-c", "constraints.txt"]
NO_INDEX = (
    "connection broken",
    "ConnectionError",
    "name resolution",
    "timed out",
    "error sending request",
    "dns error",
)
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[set-up {time.monotonic() - BEGAN:3.0f} s] {text}", flush=True)


def stop(sentence: str) -> None:
    sys.exit(f"[set-up] {sentence}")


def explain(output: str) -> str:
    """One sentence for what pip or uv printed before it failed."""
    if any(sign in output for sign in NO_INDEX):
        return f"no package index could be reached, so nothing more can be installed; the log is {LOG}"
    errors = [line for line in output.splitlines() if line.lower().startswith("error")] or ["the installer failed"]
    return f"{errors[-1][:200]}; the log is {LOG}"


def execute(command: list[str], environment: dict[str, str]) -> str | None:
    """Runs a command, logs what it prints and shows a line of it every five seconds; returns its output if it fails."""
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
            words = line.split()
            if words[:2] == ["Installing", "collected"]:
                say(f"    unpacking {len(words) - 3} packages")
            elif words[:1] in (["Downloading"], ["Collecting"]) and time.monotonic() - shown > 5:
                shown = time.monotonic()
                say(f"    {line.strip()[:100]}")
    return "".join(lines) if process.wait() else None


def environment() -> dict[str, str]:
    """The environment of pip.

    A HOME that is not the account's own, as in containers and CI jobs, hides the account's pip settings, and with them
    the index or the wheels of this site: they are then named to pip.
    """
    try:
        settings = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".config" / "pip" / "pip.conf"
    except KeyError:  # a user number without an account
        return dict(os.environ)
    return {"PIP_CONFIG_FILE": str(settings), **os.environ} if os.access(settings, os.R_OK) else dict(os.environ)


def pip(*arguments: str) -> list[str]:
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", *CONSTRAINTS, *arguments]


def install(*requirements: str) -> None:
    output = execute(pip("--progress-bar", "off", *requirements), environment())
    if output is not None:
        stop(explain(output))


def version(python: str, package: str) -> str | None:
    """A package's version as an interpreter would find it, read from its metadata without importing it."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return answer.stdout.strip() if answer.returncode == 0 else None


def is_recent(torch: str | None) -> bool:
    return torch is not None and tuple(map(int, torch.split("+")[0].split(".")[:2])) >= TORCH_FLOOR


def make_venv() -> None:
    """Makes .venv unless there is one that works."""
    check = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
    if PYTHON.exists() and subprocess.run([PYTHON, "-c", check], capture_output=True).returncode == 0:
        return
    if not all(importlib.util.find_spec(module) for module in ("venv", "ensurepip")):
        stop(f"{sys.executable} comes without venv: install it first (Debian and Ubuntu: apt install python3-venv)")
    say(f"making {VENV.name} with Python {platform.python_version()}")
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], capture_output=True, text=True)
    if made.returncode:
        stop(f"{VENV} could not be made: {(made.stdout + made.stderr).strip()[-300:]}")


def borrow_packages() -> None:
    """Lets .venv see the packages of the Python that runs this script, behind its own.

    `--system-site-packages` would show those of the base interpreter instead where this Python is itself a venv's.
    """
    folders = [path for path in sys.path if path.endswith("-packages")]
    lines = ["import site", *(f"import site; site.addsitedir({folder!r})" for folder in folders)]
    own = subprocess.run([PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True)
    Path(own.stdout.decode().strip(), "borrowed.pth").write_text("\n".join(lines) + "\n")


def has_gpu() -> bool:
    try:
        return "GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return False


def brings_cuda() -> bool:
    """Whether pip, left alone, would choose a build of torch for CUDA."""
    command = pip("--dry-run", "--quiet", "--report", "-", TORCH)
    answer = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if answer.returncode:
        LOG.write_text(answer.stdout + answer.stderr)
        stop(explain(answer.stderr))
    names = [item["metadata"]["name"] for item in json.loads(answer.stdout)["install"]]
    return any(name.startswith(("nvidia-", "cuda-", "triton")) for name in names)


def install_cpu_torch() -> None:
    """Installs torch without CUDA: with pip if it finds such a build, else with uv, which knows where one is."""
    if not brings_cuda():
        install(TORCH)
        return
    install("uv")
    uv = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(PYTHON), "--torch-backend=cpu", *CONSTRAINTS]
    if execute([*uv, TORCH], environment()) is not None:
        stop(
            f"no build of {TORCH} for the CPU could be had; `TORCH=cuda make train` takes the CUDA build, "
            f"which runs on a CPU too but needs several GB; the log is {LOG}"
        )


def install_torch() -> None:
    """Leaves .venv with torch: the one it has, the one this Python has, or the build that suits the machine."""
    expected = os.environ.get("TORCH", "")
    if expected not in ("", "cpu", "cuda"):
        stop(f"TORCH is {expected!r}, but has to be cpu or cuda")
    if is_recent(version(str(PYTHON), "torch")):
        return
    outer = version(sys.executable, "torch")
    if not expected and is_recent(outer):
        say(f"keeping torch {outer} of {sys.executable}")
        borrow_packages()
    elif expected == "cuda" or (not expected and has_gpu()):
        say(f"installing {TORCH} for CUDA")
        install(TORCH)
    else:
        say(f"installing {TORCH} for the CPU")
        install_cpu_torch()


def install_pentad(purpose: str) -> None:
    """Installs this checkout in place, with what it needs at the versions of constraints.txt."""
    install("setuptools")  # the pinned one builds pentad, instead of the newest one in a build environment of pip's
    extra = []
    if purpose == "test" and version(str(PYTHON), "triton") is None and platform.system() == "Linux":
        extra = [TRITON] if platform.machine() == "x86_64" else []
    install("--no-build-isolation", "-e", ".[test]" if purpose == "test" else ".", *extra)


def main(purpose: str) -> None:
    make_venv()
    LOG.write_text("")
    install_torch()
    say("installing pentad" + (" and its test tools" if purpose == "test" else ""))
    install_pentad(purpose)
    for ready in ("run", "test") if purpose == "test" else ("run",):
        (VENV / f"ready-to-{ready}").touch()
    say("done")


if __name__ == "__main__":
    main(sys.argv[1])
