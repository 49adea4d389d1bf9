"""The first hours of a new user: a folder of photos, its flaws, and uses of the trained model."""

import errno
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import megabatch
from megabatch.cli.app import app, arguments_of_user
from megabatch.cli.overrides import load_recipe
from megabatch.config.loading import load_config
from megabatch.data.catalog import load_data_set
from megabatch.errors import NotSaved, UserError
from megabatch.runs.reader import read_records, read_summary
from megabatch.runs.records import EvaluationRecord
from megabatch.training.checkpoint import save
from megabatch.training.checkpoint.card import read_card
from tests.support.photos import make_folder
from tests.support.use import train_photos


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    make_folder(folder / "pets", per_class=10)
    return train_photos(folder / "run", f"data.source={folder / 'pets'}", "train.epochs=3")


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    return result.exit_code, result.output


def test_a_folder_in_place_of_a_recipe_is_trained_with_the_recipe_for_photos(tmp_path: Path) -> None:
    make_folder(tmp_path / "pets")
    config = load_recipe(["pets", "train.epochs=3"])
    assert (config.name, config.data.source, config.train.epochs) == ("photos", "pets", 3)
    make_folder(tmp_path / "photos")  # a recipe has that name
    assert load_recipe(["photos", "data.source=pets"]).data.source == "pets"
    with pytest.raises(UserError, match=r"nor a folder of images.*nearest: "):
        load_recipe(["foto"])
    with pytest.raises(UserError, match="check the path"):  # a path does not resemble a recipe's name
        load_recipe(["photos/pest"])


