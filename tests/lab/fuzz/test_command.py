import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megabatch_lab.fuzz.catalog import FORMATS
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.errors import UserError


def test_nothing_escapes_of_400_inputs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megabatch", "fuzz", "--inputs", "400", "--seconds", "60", "--json", "fuzz.json"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "80"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    assert (found.returncode, found.stderr) == (0, ""), found.stdout + found.stderr
    assert "400 inputs, seed 7: nothing escaped" in found.stdout
    report = json.loads((tmp_path / "fuzz.json").read_text())
    assert report["escapes"] == [] and [count["format"] for count in report["counts"]] == list(FORMATS)
    for count in report["counts"]:
        assert count["inputs"] == count["ok"] + count["one_line"] >= 20 and count["past_header"] > 0.2 * count["inputs"]
    assert sum(count["one_line"] for count in report["counts"]) > 120  # otherwise the inputs are too harmless
    assert [path.name for path in tmp_path.iterdir()] == ["fuzz.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["jpg"], "FORMAT='jpg' is not one of .* nearest: FORMAT=jpeg"),
        (["--json", "nowhere/fuzz.json"], "the folder .*nowhere does not exist"),
    ],
)
def test_invalid_arguments_fail_before_anything_is_read(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, ["fuzz", *words], catch_exceptions=False)
