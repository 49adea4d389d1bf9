"""Writes requirements/*.txt: every version that `make` installs, with the sha256 of each of its wheels.

Change a version there, in each file that has it, or delete its entry to take the newest, and run this.  It needs
uv (pip install uv), which resolves for all platforms at once and downloads no wheel for it.

python tools/lock.py
"""

import re
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[1]
OUT = ROOT / "requirements"
BUILD_TOOL, AUDIT_TOOL = "hatchling", "pip-audit"
# Without what they ask for: a CUDA build of torch, and a client of a model hub.
ALONE = "torchvision\ntimm\n"
# torch for CPUs alone comes from an index of its own, or from a folder (pip's --find-links); CI has this one.
CPU_VERSION = "2.13.0+cpu"
CPU_SHA256 = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
FIRST_PYTHON, LAST_PYTHON = 11, 14
PLATFORM = re.compile(r"any|(manylinux|linux).*_(x86_64|aarch64)|macosx_.*")
HEADER = f"""\
# Written by tools/lock.py: versions, and the sha256 of every wheel for CPython 3.{FIRST_PYTHON} to 3.{LAST_PYTHON}
# on Linux (x86_64 and aarch64, glibc) and macOS.  No source archives: building one would fetch what has no hash here.
"""
SUBJECTS = {
    "train": "# What `make train` installs beside torch: what megabatch needs, and its build tool.\n",
    "torch": "# torch as the package index has it, with CUDA and its libraries on Linux.\n",
    "torch-cpu": "# torch without CUDA, taken where pip is told of a place that has it: the one wheel that CI has.\n",
    "dev": "# What `make test` and `make bench` install besides: the extra `dev`, torchvision and timm.\n",
    "audit": "# What `make audit` installs, in a .venv of its own.\n",
}
Packages = dict[str, dict[str, Any]]


def resolve(wanted: str, known: str, *arguments: str) -> Packages:
    """What `wanted` and the arguments of uv need, by name, in the `known` versions."""
    with tempfile.TemporaryDirectory() as folder:
        asked, kept, lock = (Path(folder, name) for name in ("asked.in", "kept.txt", "pylock.toml"))
        asked.write_text(wanted)
        kept.write_text(known)
        command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", f"3.{FIRST_PYTHON}"]
        subprocess.run([*command, *arguments, asked, "-c", kept, "-o", lock], cwd=ROOT, check=True)
        found = tomllib.loads(lock.read_text())["packages"]
    packages = {package["name"]: package for package in found}
    # Where the newest has left our oldest Python, uv takes two; an older one that all of them can install will do.
    assert len(packages) == len(found), f"two versions of one package: write the older into {OUT}, and run this again"
    return packages


def known_versions() -> str:
    lines = [line for path in OUT.glob("*.txt") for line in path.read_text().splitlines()]
    pinned = [line.split()[0] for line in lines if re.match(r"[\w.-]+==[^+]+$", line.split()[0])]
    return "\n".join(sorted(set(pinned)))


def is_for_us(wheel: str) -> bool:
    tags = parse_wheel_filename(wheel)[3]
    return any(PLATFORM.fullmatch(tag.platform) and runs_on_our_python(tag.interpreter, tag.abi) for tag in tags)


def runs_on_our_python(interpreter: str, abi: str) -> bool:
    """cp39-abi3 runs on 3.9 and later, cp311-cp311 on 3.11 alone; cp314-cp314t is for another build of Python."""
    version = re.fullmatch(r"cp3(\d+)", interpreter)
    if not version:
        return interpreter == "py3"
    first = 0 if abi in ("abi3", "none") else FIRST_PYTHON
    return first <= int(version[1]) <= LAST_PYTHON and abi in ("abi3", "none", interpreter)


def entry(package: dict[str, Any]) -> str:
    """One requirement: name==version ; marker, and its hashes."""
    wheels = {wheel["url"].rpartition("/")[2]: wheel["hashes"]["sha256"] for wheel in package["wheels"]}
    hashes = [sha256 for name, sha256 in sorted(wheels.items()) if is_for_us(name)]
    assert hashes, f"{package['name']} has no wheel for us"
    marker = f" ; {package['marker']}" if "marker" in package else ""
    return requirement(f"{package['name']}=={package['version']}{marker}", hashes)


def requirement(pinned: str, hashes: list[str]) -> str:
    return " \\\n".join([pinned, *(f"    --hash=sha256:{sha256}" for sha256 in hashes)])


def is_of_torch(name: str) -> bool:
    return name in ("torch", "triton") or name.startswith(("nvidia-", "cuda-"))


def is_for_windows(package: dict[str, Any]) -> bool:
    return package.get("marker") == "sys_platform == 'win32'"


def main() -> None:
    known = known_versions()
    train = resolve(BUILD_TOOL, known, "pyproject.toml")
    dev = resolve(BUILD_TOOL, known, "pyproject.toml", "--extra", "dev") | resolve(ALONE, known, "--no-deps")
    audit = resolve(AUDIT_TOOL, known)
    everything = audit | dev
    sets = {
        "train": [name for name in train if not is_of_torch(name)],
        "torch": [name for name in train if is_of_torch(name)],
        "dev": [name for name in dev if name not in train],
        "audit": list(audit),
    }
    for subject, names in sets.items():
        packages = [everything[name] for name in sorted(names) if not is_for_windows(everything[name])]
        write(subject, "\n".join(map(entry, packages)))
    assert f"{train['torch']['version']}+cpu" == CPU_VERSION, "CPU_VERSION and CPU_SHA256 are of another torch"
    write("torch-cpu", requirement(f"torch=={CPU_VERSION}", [CPU_SHA256]))


def write(subject: str, entries: str) -> None:
    (OUT / f"{subject}.txt").write_text(f"{SUBJECTS[subject]}{HEADER}{entries}\n")


if __name__ == "__main__":
    main()
