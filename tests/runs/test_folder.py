import json
import subprocess
import sys
from pathlib import Path

import pytest

from megabatch.config.loading import load_config
from megabatch.errors import UserError
from megabatch.runs.folder import RunFolder
from megabatch.runs.reader import is_running, length_up_to
from tests.support.records import step_record

HOLD = "import sys, pathlib; from megabatch.runs.folder import RunFolder; RunFolder(pathlib.Path(sys.argv[1]))"


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    assert not is_running(tmp_path)
    with RunFolder(tmp_path / "run"):
        assert is_running(tmp_path / "run")
        other = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path / "run")], capture_output=True, text=True)
        assert other.returncode == 1 and "is in use by process" in other.stderr
        with pytest.raises(UserError, match="in use"):
            RunFolder(tmp_path / "run")
    assert not is_running(tmp_path / "run")
    with RunFolder(tmp_path / "run"):
        pass


def test_rows_beyond_the_checkpoint_and_half_rows_are_cut(tmp_path: Path) -> None:
    rows = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 2, 2, 3)]
    rows.write_text("".join(lines) + '{"step"')
    assert length_up_to(rows, 2) == len("".join(lines[:3]))
    assert length_up_to(rows, 9) == len("".join(lines))
    with RunFolder(tmp_path) as folder:
        folder.begin(load_config("fashion").to_toml(), {}, step=2)
        folder.write(step_record(3, epoch=1.0, loss=1.0))
    assert [json.loads(line)["step"] for line in rows.read_text().splitlines()] == [1, 2, 2, 3]


def test_a_run_that_begins_again_keeps_no_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\n')
    with RunFolder(tmp_path) as folder:
        folder.begin(load_config("fashion").to_toml(), {}, step=0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert load_config(str(tmp_path / "config.toml")) == load_config("fashion")
