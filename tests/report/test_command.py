"""The command `megabatch report`."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.errors import UserError
from megabatch.report.page import write_report
from tests.support.made_up_run import make_run


def test_page_is_private_and_in_the_run_folder(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20)
    result = CliRunner().invoke(app, ["report", str(folder)], catch_exceptions=False)
    assert result.output == f"report    {folder / 'report.html'}\n"
    assert stat.S_IMODE((folder / "report.html").stat().st_mode) == 0o600
    assert not list(folder.glob(".writing-*"))


def test_page_of_several_runs_is_in_the_current_folder_or_at_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        make_run(Path(name), steps=20)
    CliRunner().invoke(app, ["report", "a", "b"], catch_exceptions=False)
    assert Path("report.html").read_text().startswith("<!doctype html>")
    CliRunner().invoke(app, ["report", "a", "b", "--out", "a/both.html"], catch_exceptions=False)
    assert "2 runs" in Path("a/both.html").read_text()


def test_open_shows_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    folder = make_run(tmp_path / "run", steps=20)
    CliRunner().invoke(app, ["report", str(folder), "--open"], catch_exceptions=False)
    assert opened == [(folder / "report.html").as_uri()]


@pytest.mark.parametrize("out", ["missing/page.html", "run"])
def test_unwritable_output_is_a_user_error(out: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20)
    with pytest.raises(UserError, match=r"cannot be written: .*; .*--out"):
        write_report([folder], tmp_path / out)


def test_report_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-X", "importtime", "-m", "megabatch", "report", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 0, result.stderr
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in result.stderr.splitlines()}
    assert "megabatch" in imported and not imported & {"torch", "numpy", "matplotlib", "PIL"}
