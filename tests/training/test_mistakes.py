import base64
import io
import math
import time
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from megabatch.ranks.world import World
from megabatch.runs.records import EvaluationRecord, Mistakes, StepRecord
from megabatch.training.evaluate import picture_of
from megabatch.training.loop import train
from tests.support.rank_pool import RankPool
from tests.support.small_runs import begin_small

SHORT = ("train.epochs=1", "train.examples=5")


def mistakes_of(world: World, *overrides: str) -> dict[str, Any]:
    """Return the mistakes that rank 0 keeps, and the model's scores for every test image."""
    training = begin_small(world, *SHORT, *overrides)
    evaluation = [record for record in train(training) if isinstance(record, EvaluationRecord)][-1]
    network = training.model.module.eval()
    images, labels = training.data.test.read(np.arange(37)), training.data.test.labels
    with torch.no_grad():
        scores = network(training.normalise(images)).softmax(1)
    newest = training.mistakes.newest
    return {
        "newest": newest and msgspec.to_builtins(newest),
        "scores": scores.numpy(),
        "labels": labels.numpy(),
        "images": images.numpy(),
        "waits": evaluation.rank_waits_s,
    }


def test_mistakes_match_the_scores_on_any_number_of_ranks(ranks: RankPool) -> None:
    for num_ranks in (1, 2, 4):
        if num_ranks > ranks.size:
            continue
        first, *others = ranks.run(mistakes_of, num_ranks=num_ranks)
        assert all(other["newest"] is None for other in others)
        newest, scores, labels = msgspec.convert(first["newest"], Mistakes), first["scores"], first["labels"]
        predicted = scores.argmax(1)
        wrong = np.flatnonzero(predicted != labels)
        assert len(wrong) > 5  # otherwise nothing is selected
        assert newest.class_counts == np.bincount(labels, minlength=6).tolist()
        pairs = {(pair.label, pair.predicted): pair.count for pair in newest.confusions or []}
        assert sum(pairs.values()) == len(wrong)
        for sample in wrong:
            expected = int(((labels == labels[sample]) & (predicted == predicted[sample])).sum())
            assert pairs[int(labels[sample]), int(predicted[sample])] == expected
        order = sorted(wrong, key=lambda sample: (-scores[sample].max(), sample))[:5]
        assert [example.sample for example in newest.examples] == order
        for example in newest.examples:
            assert (example.label, example.predicted) == (labels[example.sample], predicted[example.sample])
            assert abs(example.confidence - scores[example.sample].max()) < 1e-9
            picture = Image.open(io.BytesIO(base64.b64decode(example.picture)))
            assert np.array_equal(np.asarray(picture).transpose(2, 0, 1), first["images"][example.sample])
        assert len(first["waits"]) == num_ranks


def test_no_pictures_are_kept_if_not_requested(ranks: RankPool) -> None:
    first, *_ = ranks.run(mistakes_of, "train.examples=0", num_ranks=2)
    newest = msgspec.convert(first["newest"], Mistakes)
    assert not newest.examples and newest.confusions


def totals_of(world: World) -> tuple[float, float, list[dict[str, float]]]:
    training = begin_small(world, "train.epochs=2")
    began_s = time.perf_counter()
    records = list(train(training))
    taken_s = time.perf_counter() - began_s
    assert all(record.times for record in records)
    steps = [msgspec.to_builtins(record.times) for record in records if isinstance(record, StepRecord)]
    return taken_s, math.fsum(record.times.total for record in records), steps


def test_the_times_of_all_rows_add_up_to_the_time_of_the_run(ranks: RankPool) -> None:
    for taken_s, total_s, steps in ranks.run(totals_of, num_ranks=2):
        assert 0.9 * taken_s < total_s <= taken_s
        assert all(step["forward"] > 0 and step["backward"] > 0 and step["update"] > 0 for step in steps)


def test_a_photo_is_kept_as_a_small_jpeg_and_a_grey_image_as_a_png() -> None:
    for channels, kind, size in ((3, "JPEG", (96, 48)), (1, "PNG", (96, 48)), (4, "JPEG", (96, 48))):
        image = torch.zeros(channels, 112, 224, dtype=torch.uint8)
        picture = Image.open(io.BytesIO(base64.b64decode(picture_of(image))))
        assert (picture.format, picture.size) == (kind, size)
