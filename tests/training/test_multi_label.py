"""Images with several labels: average precision, the evaluation on any number of ranks, and a whole run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import megabatch
from megabatch.config.loading import load_config
from megabatch.data.catalog import load_data_set
from megabatch.data.pipeline.images import ArrayImages
from megabatch.data.pipeline.normalise import Normalise, measure_pixels
from megabatch.errors import UserError
from megabatch.inference.classifier import load
from megabatch.inference.evaluate import evaluate_run
from megabatch.inference.predict import NamedFiles, predict
from megabatch.ranks.world import World
from megabatch.report.page import write_report
from megabatch.runs.reader import read_summary
from megabatch.runs.records import Evaluation, Summary
from megabatch.training.checkpoint.resume import decide_start
from megabatch.training.evaluate import average_precision, evaluate_labels, require_evaluable
from megabatch.training.prepare import ready_to_train
from megabatch.training.run import train_and_record
from tests.support.rank_pool import RankPool
from tests.support.use import SMALL, train_photos

COUNT, NUM_CLASSES, BATCH = 37, 6, 4
SETS = torch.tensor([[0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 1, 0], [0, 0, 1, 0, 1, 0]], dtype=torch.bool)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30).filter(
        lambda rows: any(r[1] for r in rows)
    )
)
def test_average_precision_equals_scikit_learns_even_with_equal_scores(rows: list[tuple[int, bool]]) -> None:
    from sklearn.metrics import average_precision_score

    scores, targets = (np.array(column) for column in zip(*rows, strict=True))
    assert average_precision(scores.astype(float), targets) == pytest.approx(
        average_precision_score(targets, scores), abs=1e-12
    )


def images_and_model() -> tuple[ArrayImages, nn.Module]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (COUNT, 1, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, len(SETS), (COUNT,), generator=generator)
    torch.manual_seed(0)
    return ArrayImages(pixels, labels), nn.Sequential(nn.Flatten(), nn.Linear(64, NUM_CLASSES)).double()


def evaluate_on(world: World) -> Evaluation:
    images, model = images_and_model()
    normalise = Normalise(measure_pixels(images), world.device, torch.float64)
    return evaluate_labels(model.to(world.device), images, SETS, normalise, BATCH, world)


def test_an_evaluation_is_exact_and_bitwise_equal_on_1_2_and_4_ranks(ranks: RankPool) -> None:
    from sklearn.metrics import average_precision_score, precision_recall_fscore_support

    images, model = images_and_model()
    logits = model(Normalise(measure_pixels(images), torch.device("cpu"), torch.float64)(images.images)).detach()
    targets = SETS[images.labels]
    alone = ranks.run(evaluate_on, num_ranks=1)[0]
    for num_ranks in (2, 4):
        assert all(result == alone for result in ranks.run(evaluate_on, num_ranks=min(num_ranks, ranks.size)))
    present = targets.any(0).nonzero().flatten()
    assert len(present) == 4
    precisions = average_precision_score(targets[:, present], logits[:, present])
    assert alone.mean_average_precision == alone.score == pytest.approx(precisions, abs=1e-12)
    assert alone.top1 == targets[torch.arange(COUNT), logits.argmax(1)].sum().item() / COUNT
    loss = F.binary_cross_entropy_with_logits(logits, targets.double(), reduction="sum").item() / COUNT
    assert alone.test_loss == pytest.approx(loss, rel=1e-12) and alone.samples_evaluated == COUNT
    predicted = logits.sigmoid() > 0.5
    precision, recall, f1, seen = precision_recall_fscore_support(targets, predicted, zero_division=0)
    guessed = predicted.any(0)
    assert alone.class_top1 == [recall[number] if seen[number] else None for number in range(NUM_CLASSES)]
    assert alone.class_precision == [precision[number] if guessed[number] else None for number in range(NUM_CLASSES)]
    found = (alone.precision, alone.balanced_accuracy, alone.f1)
    assert found == pytest.approx([values[present].mean() for values in (precision, recall, f1)], abs=1e-12)
    assert alone.ece is None and not alone.reliability


def test_too_many_scores_and_images_without_labels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    images, _ = images_and_model()
    require_evaluable(images, SETS)
    with pytest.raises(UserError, match="no test image has a label"):
        require_evaluable(images, torch.zeros_like(SETS))
    monkeypatch.setattr("megabatch.training.evaluate.MOST_SCORES", COUNT * NUM_CLASSES - 1)
    with pytest.raises(UserError, match=r"37 test images of 6 classes have 222 scores; .* for example 36$"):
        require_evaluable(images, SETS)


def test_cross_entropy_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.multi_label=true with loss.name=cross_entropy: .* set loss.name=bce"):
        load_config("photos", ["data.source=x.csv", "data.multi_label=true"])


COLOURS = ("blue", "green", "red")


def write_table(folder: Path) -> Path:
    """Write images whose labels are the bright channels; red is rarer.  One test image is damaged."""
    folder.mkdir()
    noise, rows = np.random.default_rng(0), ["path,label,split"]
    for number in range(56):
        labels = [name for place, name in enumerate(COLOURS) if number >> place & 1 and (place < 2 or number < 40)]
        bright = [150 * (name in labels) for name in COLOURS[::-1]]
        pixels = noise.integers(0, 100, (24, 24, 3)) + np.array(bright)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
        rows.append(f"{number}.png,{';'.join(labels)},{'val' if number < 16 else 'train'}")
    (folder / "9.png").write_bytes(b"damaged")
    (folder / "labels.csv").write_text("\n".join(rows))
    return folder / "labels.csv"


SETTINGS = [
    *("data.multi_label=true", "loss.name=bce", "loss.class_weights=auto", "data.validation=0", "precision.name=fp64"),
    *("data.augment.mixup=0.1", "data.on_error=skip", "data.skip_limit=1", "train.epochs=12", "checkpoint.keep_best=2"),
]


def train_whole(world: World, folder: Path, *settings: str) -> Summary:
    config = load_config("photos", [*SMALL, f"run.dir={folder}", *settings])
    start = decide_start(config, "never", world)
    return train_and_record(config, start, ready_to_train(config, load_data_set(config.data), world))


def test_fit_takes_rows_of_labels_as_arrays_or_from_a_dataset(tmp_path: Path) -> None:
    """Both give the same run, and every label can be learnt: it is the brightness of a quadrant."""
    draws = np.random.default_rng(0)
    marks = draws.integers(0, 2, (240, 4))
    bright = marks.reshape(-1, 1, 2, 2).repeat(4, 2).repeat(4, 3) * 120
    images = torch.from_numpy((bright + draws.integers(0, 100, (240, 1, 8, 8))).astype(np.uint8))
    items = TensorDataset(images, torch.from_numpy(marks).float())
    settings = ["batch.global=24", "batch.micro=12", "train.epochs=12", "loss.name=bce", "run.threads=1"]
    settings += ["data.flip=false", "data.crop_padding=0", "optim.learning_rate=0.05"]
    summaries = []
    for name, train in (("arrays", (images, marks)), ("dataset", items)):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
        folder = f"run.dir={tmp_path / name}"
        summaries.append(megabatch.fit(network, train, test=0.25, overrides=[*settings, folder]))
    arrays, dataset = summaries
    assert arrays.mean_average_precision == dataset.mean_average_precision and arrays.samples_evaluated == 60
    assert arrays.mean_average_precision is not None and arrays.mean_average_precision > 0.99
    for labels, value in ((marks, "false"), (marks[:, 0], "true")):
        contrary = [*settings, f"data.multi_label={value}", f"run.dir={tmp_path / 'other'}"]
        with pytest.raises(UserError, match=f"data.multi_label={value} does not fit the labels of train; omit it"):
            megabatch.fit(network, (images, labels), test=0.25, overrides=contrary)
    with pytest.raises(UserError, match="only bce has a target for each class"):
        megabatch.fit(network, (images, marks), test=0.25, overrides=[f"run.dir={tmp_path / 'other'}"])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ((torch.zeros(6, 2), torch.zeros(6)), r"labels are \[6, 2\] and \[6\]; expected"),
        ((torch.zeros(6, 2), torch.zeros(6, 3)), r"labels are \[6, 2\] and \[6, 3\]; expected"),
        ((torch.zeros(6, 2), torch.full((6, 2), 2.0)), r"labels \[N, classes\] have a 2; expected 1"),
        ((torch.zeros(6, 1), torch.zeros(6, 1)), r"labels \[6, 1\]; expected .* and \[N\] or \[N, classes\]"),
    ],
)
def test_invalid_rows_of_labels_are_refused(labels: tuple[torch.Tensor, torch.Tensor], message: str) -> None:
    images = torch.zeros(6, 1, 8, 8, dtype=torch.uint8)
    with pytest.raises(UserError, match=message):
        megabatch.fit(nn.Linear(64, 2), (images, labels[0]), (images, labels[1]))


def test_a_run_on_images_with_several_labels(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"data.source={write_table(tmp_path / 'photos')}", *SETTINGS]
    run = train_photos(tmp_path / "alone", *settings)
    printed = capsys.readouterr().out
    assert "3 classes (blue 20, green 20, red 12)" in printed and "several labels per image" in printed
    assert "loss      weights 1 (blue) to 2.33 (red)" in printed
    (other, *_) = ranks.run(train_whole, tmp_path / "pair", *settings, num_ranks=min(2, ranks.size))
    summary = read_summary(run)
    assert summary and summary.mean_average_precision is not None and summary.best_mean_average_precision is not None
    assert other.mean_average_precision == pytest.approx(summary.mean_average_precision, abs=1e-9)
    assert other.test_loss == pytest.approx(summary.test_loss, abs=1e-9) and summary.samples_evaluated == 15
    assert summary.best_mean_average_precision > 0.8
    assert f"mAP {summary.mean_average_precision:.4f} (best {summary.best_mean_average_precision:.4f})" in printed
    records = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row["mean_average_precision"] for row in records if row["kind"] == "evaluation"}
    assert max(found.values()) == summary.best_mean_average_precision
    best = (run / "checkpoints/best").readlink().name
    assert int(best.removeprefix("step-")) == max(found, key=lambda step: (found[step], -step))

    result, names = evaluate_run(run, None)
    assert names == COLOURS
    assert (result.score, result.test_loss) == (summary.mean_average_precision, summary.test_loss)
    again, _ = evaluate_run(run, str(tmp_path / "photos/labels.csv"))
    assert again == result
    with pytest.raises(UserError, match=r"--confusion x.csv: an image may have several labels"):
        evaluate_run(run, None, confusion=Path("x.csv"))
    classifier, photo = load(run), str(tmp_path / "photos/23.png")
    assert classifier.card.multi_label and classifier.card.mean_average_precision == summary.mean_average_precision
    (predicted,) = predict(classifier, NamedFiles([photo]), 3, threads=1)
    expected = classifier(photo)[0].sigmoid()
    for name, probability in predicted.classes:
        assert probability == pytest.approx(expected[classifier.classes.index(name)].item(), abs=1e-6)
    page = write_report([run]).read_text()
    assert "mean average precision" in page and "mAP" in page and "Recall of each class" in page
