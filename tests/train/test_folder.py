from pathlib import Path

import pytest

from megabatch.errors import UserError
from megabatch.train.folder import make_folder


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_runs_are_numbered() -> None:
    assert [str(make_folder(None, "fashion")) for _ in range(2)] == ["runs/fashion-001", "runs/fashion-002"]
    assert str(make_folder(None, "other")) == "runs/other-001"
    Path("runs/fashion-041").mkdir()
    assert str(make_folder(None, "fashion")) == "runs/fashion-042"


def test_a_named_folder_is_used_as_it_is() -> None:
    assert str(make_folder("a/b", "fashion")) == "a/b"
    assert str(make_folder("a/b", "fashion")) == "a/b"  # it is still empty


def test_a_folder_with_something_in_it_is_refused_untouched() -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("precious")
    with pytest.raises(UserError, match=r"run.dir='mine' exists and is not an empty folder"):
        make_folder("mine", "fashion")
    with pytest.raises(UserError, match=r"run.dir='mine/thesis.txt'"):
        make_folder("mine/thesis.txt", "fashion")
    assert Path("mine/thesis.txt").read_text() == "precious"
