"""Test the wheel with each pair of Python and torch that the README names: `make matrix`.

For each pair, one at a time: create an environment outside the checkout, install the wheel with that torch, copy the
checkout, run its fast tests on the wheel, and train on two ranks.  A torch with CUDA takes about 3 GB, which are
freed before the next pair.

python tools/matrix.py                    # all pairs
python tools/matrix.py 3.12:2.13.0        # other pairs, as PYTHON:TORCH
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# The CPU build that CI has, the same release from the package index, the newest release and the oldest that we support.
PAIRS = ["3.11:2.13.0+cpu", "3.12:2.13.0", "3.13:2.15.0", "3.11:2.11.0"]
# Tests without ranks and on the fake CUDA: they cover what a torch version can break and take only minutes.
FAST_TESTS = ["-m", "fast or lab", "--ignore=tests/lab"]
TORCH_API_ON_RANKS = ["-m", "ranks", "tests/test_torch_api.py"]
TRAIN = ["train", "fashion", "train.epochs=2", "--ranks", "2"]


class Failed(Exception):
    pass


class Result(NamedTuple):
    pair: str
    torch: str
    tests: str
    top1: str
    minutes: float


def run(command: list[str], inside: Path, *, shown: bool = False) -> str:
    """Run a command outside the checkout's environment and return its standard output."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        command, cwd=inside, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if shown or done.returncode:
        print(done.stdout[-20_000:], flush=True)
    if done.returncode:
        raise Failed(f"{' '.join(command[:4])} ... ended with exit code {done.returncode}")
    return done.stdout


def find_python(version: str) -> str:
    """Return the interpreter of a version, from PATH or pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(f"python{version}"), *map(str, pyenv.glob(f"versions/{version}.*/bin/python"))]
    for candidate in filter(None, candidates):
        # A shim of pyenv exists for versions that are not selected, and fails.
        found = subprocess.run([candidate, "--version"], capture_output=True, text=True)
        if found.returncode == 0 and found.stdout.startswith(f"Python {version}."):
            return candidate
    raise Failed(f"Python {version} is not installed")


def copy_checkout(folder: Path) -> None:
    """Copy every file that git tracks.  Tests read src/, but import the wheel, because src/ is not on Python's path."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.rstrip("\0").split("\0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def check(pair: str, wheel: Path, folder: Path) -> Result:
    started_s = time.monotonic()
    version, _, torch = pair.partition(":")
    run([find_python(version), "-m", "venv", "env"], folder)
    python = str(folder / "env/bin/python")
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    # Everything at its locked version, except torch, which must satisfy the requirements of the wheel.
    locked = [word for name in ("train", "dev") for word in ("-r", str(ROOT / f"requirements/{name}.txt"))]
    run([*install, "--no-deps", "--only-binary", ":all:", *locked], folder)
    run([*install, str(wheel), f"torch=={torch}"], folder)
    shutil.copytree(wheel.parent / "checkout", folder / "checkout")
    run([*install, "--no-deps", "--no-build-isolation", "--editable", str(folder / "checkout/lab")], folder)
    where = run(
        [python, "-c", "import megabatch, torch; print(torch.__version__, megabatch.__file__)"], folder / "checkout"
    )
    assert str(folder / "env") in where, where
    pytest = [python, "-m", "pytest", "--numprocesses=3", "--dist=worksteal"]  # as `make test`
    run([*pytest, *TORCH_API_ON_RANKS], folder / "checkout", shown=True)
    tests = run([*pytest, *FAST_TESTS], folder / "checkout", shown=True)
    run([str(folder / "env/bin/megabatch"), *TRAIN], folder)
    summary = json.loads((folder / "runs/fashion-001/summary.json").read_text())
    counts = re.findall(r"^\d+ passed.*(?= in )", tests, flags=re.MULTILINE)
    return Result(pair, where.split()[0], counts[-1], f"{summary['top1']:.4f}", (time.monotonic() - started_s) / 60)


def main() -> int:
    results, failures = [], []
    with tempfile.TemporaryDirectory(prefix="megabatch-matrix-") as built:
        run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", built], ROOT)
        (wheel,) = Path(built).glob("*.whl")
        copy_checkout(wheel.parent / "checkout")  # before files change: a pair takes minutes
        for pair in sys.argv[1:] or PAIRS:
            print(f"== {pair}", flush=True)
            try:
                with tempfile.TemporaryDirectory(prefix="megabatch-matrix-") as folder:
                    results.append(check(pair, wheel, Path(folder)))
            except Failed as error:
                failures.append(f"{pair}: {error}")
    print("| Python:torch | torch | fast tests | top-1 after 2 epochs on 2 ranks | minutes |\n|---|---|---|---|---|")
    for result in results:
        print(f"| {result.pair} | {result.torch} | {result.tests} | {result.top1} | {result.minutes:.1f} |")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