def test_a_tilde_after_an_option_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell expands `--resume ~/run`, but not `--resume=~/run`."""
    monkeypatch.setattr("sys.argv", ["megabatch", "eval", "run", "--confusion=~/m.csv", "--data", "~x", "data=~/a=~/b"])
    assert arguments_of_user() == ["eval", "run", f"--confusion={tmp_path}/m.csv", "--data", "~x", "data=~/a=~/b"]


def test_a_tilde_in_a_path_is_the_home_folder(tmp_path: Path) -> None:
    config = load_config("photos", ["data.source=~/pets", 'data.also=["~/more"]', "run.dir=~/run", "model.weights=~/w"])
    assert (config.data.source, config.data.also) == (f"{tmp_path}/pets", [f"{tmp_path}/more"])
    assert (config.run.dir, config.model.weights) == (f"{tmp_path}/run", f"{tmp_path}/w")


def test_the_home_of_an_unknown_user_is_a_path_that_does_not_exist() -> None:
    for call in (lambda: invoke("train", "~nouser/pets", "--dry-run"), lambda: megabatch.load("~nouser/run")):
        with pytest.raises(UserError, match="~nouser/"):
            call()


def test_ignored_files_are_counted_by_suffix(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets")
    for name in ("bag/1.heic", "bag/2.HEIC", "coat/notes.txt", "coat/README"):
        (folder / name).touch()
    for _ in range(2):  # from the folder, and from its index
        (line,) = load_data_set(load_config("photos", ["data.source=pets"]).data).warnings
        assert line == (
            f"{folder} has 4 files that are not read as images: 2 .heic, 1 without a suffix, 1 .txt; "
            "convert .heic to JPEG to use them"
        )


def test_check_lists_all_images_that_cannot_be_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets")
    assert invoke("check", "pets")[0] == 0
    bad = {folder / "bag/000.jpg", folder / "coat/003.jpg"}
    for path in bad:
        path.write_bytes(path.read_bytes()[:200])
    code, text = invoke("check", "pets")
    assert code == 1 and all(f"bad       {path} cannot be read" in text for path in bad)
    assert "3 classes (ankle 5, bag 5, coat 5)" in text and "2 of 18 images cannot be read" in text
    assert "pets: 15 + 3 images, " in text
    with pytest.raises(UserError, match=r"data.on_error=skip data.skip_limit=0.07; megabatch check lists all"):
        train_photos(tmp_path / "run", f"data.source={folder}", "data.validation=0.1")


def test_a_full_disk_at_the_end_names_the_model_if_that_is_complete(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(save, "write_checkpoint", fail)
    with pytest.raises(NotSaved, match=r"No space left.*run/model.saf"):
        train_photos(Path("run"), f"data.source={run.parent / 'pets'}", "train.epochs=1")
    assert megabatch.load("run").classes == ("ankle", "bag", "coat")


def test_more_epochs_for_a_finished_run_are_a_new_run_from_its_weights(run: Path, tmp_path: Path) -> None:
    for given in (["--resume", str(run)], [f"{run}/config.toml", f"run.dir={run}"]):
        with pytest.raises(UserError, match=f"{run} is finished.*: megabatch train {run}/config.toml") as error:
            invoke("train", *given, "train.epochs=5")
    with pytest.raises(UserError, match=f"{run} is a run, not a recipe; resume it with --resume {run}, .*config.toml"):
        invoke("train", str(run))
    words = shlex.split(str(error.value).partition("megabatch train ")[2].replace("epochs=N", "epochs=5"))
    code, text = invoke("train", *words, "--dry-run")
    assert code == 0, text
    config = load_recipe(words)
    assert (config.model.weights, config.train.epochs) == (str(run), 5)


def test_fit_takes_a_folder_and_holds_out_a_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = make_folder(tmp_path / "pets", per_class=10)
    (photos / "bag/1.heic").touch()
    settings = ["batch.global=8", "batch.micro=4", "train.epochs=1", "data.image_size=12", "run.threads=1"]
    folder, decoded = load_data_set(load_config("photos", [f"data.source={photos}", *settings[3:4]]).data), []
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (40, 3, 12, 12), np.uint8))
    for train, test, num_test in ((photos, None, 3), (str(photos), 0.4, 12), ((images, torch.arange(40) % 2), 0.2, 8)):
        network = nn.Sequential(nn.Flatten(), nn.Linear(432, 2 if isinstance(train, tuple) else 3))
        overrides = [*settings, f"run.dir={tmp_path}/fit{num_test}"]
        summary = megabatch.fit(network, train, test, recipe="photos", overrides=overrides)
        assert summary.samples_evaluated == num_test
        is_folder, text = not isinstance(train, tuple), " ".join(capsys.readouterr().out.split())
        assert ("has 1 file that is not read as images: 1 .heic" in text) == is_folder
        assert ("tested on 10% of each class, held out" in text) == (test is None)
        decoded.append(read_card(tmp_path / f"fit{num_test}"))
    assert decoded[0] is not None and tuple(decoded[0].classes) == folder.class_names
    with pytest.raises(UserError, match=r"gone does not exist; give the folder of a run"):
        megabatch.load(tmp_path / "gone")
    with pytest.raises(UserError, match=r"test=1.5: .*above 0 and below 1"):
        megabatch.fit(network, photos, 1.5)


def test_fit_trains_on_the_labels_of_a_csv_file(tmp_path: Path) -> None:
    photos = make_folder(tmp_path / "pets", per_class=4)
    rows = [f"{path.relative_to(photos)},{path.parent.name};new" for path in sorted(photos.glob("*/*.jpg"))]
    (photos / "labels.csv").write_text("\n".join(rows))
    settings = ["data.multi_label=true", "loss.name=bce", "batch.global=8", "batch.micro=4", "train.epochs=1"]
    network = nn.Sequential(nn.Flatten(), nn.Linear(432, 4))
    settings += ["data.image_size=12", "run.threads=1", f"run.dir={tmp_path}/several"]
    summary = megabatch.fit(network, photos / "labels.csv", 0.25, recipe="photos", overrides=settings)
    assert summary.mean_average_precision is not None and summary.samples_evaluated == 3
    card = read_card(tmp_path / "several")
    assert card is not None and card.multi_label and card.classes == ["ankle", "bag", "coat", "new"]


def test_patience_and_a_reached_target_end_a_run_early_and_the_best_checkpoints_are_kept(
    run: Path, tmp_path: Path
) -> None:
    source = f"data.source={run.parent / 'pets'}"
    frozen = ["optim.learning_rate=1e-9", "train.epochs=60", "train.patience=2", "checkpoint.keep_best=3"]
    train_photos(tmp_path / "patient", source, *frozen, "checkpoint.keep=1")
    ended = read_summary(tmp_path / "patient")
    rows = [row for row in read_records(tmp_path / "patient") if isinstance(row, EvaluationRecord)]
    best = max(range(len(rows)), key=lambda place: rows[place].top1)
    assert ended is not None and ended.status == "finished" and ended.steps == rows[-1].step and len(rows) == best + 3
    assert ended.ended_early == f"train.patience=2: top-1 was best after step {rows[best].step} (--checkpoint best)"
    assert ended.top1 == rows[-1].top1 and (tmp_path / "patient/model.safetensors").is_file()
    steps = sorted(path.name for path in (tmp_path / "patient/checkpoints").glob("step-*"))
    kept = {row.step for row in sorted(rows, key=lambda row: (-row.top1, row.step))[:3]} | {ended.steps}
    assert steps == [f"step-{step:08}" for step in sorted(kept)]
    train_photos(tmp_path / "quick", source, "train.epochs=30", "train.target_top1=0.01", "train.stop_at_target=true")
    ended = read_summary(tmp_path / "quick")
    assert ended is not None and ended.ended_early == "train.stop_at_target=true: top-1 reached 0.01"
    with pytest.raises(UserError, match=r"there is no target; for example train.target_top1=0.9"):
        load_config("photos", ["train.stop_at_target=true"])
    with pytest.raises(UserError, match=r"train.patience=2 with train.evaluate_every=0: .*evaluate_every=1"):
        load_config("photos", ["train.patience=2", "train.evaluate_every=0"])


def test_eval_takes_the_advice_that_it_gives(run: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "more", per_class=3)
    (folder / "bag/000.jpg").write_bytes(b"no image")
    code, text = invoke("eval", str(run), "--data", "~/more")
    assert code == 0 and "on 8 samples" in text and f"left out: {folder}/bag/000.jpg cannot be read" in text
    with pytest.raises(UserError, match=r"^--data 'nowhere' does not exist; give a folder"):
        invoke("eval", str(run), "--data", "nowhere")
