"""A trained model in use: its file contains everything it needs, in any folder."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import megabatch
from megabatch.cli.app import app
from megabatch.config.loading import load_config
from megabatch.data.pipeline import normalise
from megabatch.errors import UserError
from megabatch.inference.evaluate import evaluate_run
from megabatch.ranks.world import current_rank
from megabatch.runs.reader import read_summary
from megabatch.training.prepare import prepare
from megabatch.training.run import train_and_record
from tests.support.photos import CLASSES, make_folder
from tests.support.use import SMALL, train_photos


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("photos") / "all", per_class=12)


RUNS = {
    "fp32": [],
    "fp16, sizes, average": [
        *("precision.name=fp16", "data.image_size=20", "data.sizes=[[0, 12], [0.5, 20]]", "data.test_image_size=24"),
        *("train.ema_half_life_epochs=0.5", "train.ema_every_steps=2"),
    ],
}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("use") / "run"
    return train_photos(folder, f"data.source={photos}", "train.epochs=3", *RUNS[request.param])


def held_out(photos: Path) -> list[tuple[Path, int]]:
    """Return the photos on which the run was tested, with their classes."""
    config = load_config("photos", [*SMALL, f"data.source={photos}"])
    from megabatch.data.catalog import load_data_set

    test = load_data_set(config.data).test
    return [(Path(test.files.where(n)), int(test.labels[n])) for n in range(len(test))]  # type: ignore[attr-defined]


def test_the_loaded_model_has_the_top1_of_the_summary(run: Path, photos: Path) -> None:
    summary, samples = read_summary(run), held_out(photos)
    classifier = megabatch.load(run)
    assert summary is not None and classifier.classes == CLASSES
    scores = classifier([Image.open(path) for path, _ in samples])
    assert not scores.requires_grad and torch.equal(classifier([path for path, _ in samples]), scores)
    assert scores.shape == (len(samples), len(CLASSES)) and scores.dtype == torch.float32
    right = scores.argmax(1) == torch.tensor([label for _, label in samples])
    assert int(right.sum()) / len(samples) == summary.top1


def test_a_new_process_loads_the_model_of_a_moved_run_without_its_images(
    run: Path, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "moved")
    path, _ = held_out(photos)[0]
    code = (
        "import megabatch, sys; from PIL import Image\n"
        "print(megabatch.load(sys.argv[1])(Image.open(sys.argv[2])).detach().numpy().tobytes().hex())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "moved"), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    torch.set_num_threads(1)
    expected = megabatch.load(run)(Image.open(path)).detach().numpy().tobytes().hex()
    assert result.stdout.strip() == expected


def test_a_picture_a_tensor_and_a_list_give_the_same_scores(run: Path) -> None:
    classifier = megabatch.load(run)
    pixels = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    content = io.BytesIO()
    Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).save(content, "PNG")
    assert torch.equal(classifier.prepare(pixels), pixels)
    assert torch.equal(classifier.prepare([pixels[0], pixels[1]]), classifier.prepare(pixels))
    larger = pixels.repeat_interleave(4, 2).repeat_interleave(4, 3)
    from_tensor = classifier.prepare(larger[0])
    decoded = Image.fromarray(larger[0].permute(1, 2, 0).numpy())
    assert torch.equal(classifier.prepare(decoded), from_tensor) and from_tensor.shape == (1, 3, 24, 24)
    assert classifier([]).shape == (0, 3)
    for wrong in (pixels.float(), pixels[:, :1], 5, "a.jpg"):
        with pytest.raises(UserError, match=r"expected|a.jpg cannot be read: No such file"):
            classifier(wrong)


def test_eval_reproduces_the_results_from_the_weights_and_for_a_folder(run: Path, photos: Path, tmp_path: Path) -> None:
    summary = read_summary(run)
    assert summary is not None
    result, names = evaluate_run(run, None)
    assert (result.top1, result.top5, result.test_loss) == (summary.top1, summary.top5, summary.test_loss)
    assert names == CLASSES
    for path, label in held_out(photos):  # only the test images, of two classes
        if label < 2:
            (tmp_path / "some" / CLASSES[label]).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / "some" / CLASSES[label])
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/env.json").write_text("{}")
    other, _ = evaluate_run(tmp_path / "run", str(tmp_path / "some"))
    assert other.samples_evaluated == sum(label < 2 for _, label in held_out(photos))
    assert other.class_top1[:2] == result.class_top1[:2] and other.class_top1[2] is None


@pytest.mark.parametrize("run", ["fp16, sizes, average"], indirect=True)
def test_eval_with_another_size_and_other_views_equals_a_run_evaluated_with_them(run: Path, tmp_path: Path) -> None:
    other = [f"run.dir={tmp_path / 'run'}", "data.test_image_size=32", "data.test_views=mirror"]
    with prepare(load_config(str(run / "config.toml"), other), current_rank(), resume="never") as ready:
        there = train_and_record(ready.config, ready.start, ready.training)
    here = read_summary(run)
    assert here is not None and here.test_loss != there.test_loss
    shown = CliRunner().invoke(app, ["eval", str(run), "--image-size", "32", "--flip"]).stdout
    assert shown.startswith(f"top-1 {there.top1:.4f}, top-5 {there.top5:.4f}, loss {there.test_loss:.6f} on ")
    result, _ = evaluate_run(tmp_path / "run", None, image_size=24, views="one")
    assert (result.top1, result.top5, result.test_loss) == (here.top1, here.top5, here.test_loss)
    refused = CliRunner().invoke(app, ["eval", str(run), "--flip", "--views", "one"])
    assert "--flip and --views one cannot be combined; use one of them" in str(refused.exception)


def test_pixel_statistics_are_measured_only_at_the_first_start(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_photos(tmp_path / "whole", f"data.source={photos}", "train.epochs=2")
    config = load_config("photos", [*SMALL, f"run.dir={tmp_path / 'run'}", f"data.source={photos}", "train.epochs=2"])
    asked = iter(range(100))
    with prepare(config, current_rank(), resume="auto", stop_requested=lambda: next(asked) >= 2) as ready:
        assert train_and_record(ready.config, ready.start, ready.training).status == "stopped"

    def refuse(images: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("megabatch.training.build.measure_pixels", refuse)
    monkeypatch.setattr(normalise, "measure_pixels", refuse)
    train_photos(tmp_path / "run", f"data.source={photos}", "train.epochs=2")
    for name in ("model.safetensors", "model.json"):  # two equal runs, in other folders and one of them stopped
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_model_card_has_no_paths_hosts_or_dates(run: Path, photos: Path) -> None:
    text = (run / "model.json").read_text()
    card = json.loads(text)
    assert str(photos) not in text and str(run) not in text and "run." not in " ".join(card["recipe"])
    assert card["classes"] == list(CLASSES) and card["test_image_size"] == 24 and len(card["mean"]) == 3
    assert card["recipe"]["optim.learning_rate"] == 0.05 and card["top1"] == read_summary(run).top1  # type: ignore[union-attr]


def test_predictions_are_in_order_and_unreadable_images_are_named(run: Path, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "some"
    shutil.copytree(photos / "bag", folder)
    (folder / "000.jpg").write_bytes(b"no image")
    result = CliRunner().invoke(app, ["predict", str(run), str(folder), "--json", "--top", "2"])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [Path(row["image"]).name for row in rows] == sorted(path.name for path in folder.iterdir())
    assert "error" in rows[0] and all(len(row["classes"]) == 2 for row in rows[1:])
    paths = [row["image"] for row in rows[1:3]]
    listed = CliRunner().invoke(app, ["predict", str(run), "-", "--csv", "--top", "1"], input="\n".join(paths))
    lines = listed.stdout.splitlines()
    assert lines[0] == "image,rank,class,probability" and [line.split(",")[0] for line in lines[1:]] == paths
    content = Path(paths[0]).read_bytes()
    piped = CliRunner().invoke(app, ["predict", str(run / "model.safetensors"), "-"], input=content)
    best = rows[1]["classes"][0]
    assert piped.stdout.startswith(f"-: {best['class']} {best['probability']:.1%}")
    with torch.no_grad():
        probabilities = megabatch.load(run)(Image.open(paths[0])).softmax(1)[0]
    np.testing.assert_allclose(best["probability"], probabilities.max(), rtol=1e-5)


def test_a_missing_checkpoint_or_model_is_reported_in_one_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no checkpoint 'first'; choose .*best, last, step-"):
        megabatch.load(run, "first")
    with pytest.raises(UserError, match=r"no model .*; train it first"):
        megabatch.load(tmp_path)
    (tmp_path / "other.safetensors").write_bytes(b"12345678")
    with pytest.raises(UserError, match="is not a safetensors file"):
        megabatch.load(tmp_path / "other.safetensors")
    assert len(megabatch.load(run, "best").classes) == 3


def test_a_model_trained_on_arrays_gets_the_same_input_from_files(tmp_path: Path) -> None:
    config = load_config(
        "smoke", ["train.epochs=0.5", "schedule.warmup_epochs=0", f"run.dir={tmp_path / 'run'}", "run.threads=1"]
    )
    with prepare(config, current_rank(), resume="auto") as ready:
        summary = train_and_record(ready.config, ready.start, ready.training)
        images, labels = ready.training.data.test, ready.training.data.test.labels
    pixels = images.read(np.arange(200))
    classifier = megabatch.load(tmp_path / "run")
    pictures = []
    for image in pixels:
        content = io.BytesIO()
        mode = image[0] if len(image) == 1 else image.permute(1, 2, 0)
        Image.fromarray(mode.numpy()).save(content, "PNG")
        pictures.append(Image.open(content))
    assert torch.equal(classifier.prepare(pictures), pixels)
    assert summary.top1 is not None and len(labels) >= 200


def test_a_run_initialised_from_another_uses_its_normalisation_and_weights(
    run: Path, photos: Path, tmp_path: Path
) -> None:
    start = f"model.weights={run}"
    other = train_photos(tmp_path / "other", f"data.source={photos / '..' / 'all'}", start, "train.epochs=1", "seed=7")
    before, after = (json.loads((folder / "model.json").read_text()) for folder in (run, other))
    assert (after["mean"], after["deviation"]) == (before["mean"], before["deviation"])
    assert "weights" not in after["model"] and str(run) not in (other / "model.json").read_text()
    shutil.rmtree(photos.parent / "half", ignore_errors=True)
    make_folder(photos.parent / "half", per_class=5)
    checkpoint = f"model.weights={run / 'checkpoints/best'}"
    half = train_photos(tmp_path / "half", f"data.source={photos.parent / 'half'}", checkpoint, "train.epochs=1")
    assert json.loads((half / "model.json").read_text())["mean"] == before["mean"]
