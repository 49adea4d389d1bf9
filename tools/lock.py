"""Write requirements/*.txt: every version that `make` installs, with the sha256 of each of its wheels.

To change a version, edit it in each of these files, or delete its entry to take the newest, and run this script.  It
needs uv (pip install uv), which resolves for all platforms at once without downloading wheels.

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
DOCS_TOOLS = "mkdocs-material\nmkdocstrings[python]\nruff\n"  # ruff formats the signatures
# Installed without their dependencies: a CUDA build of torch, a client of a model hub, and pandas and scipy, which
# MLPerf's compliance checker does not use.
WITHOUT_DEPENDENCIES = "torchvision\ntimm\nmlperf-logging\n"
# The CPU-only build of torch comes from a separate index or a folder (pip's --find-links); CI has this one.
CPU_VERSION = "2.13.0+cpu"
CPU_SHA256 = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
FIRST_PYTHON, LAST_PYTHON = 11, 14
PLATFORM = re.compile(r"any|(manylinux|linux).*_(x86_64|aarch64)|macosx_.*")
HEADER = f"""\
# Written by tools/lock.py: versions, and the sha256 of every wheel for CPython 3.{FIRST_PYTHON} to 3.{LAST_PYTHON}
# on Linux (x86_64 and aarch64, glibc) and macOS.  No source archives: a build would download files without a hash.
"""
SUBJECTS = {
    "train": "# Installed by `make train` in addition to torch: the dependencies of megabatch, and its build tool.\n",
    "torch": "# torch from the package index, with CUDA and its libraries on Linux.\n",
    "torch-cpu": "# torch without CUDA, used if pip is configured with a source for it: the one wheel that CI has.\n",
    "dev": "# Also installed by `make test` and `make bench`: the extra `dev`, torchvision, timm and mlperf-logging.\n",
    "audit": "# Installed by `make audit`, in a separate .venv.\n",
    "docs": "# Installed by `make docs`, in a separate .venv.\n",
}
Packages = dict[str, dict[str, Any]]


def resolve(wanted: str, known: str, *arguments: str) -> Packages:
    """Resolve `wanted` and the arguments of uv; return the packages by name, in the `known` versions."""
    with tempfile.TemporaryDirectory() as folder:
        requirements, constraints, lock = (Path(folder, name) for name in ("wanted.in", "known.txt", "pylock.toml"))
        requirements.write_text(wanted)
        constraints.write_text(known)
        command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", f"3.{FIRST_PYTHON}"]
        subprocess.run([*command, *arguments, requirements, "-c", constraints, "-o", lock], cwd=ROOT, check=True)
        found = tomllib.loads(lock.read_text())["packages"]
    packages = {package["name"]: package for package in found}
    # If the newest version has dropped our oldest Python, uv takes two versions.
    assert len(packages) == len(found), f"two versions of one package: pin the older one in {OUT} and run this again"
    return packages


def known_versions() -> str:
    lines = [line for path in OUT.glob("*.txt") for line in path.read_text().splitlines()]
    pinned = [line.split()[0] for line in lines if re.match(r"[\w.-]+==[^+]+$", line.split()[0])]
    return "\n".join(sorted(set(pinned)))


def is_for_us(wheel: str) -> bool:
    tags = parse_wheel_filename(wheel)[3]
    return any(PLATFORM.fullmatch(tag.platform) and runs_on_our_python(tag.interpreter, tag.abi) for tag in tags)


def runs_on_our_python(interpreter: str, abi: str) -> bool:
    """Return whether one of our Pythons installs a wheel with these tags.

    cp39-abi3 and py311-none run on that version and later, cp311-cp311 only on 3.11; cp314-cp314t needs a
    free-threaded Python.
    """
    if interpreter == "py3":
        return True
    version = re.fullmatch(r"(?:cp|py)3(\d+)", interpreter)
    if not version:
        return False
    first = 0 if abi in ("abi3", "none") else FIRST_PYTHON
    return first <= int(version[1]) <= LAST_PYTHON and abi in ("abi3", "none", interpreter)


def entry(package: dict[str, Any]) -> str:
    """Return one requirement: name==version ; marker, and its hashes."""
    wheels = {wheel["url"].rpartition("/")[2]: wheel["hashes"]["sha256"] for wheel in package["wheels"]}
    hashes = [sha256 for name, sha256 in sorted(wheels.items()) if is_for_us(name)]
    assert hashes, f"{package['name']} has no wheel for our platforms"
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
    dev = resolve(BUILD_TOOL, known, "pyproject.toml", "--extra", "dev")
    dev |= resolve(WITHOUT_DEPENDENCIES, known, "--no-deps")
    audit = resolve(AUDIT_TOOL, known)
    docs = resolve(DOCS_TOOLS, known)
    sets: dict[str, Packages] = {
        "train": {name: package for name, package in train.items() if not is_of_torch(name)},
        "torch": {name: package for name, package in train.items() if is_of_torch(name)},
        "dev": {name: package for name, package in dev.items() if name not in train},
        "audit": audit,
        "docs": docs,
    }
    for subject, packages in sets.items():
        wanted = [packages[name] for name in sorted(packages) if not is_for_windows(packages[name])]
        write(subject, "\n".join(map(entry, wanted)))
    assert f"{train['torch']['version']}+cpu" == CPU_VERSION, "update CPU_VERSION and CPU_SHA256 to the locked torch"
    write("torch-cpu", requirement(f"torch=={CPU_VERSION}", [CPU_SHA256]))


def write(subject: str, entries: str) -> None:
    (OUT / f"{subject}.txt").write_text(f"{SUBJECTS[subject]}{HEADER}{entries}\n")


if __name__ == "__main__":
    main()
