import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megabatch.cli.train import choose_recipe
from megabatch.config.loading import load_config
from megabatch.config.schema import CheckpointSettings, RunConfig
from megabatch.errors import UserError
from megabatch.io.disk import replace_link
from megabatch.runs.folder import RunFolder
from megabatch.runs.model_card import ModelCard
from megabatch.runs.records import Status
from megabatch.runs.totals import RunTotals
from megabatch.text import one_line
from megabatch.training.checkpoint.format import Description, write_checkpoint
from megabatch.training.checkpoint.resume import Start, choose_start, read_start, recipe_difference, stored_tuning
from megabatch.training.checkpoint.save import Checkpoints
from tests.support.users import as_another_user


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config_of(*overrides: str) -> RunConfig:
    return load_config("fashion", overrides)


def make_run(folder: str, config: RunConfig, status: Status | None = None) -> None:
    """Write a run's folder without checkpoints; status None means that the run was killed."""
    Path(folder).mkdir(parents=True)
    (Path(folder) / "config.toml").write_text(config.to_toml())
    if status:
        summary = RunTotals(global_batch=1, target_top1=None).summary(status)
        (Path(folder) / "summary.json").write_bytes(msgspec.json.encode(summary))


def start(*overrides: str, resume: str = "auto") -> Start:
    return choose_start(config_of(*overrides), resume)


def test_the_first_run_has_the_first_number() -> None:
    assert start() == Start(Path("runs/fashion-001"), None, is_new=True)
    assert start("run.dir=a/b") == Start(Path("a/b"), None, is_new=True)
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("status", ["stopped", "diverged", "failed", None])
def test_an_unfinished_run_of_the_same_recipe_resumes(status: Status | None) -> None:
    make_run("runs/fashion-007", config_of(), status)
    assert start().folder == Path("runs/fashion-007")
    assert start("run.dir=runs/fashion-007").folder == Path("runs/fashion-007")
    assert start(resume="runs/fashion-007").folder == Path("runs/fashion-007")
    assert start(resume="never").folder == Path("runs/fashion-008")


def test_settings_that_do_not_change_results_do_not_start_another_run() -> None:
    make_run(
        "runs/fashion-001", config_of("checkpoint.keep=5", "run.threads=3", "about=x", "provenance.seed=assumed: x")
    )
    others = ("checkpoint.every_steps=1", "comm.timeout_s=9", "comm.timeline=true")
    assert start(*others).folder == Path("runs/fashion-001")


def test_auto_resumes_a_run_with_the_value_that_it_means() -> None:
    make_run("runs/fashion-001", config_of("data.center_crop=0.875", "data.validation=0.1"))
    assert start("data.validation=auto").folder == Path("runs/fashion-001")
    assert start("data.validation=auto", "data.center_crop=1.0").folder == Path("runs/fashion-002")
    assert start().folder == Path("runs/fashion-002")


def test_a_finished_run_is_not_resumed() -> None:
    make_run("runs/fashion-001", config_of(), "finished")
    assert start().folder == Path("runs/fashion-002")
    with pytest.raises(UserError, match=r"runs/fashion-001 .*finished; give another run.dir"):
        start("run.dir=runs/fashion-001")


def test_a_different_recipe_is_refused_with_the_first_difference() -> None:
    make_run("runs/fashion-001", config_of("optim.learning_rate=0.1"))
    assert start().folder == Path("runs/fashion-002")
    with pytest.raises(UserError, match=r"with optim.learning_rate=0.1, not 0.2; give another run.dir"):
        start("run.dir=runs/fashion-001")


def test_a_run_with_train_steps_is_resumed_by_the_same_number() -> None:
    make_run("runs/fashion-001", config_of("train.steps=5"))
    assert start("train.steps=5").folder == Path("runs/fashion-001")
    assert start().folder == start("train.steps=6").folder == Path("runs/fashion-002")
    make_run("runs/fashion-002", config_of("train.epochs=1"))
    assert start("train.epochs=1").folder == Path("runs/fashion-002")  # its warm-up is shortened as before


