"""Every dependency is used, every import is declared, and every version is pinned with its hashes."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.licences import is_allowed
from tools.lock import is_for_us

ROOT = Path(__file__).parents[1]
OURS = {"megabatch", "tests", "megabatch_lab", "tools"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}  # by module
# Packages that our files do not import: the package that imports them, and the name in our code that causes it.
INDIRECT = {
    "tomli-w": ("msgspec", "msgspec.toml.encode"),
    "onnx": ("torch", "torch.onnx.export"),
    "onnxscript": ("torch", "torch.onnx.export"),
    "tensorboard": ("torch", "torch.utils.tensorboard"),
    "mpich": ("mpi4py", "mpiexec"),
}
TEST_TOOLS = {"pytest-xdist", "pytest-timeout", "ruff", "mypy"}  # run by the Makefile and pyproject.toml
WITHOUT_DEPENDENCIES = {"torchvision", "timm", "mlperf-logging"}  # installed by the Makefile
OF_MODELS = {"timm"}  # imported only for a model of that package
NOT_INSTALLED = {"timm": {"huggingface-hub"}, "mlperf-logging": {"pandas", "scipy"}}


def declared(extra: str | None = None) -> set[str]:
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def pinned(subject: str) -> dict[str, str]:
    text = (ROOT / f"requirements/{subject}.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, flags=re.MULTILINE))


def modules_named(node: ast.AST) -> Iterator[str]:
    """Yield modules in import statements, and in calls such as import_module("onnxruntime")."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield str(node.module)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        name = node.args[0]
        if node.func.attr == "import_module" and isinstance(name, ast.Constant):
            yield str(name.value)


@functools.cache
def modules_imported(folder: str) -> set[str]:
    nodes = (node for path in (ROOT / folder).rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return {name.split(".")[0] for node in nodes for name in modules_named(node)}


def imported(*folders: str) -> set[str]:
    """Return the distributions that the files of our folders import."""
    modules = {module for folder in folders for module in modules_imported(folder)}
    return {
        canonicalize_name(DISTRIBUTIONS.get(module, module))
        for module in modules - OURS
        if module not in sys.stdlib_module_names
    }


def imported_indirectly(*folders: str) -> set[str]:
    text = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    direct = imported(*folders)
    return {name for name, (via, words) in INDIRECT.items() if via in direct and words in text}


def test_every_import_of_the_package_is_declared() -> None:
    extras = declared("studies") | declared("export")
    assert imported("src") <= declared() | extras | OF_MODELS


def test_every_dependency_is_imported_by_the_package() -> None:
    assert declared() <= imported("src") | imported_indirectly("src")


def test_every_extra_is_imported_by_the_package() -> None:
    assert declared("studies") | declared("export") <= imported("src") | imported_indirectly("src")


def test_extras_are_imported_only_inside_functions() -> None:
    """A plain install has no extras, and its modules must still import."""
    extras = declared("studies") | declared("export")
    for path in (ROOT / "src").rglob("*.py"):
        at_import = {name.split(".")[0] for node in ast.parse(path.read_text()).body for name in modules_named(node)}
        assert not at_import & extras, path


def test_imports_of_tests_and_lab_match_the_declared_dependencies() -> None:
    used = imported("tests", "lab", "src") | imported_indirectly("lab", "src")
    # pytest installs packaging.
    assert used - {"packaging"} <= declared() | declared("dev") | WITHOUT_DEPENDENCIES
    assert declared("dev") | WITHOUT_DEPENDENCIES <= used | TEST_TOOLS


def test_every_version_is_pinned_once_and_has_a_hash() -> None:
    train, torch, dev = (pinned(subject) for subject in ("train", "torch", "dev"))
    assert not train.keys() & torch.keys() | train.keys() & dev.keys() | torch.keys() & dev.keys()
    assert declared() <= train.keys() | torch.keys()
    assert declared("dev") | WITHOUT_DEPENDENCIES <= dev.keys()
    assert pinned("torch-cpu") == {"torch": f"{torch['torch']}+cpu"}
    for path in (ROOT / "requirements").glob("*.txt"):
        entries = re.sub(r" \\\n +", " ", re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)).splitlines()
        assert entries and all(
            re.fullmatch(r"[\w.-]+==[^\\]*?( --hash=sha256:[0-9a-f]{64})+", line) for line in entries
        )


def test_requirements_of_pinned_packages_are_pinned_in_allowed_versions() -> None:
    """Packages are installed without dependencies, so pip does not report a missing one."""
    versions = pinned("train") | pinned("torch") | pinned("dev")
    for name in versions:
        try:
            if Version(version(name)).public != versions[name]:  # `make matrix` installs other versions of torch
                continue
            lines = [Requirement(line) for line in requires(name) or []]
        except PackageNotFoundError:  # CUDA's libraries, and packages for other platforms
            continue
        for line in lines:
            required = canonicalize_name(line.name)
            if (line.marker and not line.marker.evaluate({"extra": ""})) or required in NOT_INSTALLED.get(name, ()):
                continue
            assert line.specifier.contains(versions[required], prereleases=True), f"{name} requires {line}"


def test_the_licences_page_lists_the_pinned_versions() -> None:
    """`make licences` writes docs/licences.md."""
    rows = re.findall(r"^\| ([\w.-]+) \| (\d\S*) \| \S", (ROOT / "docs/licences.md").read_text(), flags=re.MULTILINE)
    assert dict(rows) == pinned("train") | {"torch": pinned("torch")["torch"]} | pinned("dev")


@pytest.mark.parametrize("licence", ["MIT", "Apache-2.0 OR BSD-2-Clause", "(MIT AND Zlib) OR BSD-3-Clause"])
def test_permissive_licences_are_allowed(licence: str) -> None:
    assert is_allowed(licence)


@pytest.mark.parametrize("licence", ["GPL-3.0-only", "MIT AND LGPL-2.1-or-later", "UNKNOWN", "", "None"])
def test_other_licences_are_refused(licence: str) -> None:
    assert not is_allowed(licence)


@pytest.mark.parametrize(
    ("wheel", "is_ours"),
    [
        ("rich-15.0.0-py3-none-any.whl", True),
        ("six-1.17.0-py2.py3-none-any.whl", True),
        ("torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl", True),
        ("torch-2.13.0-cp312-cp312-macosx_14_0_arm64.whl", True),
        ("safetensors-0.8.0-cp38-abi3-manylinux_2_17_aarch64.manylinux2014_aarch64.whl", True),
        ("torch-2.13.0-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("torch-2.13.0-cp314-cp314t-manylinux_2_28_x86_64.whl", False),
        ("torch-2.13.0-cp311-cp311-win_amd64.whl", False),
        ("pillow-13.0.0-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("numpy-2.4.6-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl", False),
    ],
)
def test_only_wheels_for_supported_platforms_are_hashed(wheel: str, is_ours: bool) -> None:
    assert is_for_us(wheel) == is_ours
