"""Training from files: the same on any number of ranks and threads, even with unreadable images."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from megabatch.config.loading import load_config
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import load_data_set
from megabatch.errors import UserError
from megabatch.preflight.doctor import measure
from megabatch.ranks.world import World
from megabatch.runs.records import EvaluationRecord, StepRecord
from megabatch.runs.totals import RunTotals
from megabatch.training.loop import train
from megabatch.training.prepare import ready_to_train
from megabatch.training.run import check_skipped
from megabatch.training.screen import Screen, describe_data
from tests.support.photos import make_folder
from tests.support.rank_pool import RankPool
from tests.support.small_runs import SMALL_RUN


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write photos; one for training and one for validation is damaged."""
    folder = tmp_path_factory.mktemp("photos") / "set"
    make_folder(folder / "train", per_class=16)
    make_folder(folder / "val", per_class=5)
    for damaged in ("train/bag/003.jpg", "val/coat/002.jpg"):
        (folder / damaged).write_bytes(b"no image")
    return folder


def photo_run(folder: str, *overrides: str) -> RunConfig:
    chosen = [f"data.source={folder}", "data.crop_area=0.3", "data.on_error=skip", "data.skip_limit=0.1"]
    return load_config("fashion", [*SMALL_RUN, *chosen, "train.epochs=3", *overrides])


def train_on_photos(world: World, folder: str, threads: int) -> dict[str, Any]:
    config = photo_run(folder)
    records = list(train(ready_to_train(config, load_data_set(config.data, threads), world)))
    steps = [record for record in records if isinstance(record, StepRecord)]
    totals = RunTotals(global_batch=32, target_top1=None)
    for record in records:
        totals.add(record, wall_s=1.0)
    return {
        "skipped_images": totals.summary("finished").skipped_images,
        "losses": [record.loss for record in steps],
        "skipped": [record.skipped_images for record in steps],
        "evaluations": [record for record in records if isinstance(record, EvaluationRecord)],
    }


def test_a_run_from_files_is_the_same_on_any_number_of_ranks_and_threads(ranks: RankPool, folder: Path) -> None:
    alone = ranks.run(train_on_photos, str(folder), 1, num_ranks=1)[0]
    together = ranks.run(train_on_photos, str(folder), 2, num_ranks=2)
    for result in together:
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        assert result["skipped"] == alone["skipped"]
        for ours, theirs in zip(result["evaluations"], alone["evaluations"], strict=True):
            assert (ours.top1, ours.samples_evaluated, ours.unreadable) == (theirs.top1, 14, theirs.unreadable)
            assert ours.resident_mb is not None and ours.resident_mb > 50
    complaints = [line for lines in alone["skipped"] for line in lines]
    assert set(complaints) == {f"{folder}/train/bag/003.jpg cannot be read: it is not in a format that Pillow reads"}
    assert len(complaints) == 3  # once per epoch
    assert alone["skipped_images"] == 1  # but counted once
    assert alone["evaluations"][0].unreadable == [
        f"{folder}/val/coat/002.jpg cannot be read: it is not in a format that Pillow reads"
    ]


def describe_photos(world: World, folder: str, *overrides: str) -> str:
    small = ["model.name=small_cnn", "model.options.width=2", "data.image_size=12", "batch.global=8", "batch.micro=4"]
    config = load_config("photos", [f"data.source={folder}", "data.on_error=skip", *small, *overrides])
    return describe_data(config, ready_to_train(config, load_data_set(config.data), world))


def test_the_photos_recipe_reports_that_it_tests_on_the_folders_val_images(ranks: RankPool, folder: Path) -> None:
    found = ranks.run(describe_photos, str(folder), num_ranks=1)[0]
    counts = "3 classes (ankle 16, bag 16, coat 16)"
    assert found == f"{folder}: 48 + 15 images of 12 pixels, 3 channels, {counts}; tested on its own val/"
    found = ranks.run(describe_photos, str(folder / "train"), num_ranks=1)[0]
    assert found.endswith("(ankle 14, bag 14, coat 14); tested on 10% of each class, held out")
    found = ranks.run(describe_photos, str(folder), "data.validation=0.25", num_ranks=1)[0]
    assert found.endswith("36 + 12 images of 12 pixels, 3 channels, 3 classes (ankle 12, bag 12, coat 12)")


def start_screen(world: World, folder: str) -> str:
    config = photo_run(folder, "data.validation=auto")
    with redirect_stdout(io.StringIO()) as printed:
        Screen(config, ready_to_train(config, load_data_set(config.data), world), Path(folder))
    return printed.getvalue()


def test_a_run_names_its_validation_images_and_warns_about_suspicious_classes(ranks: RankPool, tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        make_folder(tmp_path / "up/set" / name, per_class=12)
    text = ranks.run(start_screen, str(tmp_path / "up/set"), num_ranks=1)[0]
    assert "coat 12); tested on its own valid/" in text and "named like splits" not in text
    text = ranks.run(start_screen, str(tmp_path / "up"), num_ranks=1)[0]
    assert re.search(rf"^warning   .*up has one class, 'set', .* use {tmp_path}/up/set$", text, re.MULTILINE)
    (tmp_path / "up/set/train").rename(tmp_path / "up/set/holdout")
    text = ranks.run(start_screen, str(tmp_path / "up/set"), num_ranks=1)[0]
    assert re.search(r"^warning   .*set has classes named like splits: test, valid;", text, re.MULTILINE)


def skip_too_much(world: World, folder: str, limit: float) -> str:
    config = photo_run(folder, f"data.skip_limit={limit}")
    training = ready_to_train(config, load_data_set(config.data), world)
    totals = RunTotals(global_batch=training.plan.global_batch, target_top1=None)
    try:
        for record in train(training):
            totals.add(record, wall_s=1.0)
            check_skipped(record, totals, training.plan, config.data.skip_limit)
    except UserError as error:
        return str(error)
    return ""


def test_too_many_unreadable_images_end_the_run_on_all_ranks(ranks: RankPool, folder: Path) -> None:
    assert ranks.run(skip_too_much, str(folder), 0.1, num_ranks=2) == ["", ""]
    for limit, part, image in (
        (0.05, "1 of 15 test", "val/coat/002.jpg"),
        (0.02, "1 of 48 training", "train/bag/003.jpg"),
    ):
        first, second = ranks.run(skip_too_much, str(folder), limit, num_ranks=2)
        assert first == second
        assert first.startswith(f"{part} images were skipped, more than data.skip_limit={limit} of them, such as ")
        assert f"{image} cannot be read" in first and "or set data.skip_limit=0." in first


def diagnose_photos(world: World, folder: str) -> tuple[list[float], float, float]:
    config = photo_run(folder)
    speeds, waited, spent = measure(ready_to_train(config, load_data_set(config.data), world), seconds=0.3)
    return list(speeds.values()), waited.total, spent.total


def test_the_doctor_runs_input_and_compute_separately_and_together(ranks: RankPool, folder: Path) -> None:
    for speeds, waited, spent in ranks.run(diagnose_photos, str(folder), num_ranks=2):
        assert len(speeds) == 3 and min(speeds) > 0
        assert 0 <= waited < 1 and spent == pytest.approx(1)