def test_an_older_unfinished_run_resumes_and_numbers_exceed_three_digits() -> None:
    make_run("runs/fashion-003", config_of())
    make_run("runs/fashion-1000", config_of("seed=5"))
    make_run("runs/fashion-full-002", config_of())
    assert start().folder == Path("runs/fashion-003")
    assert start("seed=9").folder == Path("runs/fashion-1001")


def test_a_run_with_only_damaged_checkpoints_is_not_overwritten() -> None:
    make_run("runs/fashion-001", config_of())
    Path("runs/fashion-001/checkpoints/step-00000007").mkdir(parents=True)
    with pytest.raises(UserError, match="runs/fashion-001: all checkpoints are damaged"):
        read_start(start(), print)


def test_a_running_run_is_not_resumed() -> None:
    make_run("runs/fashion-001", config_of())
    with RunFolder(Path("runs/fashion-001")):
        assert start().folder == Path("runs/fashion-002")


def test_a_folder_with_other_files_is_refused_and_unchanged() -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("precious")
    for wrong in ("run.dir=mine", "run.dir=mine/thesis.txt"):
        with pytest.raises(UserError, match="exists and is not an empty folder"):
            start(wrong)
    with pytest.raises(UserError, match=r"--resume mine .*neither"):
        start(resume="mine")
    assert Path("mine/thesis.txt").read_text() == "precious"


def test_a_run_killed_before_its_recipe_was_written_starts_again() -> None:
    Path("run").mkdir()
    (Path("run") / ".lock").touch()
    (Path("run") / ".writing-config.toml-123").touch()
    assert start("run.dir=run") == Start(Path("run"), None, is_new=True)
    (Path("run") / "notes.txt").touch()
    with pytest.raises(UserError, match="is not an empty folder"):
        start("run.dir=run")


def test_a_relative_source_means_the_same_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    make_run("run", config_of("data.source=mine"), "stopped")
    Path("run/env.json").write_text(json.dumps({"directory": str(tmp_path)}))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recipe, overrides = choose_recipe(["train.target_top1=0.9"], "../run", ())
    assert overrides == [f"data.source={tmp_path / 'mine'}", "train.target_top1=0.9"]
    config = load_config(recipe, overrides[:1])
    assert recipe_difference(Path("../run"), config) is None
    (tmp_path / "other").mkdir()
    assert "data.source='mine'" in str(recipe_difference(Path("../run"), load_config(recipe, ["data.source=../other"])))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root becomes another user")
@pytest.mark.parametrize(("given", "resume"), [("theirs", "auto"), ("theirs", "never"), (None, "theirs")])
def test_a_private_run_of_another_user_is_refused_in_one_line(given: str | None, resume: str) -> None:
    config = config_of(*[f"run.dir={given}"] if given else [])
    with RunFolder(Path("theirs")) as folder:
        folder.begin(config.to_toml(), {}, 0)

    def start() -> str:
        try:
            return str(choose_start(config, resume))
        except UserError as error:
            return str(error)

    open_to_all = [Path.cwd(), *[parent for parent in Path.cwd().parents if parent.stat().st_mode & 0o77 == 0]]
    modes = {path: path.stat().st_mode for path in open_to_all}
    for path in open_to_all:
        path.chmod(0o755)  # instead of pytest's 0700
    said = as_another_user(start)
    for path, mode in modes.items():
        path.chmod(mode)
    assert said.endswith("theirs: permission denied; ask its owner for access, or give another folder")


def outside(tmp_path: Path) -> Path:
    """Create a folder outside the run that looks like a checkpoint folder."""
    (tmp_path / "outside/step-00000009").mkdir(parents=True)
    (tmp_path / "outside/step-00000009/thesis.txt").write_text("precious")
    return tmp_path / "outside"


STRAYS: dict[str, Callable[[Path], object]] = {
    "step-junk": Path.mkdir,
    "step--1": Path.mkdir,
    "step-": Path.mkdir,
    "step-9": Path.mkdir,
    "step-00000005 (copy)": Path.mkdir,
    "step-\x1b[31m": Path.mkdir,
    "step-00000009": Path.touch,
    "step-00000010": os.mkfifo,
    "step-00000011": lambda path: path.symlink_to(path.name),
    "step-00000012": lambda path: path.symlink_to("../../../outside/step-00000009"),
}


