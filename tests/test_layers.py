"""Folders and files import each other downwards, without cycles, and the product never imports its lab."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import megabatch

PACKAGE = Path(megabatch.__file__).parent
LAB = Path(__file__).parents[1] / "lab/megabatch_lab"
# Highest first; the members of one layer do not import each other.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"experiments"},
    {"preflight", "inference"},
    {"training"},
    {"config"},
    {"comm", "precision", "optim", "models", "data"},
    {"ranks", "report"},
    {"telemetry", "runs"},
    {"simulate"},
    {"planning"},
    {"user_code"},
    {"torch_api", "io"},
    {"errors", "plugins", "recipes", ""},
    {"text"},
]
LEVEL = {part: -depth for depth, layer in enumerate(LAYERS) for part in layer}


def part_of(module: str) -> str:
    return [*module.split("."), ""][1]


def imports(path: Path) -> set[str]:
    """Return every module that a file imports, inside functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            found.add(str(node.module))
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules_of(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*.py")):
        parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_folders_import_only_lower_layers() -> None:
    wrong = []
    for name, path in modules_of(PACKAGE):
        own = part_of(name)
        for module in imports(path):
            if module.split(".")[0] != "megabatch" or part_of(module) not in LEVEL or part_of(module) == own:
                continue
            if LEVEL[part_of(module)] >= LEVEL[own]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert not wrong


@pytest.mark.parametrize("folder", [PACKAGE, LAB])
def test_files_import_each_other_without_cycles(folder: Path) -> None:
    files = dict(modules_of(folder))
    assert len(files) > 20
    try:
        TopologicalSorter({name: (imports(path) & set(files)) - {name} for name, path in files.items()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


CONTRIBUTING = (LAB.parents[1] / "CONTRIBUTING.md").read_text().partition("## Four paths")[2].partition("## Where")[0]
PATHS = re.findall(r"^\*\*(.+?)\*\* \((\d+) files\).*?:\n?(.*?)\n\n", CONTRIBUTING, flags=re.MULTILINE | re.DOTALL)


def files_of(text: str) -> list[str]:
    """Return the files in a text such as: `data/catalog` > `data/pipeline/{order, decoder*}`"""
    found = []
    for folder, names in re.findall(r"`((?:\w+/)*)\{?([^`}]+)\}?`", text):
        found += [folder + name for name in names.replace("\n", " ").split(", ")]
    return found


@pytest.mark.parametrize(("name", "count", "text"), PATHS)
def test_each_file_of_a_path_is_imported_by_an_earlier_one(name: str, count: str, text: str) -> None:
    files = files_of(text)
    assert len(files) == len({*files}) == int(count)
    imported = imports(PACKAGE / f"{files[0]}.py")
    for file in files[1:]:
        assert file.endswith("*") or f"megabatch.{file}".replace("/", ".") in imported, file
        imported |= imports(PACKAGE / f"{file.rstrip('*')}.py")


def test_all_paths_are_tested() -> None:
    assert [name for name, *_ in PATHS] == ["An image", "A gradient", "A recipe", "A record"]


def test_the_product_does_not_import_its_lab() -> None:
    assert not [path for _, path in modules_of(PACKAGE) if any("megabatch_lab" in name for name in imports(path))]


def test_planning_is_pure() -> None:
    used = {module.split(".")[0] for path in (PACKAGE / "planning").glob("*.py") for module in imports(path)}
    assert used <= {
        "math",
        "typing",
        "msgspec",
        "megabatch",
        "itertools",
        "collections",
        "functools",
        "hashlib",
        "bisect",
    }


@pytest.mark.parametrize("folder", ["planning", "simulate", "runs", "report", "io"])
def test_folders_that_plan_and_read_do_not_import_torch(folder: str) -> None:
    modules = [f"megabatch.{folder}.{file.stem}" for file in (PACKAGE / folder).glob("[!_]*.py")]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_tests_share_code_only_through_tests_support() -> None:
    for path in Path(__file__).parent.rglob("*.py"):
        shared = [module for module in imports(path) if module.startswith("tests.")]
        assert all(module.startswith("tests.support") for module in shared), path


def test_only_ranks_and_comm_use_torch_distributed() -> None:
    users = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if any(module.startswith("torch.distributed") for module in imports(path))
    }
    assert users == {"comm", "ranks", "torch_api.py"}
