"""Imports point down only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megabatch

PACKAGE = Path(megabatch.__file__).parent
# Highest first; the members of one layer do not import each other.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"fuzz"},
    {"studies"},
    {"sweep", "selftest", "chaos"},
    {"train"},
    {"preflight"},
    {"config"},
    {"comm", "precision", "optim", "models", "data"},
    {"ranks", "report"},
    {"runs"},
    {"simulate"},
    {"planning"},
    {"disk", "own_code"},
    {"torch_api"},
    {"errors", "recipes", "", "terminal", "toml"},
    {"given_files"},
    {"text", "decoding", "regular_files", "intervals"},
]
LEVEL = {part: -depth for depth, layer in enumerate(LAYERS) for part in layer}


def part_of(module: str) -> str:
    return [*module.split("."), ""][1]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            found.add(str(node.module))
            if node.module == "megabatch":
                found |= {f"megabatch.{alias.name}" for alias in node.names if alias.name in LEVEL}
    return found


def test_imports_point_down_and_siblings_do_not_know_each_other() -> None:
    wrong = []
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 20
    for path in files:
        own = part_of(".".join(["megabatch", *path.relative_to(PACKAGE).with_suffix("").parts]))
        own = "" if own == "__init__" else own
        for module in imports(path):
            is_ours = module.split(".")[0] == "megabatch" and part_of(module) != own
            if is_ours and LEVEL[part_of(module)] >= LEVEL[own]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert not wrong


def test_planning_is_pure() -> None:
    used = {module.split(".")[0] for path in (PACKAGE / "planning").glob("*.py") for module in imports(path)}
    assert used <= {"math", "typing", "msgspec", "megabatch", "itertools", "collections", "functools", "hashlib"}


@pytest.mark.parametrize("room", ["planning", "simulate", "runs", "report", "disk", "intervals"])
def test_what_reads_and_plans_does_not_import_torch(room: str) -> None:
    path = PACKAGE / room
    modules = [f"megabatch.{room}.{file.stem}" for file in path.glob("[!_]*.py")] or [f"megabatch.{room}"]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_file_is_too_long_to_read() -> None:
    lengths = {path.relative_to(PACKAGE): path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > 300} == {}


def test_what_tests_share_is_in_no_test_file() -> None:
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