def test_entries_that_are_only_named_like_checkpoints_are_ignored_and_kept(tmp_path: Path) -> None:
    outside(tmp_path)
    make_run("runs/fashion-001", config_of())
    folder = Path("runs/fashion-001/checkpoints")
    folder.mkdir()
    for name, make in STRAYS.items():
        make(folder / name)
    reports: list[str] = []
    found = start()
    assert found.checkpoint is None and read_start(found, reports.append) is None
    assert len(reports) == len(STRAYS) and not any("\x1b" in one_line(report) for report in reports)
    Checkpoints(found.folder, CheckpointSettings(keep=1), first_step=0).close()
    assert {path.name for path in folder.iterdir()} == set(STRAYS)
    assert (tmp_path / "outside/step-00000009/thesis.txt").read_text() == "precious"


def test_a_file_with_the_name_of_a_checkpoint_is_not_taken_for_a_saved_one(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").touch()
    totals = RunTotals(global_batch=1, target_top1=None, steps=3)
    card = ModelCard(
        model={"name": "small_cnn"},
        classes=["a"],
        num_channels=1,
        image_size=8,
        test_image_size=8,
        center_crop=1.0,
        mean=[0.0],
        deviation=[1.0],
        precision="fp32",
        recipe={},
    )
    description = Description(step=3, computed_by="", data="", tuning=None, totals=totals, card=card, checksum="")
    with pytest.raises(NotADirectoryError):
        write_checkpoint(tmp_path, {}, description)


@pytest.mark.parametrize("link", ["last", "best"])
def test_a_link_to_another_folder_is_replaced_and_not_followed(tmp_path: Path, link: str) -> None:
    elsewhere = outside(tmp_path)
    for target in (elsewhere, Path("nowhere"), Path(link)):
        folder = tmp_path / f"run-{target.name}/checkpoints"
        folder.mkdir(parents=True)
        (folder / link).symlink_to(target)
        Checkpoints(folder.parent, CheckpointSettings(), first_step=0).close()
        replace_link(folder / link, "step-00000001")
        assert (folder / link).readlink() == Path("step-00000001")
    assert (elsewhere / "step-00000009/thesis.txt").read_text() == "precious"


def test_checkpoints_outside_the_run_are_refused_and_not_removed(tmp_path: Path) -> None:
    elsewhere = outside(tmp_path)
    (tmp_path / "run").mkdir()
    makers: list[Callable[[Path], object]] = [
        Path.touch,
        os.mkfifo,
        lambda path: path.symlink_to(elsewhere),
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.symlink_to(path),
    ]
    for make in makers:
        folder = tmp_path / "run/checkpoints"
        make(folder)
        with pytest.raises(UserError, match=r"checkpoints is a link .*not a folder"):
            Checkpoints(tmp_path / "run", CheckpointSettings(), first_step=0)
        folder.unlink()
    for name in ("last", "best"):
        (tmp_path / "run/checkpoints" / name).mkdir(parents=True)
        with pytest.raises(UserError, match=f"checkpoints/{name} is not a symbolic link"):
            Checkpoints(tmp_path / "run", CheckpointSettings(), first_step=0)
        (tmp_path / "run/checkpoints" / name).rmdir()
    assert (elsewhere / "step-00000009/thesis.txt").read_text() == "precious"


def test_an_invalid_stored_plan_is_reported_and_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("runs/fashion-001", config_of())
    assert stored_tuning(start()) is None and capsys.readouterr().err == ""
    for content in (b"", b"[" * 100_000, b"{}", b"\xff"):
        Path("runs/fashion-001/plan.json").write_bytes(content)
        assert stored_tuning(start()) is None
        said = capsys.readouterr().err
        assert said.startswith("megabatch: runs/fashion-001/plan.json has no readable plan") and said.count("\n") == 1
