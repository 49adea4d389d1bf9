"""The wheel and the source archive work outside the checkout."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from megabatch import __version__
from tools.matrix import PAIRS

pytestmark = pytest.mark.ranks  # starts processes

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/megabatch"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIST_INFO = f"megabatch-{__version__}.dist-info"


def run(command: list[str | Path], inside: Path) -> str:
    """Run a command without the variables that point to the checkout."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV", "PYTEST_CURRENT_TEST"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(command, cwd=inside, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, out: Path, *targets: str) -> list[Path]:
    """Build with the installed build tool of pyproject.toml, without downloads."""
    run(
        [sys.executable, "-m", "hatchling", "build", "-d", out, *(word for one in targets for word in ("-t", one))],
        folder,
    )
    return sorted(out.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the wheel and the source archive."""
    wheel, archive = build(ROOT, tmp_path_factory.mktemp("dist"), "wheel", "sdist")
    assert (wheel.suffix, archive.suffix) == (".whl", ".gz")
    return wheel, archive


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        found = {name for name in wheel.namelist() if not name.startswith(DIST_INFO)}
        for name in found:
            assert wheel.read(name) == (ROOT / "src" / name).read_bytes(), name
    files = {path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert found == {path.relative_to(ROOT / "src").as_posix() for path in files}
    assert {Path(name).suffix for name in found} >= {".py", ".toml", ".npz", ".json", ".LICENSE"}
    assert "megabatch/py.typed" in found  # without it, type checkers ignore the annotations of an installed package


def test_the_wheel_has_the_dependencies_of_pyproject_and_the_licences(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        metadata = BytesParser().parsebytes(wheel.read(f"{DIST_INFO}/METADATA"))
        licences = {Path(name).name for name in wheel.namelist() if name.startswith(f"{DIST_INFO}/licenses/")}
    required = {Requirement(line) for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert required == {Requirement(line) for line in PROJECT["dependencies"]}
    assert licences == {"LICENSE", "fashion_mnist_10k.LICENSE"}


def test_the_classifiers_name_the_python_versions_of_the_matrix(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        metadata = BytesParser().parsebytes(wheel.read(f"{DIST_INFO}/METADATA"))
    classifiers = metadata.get_all("Classifier", [])
    named = [line.rpartition(" :: ")[2] for line in classifiers if re.search(r":: Python :: \d+\.\d+$", line)]
    assert named == sorted({pair.partition(":")[0] for pair in PAIRS})
    assert "Typing :: Typed" in classifiers


def test_the_required_versions_are_those_of_the_matrix() -> None:
    pythons, torches = ({pair.split(":")[place] for pair in PAIRS} for place in (0, 1))
    torch = next(each for each in map(Requirement, PROJECT["dependencies"]) if each.name == "torch").specifier
    minor = sorted(tuple(map(int, version.split(".")[:2])) for version in torches)
    assert PROJECT["requires-python"] == f">={min(pythons)}"
    assert str(torch) == f"<{minor[-1][0]}.{minor[-1][1] + 1},>={minor[0][0]}.{minor[0][1]}"


def test_the_source_archive_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(built[1]) as archive:
        for member in archive:  # extractall has a filter since Python 3.11.4
            archive.extract(member, tmp_path)
    (rebuilt,) = build(tmp_path / f"megabatch-{__version__}", tmp_path / "dist", "wheel")
    assert rebuilt.read_bytes() == built[0].read_bytes()
    assert (tmp_path / f"megabatch-{__version__}/CITATION.cff").is_file()


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return bin/ of an environment with megabatch from the wheel and its dependencies from this environment."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder)
    install: list[str | Path] = [sys.executable, "-m", "pip", "--python", folder, "install", "--quiet", "--no-compile"]
    run([*install, "--no-deps", "--no-index", built[0]], folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Python appends the folder after the environment's packages and ignores .pth files in it, such as the checkout's.
    (packages / "rest.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def test_an_installed_wheel_trains_compares_and_simulates_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    imported = run([installed / "python", "-c", "import megabatch; print(megabatch.__file__)"], tmp_path)
    assert Path(imported).is_relative_to(installed.parent)
    trained = run([installed / "megabatch", "train", "smoke"], tmp_path)
    assert "finished" in trained and [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert "finished" in run([installed / "megabatch", "compare", "runs/smoke-001"], tmp_path)
    simulated = run(
        [installed / "megabatch", "simulate", "resnet50", "--cluster", "dgx-h100", "--ranks", "8"], tmp_path
    )
    assert "images/s" in simulated


def test_the_changelog_starts_with_this_version_or_unreleased_changes() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest and newest[1] in (__version__, "Unreleased")


def test_the_citation_is_of_this_version_and_names_the_paper() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    # The format's required fields: https://github.com/citation-file-format/citation-file-format, schema 1.2.0.
    assert cited["cff-version"] == "1.2.0" and all(cited[key] for key in ("message", "title", "authors"))
    assert (cited["title"], cited["version"]) == (PROJECT["name"], __version__)
    assert (cited["type"], cited["license"]) == ("software", PROJECT["license"])
    (paper,) = cited["references"]
    assert paper["type"] == "article" and paper["authors"] and "1807.11205" in paper["url"]
    assert all({"given-names", "family-names"} <= author.keys() or "name" in author for author in cited["authors"])
