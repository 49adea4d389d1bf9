import json
import os
from pathlib import Path

import msgspec
import pytest

from megabatch.cli.train import choose_recipe
from megabatch.config.loading import load_config
from megabatch.config.schema import RunConfig
from megabatch.errors import UserError
from megabatch.runs.folder import RunFolder
from megabatch.runs.records import Status
from megabatch.runs.totals import RunTotals
from megabatch.train.resume import Start, choose_start, newest_of, read_start, why_other
from tests.support.users import as_another_user


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config_of(*overrides: str) -> RunConfig:
    return load_config("fashion", overrides)


def make_run(folder: str, config: RunConfig, status: Status | None = None) -> None:
    """A run's folder without checkpoints; without a status it was killed."""
    Path(folder).mkdir(parents=True)
    (Path(folder) / "config.toml").write_text(config.to_toml())
    if status:
        summary = RunTotals(global_batch=1, target_top1=None).summary(status)
        (Path(folder) / "summary.json").write_bytes(msgspec.json.encode(summary))


def start(*overrides: str, resume: str = "auto") -> Start:
    return choose_start(config_of(*overrides), resume, newest_of)


def test_without_earlier_runs_the_first_number_is_taken() -> None:
    assert start() == Start(Path("runs/fashion-001"), None)
    assert start("run.dir=a/b") == Start(Path("a/b"), None)
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("status", ["stopped", "diverged", "failed", None])
def test_an_unfinished_run_of_the_same_recipe_goes_on(status: Status | None) -> None:
    make_run("runs/fashion-007", config_of(), status)
    assert start().folder == Path("runs/fashion-007")
    assert start("run.dir=runs/fashion-007").folder == Path("runs/fashion-007")
    assert start(resume="runs/fashion-007").folder == Path("runs/fashion-007")
    assert start(resume="never").folder == Path("runs/fashion-008")


def test_what_does_not_change_the_numbers_does_not_make_another_run() -> None:
    make_run("runs/fashion-001", config_of("checkpoint.keep=5", "run.threads=3", "about=x", "marks.seed=assumed: x"))
    others = ("checkpoint.every_steps=1", "comm.timeout_s=9", "comm.timeline=true")
    assert start(*others).folder == Path("runs/fashion-001")


def test_a_run_from_before_there_was_an_auto_goes_on() -> None:
    make_run("runs/fashion-001", config_of("data.center_crop=0.875", "data.validation=0.1"))
    assert start("data.validation=auto").folder == Path("runs/fashion-001")
    assert start("data.validation=auto", "data.center_crop=1.0").folder == Path("runs/fashion-002")
    assert start().folder == Path("runs/fashion-002")


def test_a_finished_run_is_left_alone() -> None:
    make_run("runs/fashion-001", config_of(), "finished")
    assert start().folder == Path("runs/fashion-002")
    with pytest.raises(UserError, match=r"runs/fashion-001 holds this run, and it is finished; give another run.dir"):
        start("run.dir=runs/fashion-001")


def test_another_recipe_is_refused_with_the_first_difference() -> None:
    make_run("runs/fashion-001", config_of("optim.learning_rate=0.1"))
    assert start().folder == Path("runs/fashion-002")
    with pytest.raises(UserError, match=r"with optim.learning_rate=0.1, not 0.2; give another run.dir"):
        start("run.dir=runs/fashion-001")


def test_a_run_of_so_many_steps_is_resumed_by_as_many() -> None:
    make_run("runs/fashion-001", config_of("train.steps=5"))
    assert start("train.steps=5").folder == Path("runs/fashion-001")
    assert start().folder == start("train.steps=6").folder == Path("runs/fashion-002")
    make_run("runs/fashion-002", config_of("train.epochs=1"))
    assert start("train.epochs=1").folder == Path("runs/fashion-002")  # its warm-up is shortened as before


def test_an_older_unfinished_run_goes_on_too_and_numbers_have_no_end() -> None:
    make_run("runs/fashion-003", config_of())
    make_run("runs/fashion-1000", config_of("seed=5"))
    make_run("runs/fashion-full-002", config_of())
    assert start().folder == Path("runs/fashion-003")
    assert start("seed=9").folder == Path("runs/fashion-1001")


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew_in_its_place() -> None:
    make_run("runs/fashion-001", config_of())
    Path("runs/fashion-001/checkpoints/step-00000007").mkdir(parents=True)
    with pytest.raises(UserError, match="runs/fashion-001 has no checkpoint that is whole"):
        read_start(start(), print)


def test_a_run_that_runs_is_left_alone() -> None:
    make_run("runs/fashion-001", config_of())
    with RunFolder(Path("runs/fashion-001")):
        assert start().folder == Path("runs/fashion-002")


def test_a_folder_with_something_else_in_it_is_refused_untouched() -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("precious")
    for wrong in ("run.dir=mine", "run.dir=mine/thesis.txt"):
        with pytest.raises(UserError, match="exists and is not an empty folder"):
            start(wrong)
    with pytest.raises(UserError, match="--resume mine is neither a run's folder nor a checkpoint"):
        start(resume="mine")
    assert Path("mine/thesis.txt").read_text() == "precious"


def test_a_run_that_was_killed_before_its_recipe_was_written_begins_again() -> None:
    Path("run").mkdir()
    (Path("run") / ".lock").touch()
    (Path("run") / ".writing-config.toml-123").touch()
    assert start("run.dir=run") == Start(Path("run"), None)
    (Path("run") / "notes.txt").touch()
    with pytest.raises(UserError, match="is not an empty folder"):
        start("run.dir=run")


def test_a_relative_source_is_the_same_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    make_run("run", config_of("data.source=mine"), "stopped")
    Path("run/env.json").write_text(json.dumps({"directory": str(tmp_path)}))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recipe, overrides = choose_recipe(["train.target_top1=0.9"], "../run", ())
    assert overrides == [f"data.source={tmp_path / 'mine'}", "train.target_top1=0.9"]
    config = load_config(recipe, overrides[:1])
    assert why_other(Path("../run"), config) is None
    (tmp_path / "other").mkdir()
    assert "data.source='mine'" in str(why_other(Path("../run"), load_config(recipe, ["data.source=../other"])))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize(("given", "resume"), [("theirs", "auto"), ("theirs", "never"), (None, "theirs")])
def test_a_run_that_its_user_keeps_to_themselves_is_refused_on_one_line(given: str | None, resume: str) -> None:
    config = config_of(*[f"run.dir={given}"] if given else [])
    with RunFolder(Path("theirs")) as folder:
        folder.begin(config.to_toml(), {}, 0)

    def start() -> str:
        try:
            return str(choose_start(config, resume, newest_of))
        except UserError as error:
            return str(error)

    open_to_all = [Path.cwd(), *[parent for parent in Path.cwd().parents if parent.stat().st_mode & 0o77 == 0]]
    modes = {path: path.stat().st_mode for path in open_to_all}
    for path in open_to_all:
        path.chmod(0o755)  # pytest's own are 0700
    said = as_another_user(start)
    for path, mode in modes.items():
        path.chmod(mode)
    assert said.endswith("theirs is closed to this user; ask its owner to open it, or give another")
