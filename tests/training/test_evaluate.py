import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megabatch.data.pipeline.images import ArrayImages
from megabatch.data.pipeline.normalise import Normalise, measure_pixels
from megabatch.data.settings import NUM_VIEWS, TestViews
from megabatch.ranks.world import World
from megabatch.training.evaluate import (
    NUM_BINS,
    VIEWS,
    CalibrationCounts,
    Evaluation,
    MistakeCounter,
    evaluate,
    expected_calibration_error,
)
from tests.support.rank_pool import RankPool

NUM_CLASSES = 7


def images_of(count: int) -> ArrayImages:
    generator = torch.Generator().manual_seed(count)
    pixels = torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, NUM_CLASSES - 1, (count,), generator=generator)  # the last class has no image
    return ArrayImages(pixels, labels)


def model_on(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, NUM_CLASSES)).to(device, torch.float64)


def evaluate_on(world: World, count: int, batch_size: int) -> Evaluation:
    images, model = images_of(count), model_on(world.device)
    normalise = Normalise(measure_pixels(images), world.device, torch.float64)
    result = evaluate(model, images, normalise, NUM_CLASSES, batch_size, world)
    assert model.training
    return result


@pytest.mark.parametrize("count", [1, 5, 37, 64])
def test_evaluation_counts_every_image_once_under_any_sharding(ranks: RankPool, count: int) -> None:
    images, model = images_of(count), model_on(torch.device("cpu")).eval()
    logits = model(Normalise(measure_pixels(images), torch.device("cpu"), torch.float64)(images.images))
    guesses = logits.argsort(1, descending=True)
    first = guesses[:, 0] == images.labels
    within_five = (guesses[:, :5] == images.labels[:, None]).any(1)
    alone = ranks.run(evaluate_on, count, 8, num_ranks=1)[0]
    for num_ranks in range(1, ranks.size + 1):
        for result in ranks.run(evaluate_on, count, 8, num_ranks=num_ranks):
            assert result == alone  # bitwise identical, including the loss
            assert result.samples_evaluated == count
            assert result.top1 == first.sum().item() / count
            assert result.top5 == within_five.sum().item() / count
            assert result.test_loss == pytest.approx(F.cross_entropy(logits, images.labels).item(), rel=1e-12)
            agrees_with_scikit_learn(result, images.labels.numpy(), logits.softmax(1).detach().numpy())


def agrees_with_scikit_learn(result: Evaluation, labels: np.ndarray, scores: np.ndarray) -> None:
    from sklearn.calibration import calibration_curve
    from sklearn.metrics import precision_recall_fscore_support

    guesses = scores.argmax(1)
    means = precision_recall_fscore_support(labels, guesses, labels=range(NUM_CLASSES), zero_division=0)
    precision, recall, f1, seen = means
    assert result.class_top1 == [recall[label] if seen[label] else None for label in range(NUM_CLASSES)]
    assert result.class_precision == [precision[label] if label in guesses else None for label in range(NUM_CLASSES)]
    found = (result.precision, result.balanced_accuracy, result.f1)
    assert found == pytest.approx([values[seen > 0].mean() for values in (precision, recall, f1)], rel=1e-12)
    curve = [each for each in result.reliability if each.count]
    accuracy, confidence = calibration_curve(guesses == labels, scores.max(1), n_bins=NUM_BINS, pos_label=True)
    assert [each.accuracy for each in curve] == pytest.approx(accuracy, rel=1e-12)
    assert [each.confidence for each in curve] == pytest.approx(confidence, rel=1e-9)
    assert sum(each.count for each in curve) == len(labels)


def test_the_calibration_error_is_that_of_an_example_of_torchmetrics() -> None:
    """MulticlassCalibrationError(num_classes=3, n_bins=3, norm="l1") in its documentation."""
    shares = torch.tensor([[0.25, 0.20, 0.55], [0.55, 0.05, 0.40], [0.10, 0.30, 0.60], [0.90, 0.05, 0.05]])
    counts = CalibrationCounts(torch.device("cpu"), num_bins=3)
    counts.add(shares.log(), shares.argmax(1) == torch.tensor([0, 1, 2, 0]))
    assert expected_calibration_error(counts.curve()) == pytest.approx(0.2, rel=1e-6)


class Coarse(nn.Module):
    """Scores of few levels, as in 16 bits, so that several classes have the highest."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.round()


def test_the_first_of_equal_scores_counts_as_in_the_confusion_matrix(ranks: RankPool) -> None:
    top1, top5, matrix, scores, labels = ranks.run(evaluate_ties, num_ranks=1)[0]
    assert (scores == scores.max(1, keepdims=True)).sum(1).max() > 1
    assert top1 == (scores.argmax(1) == labels).mean() == np.trace(matrix) / len(labels) <= top5


def evaluate_ties(world: World) -> tuple[float, float, np.ndarray, np.ndarray, np.ndarray]:
    images, model = images_of(64), nn.Sequential(model_on(world.device), Coarse())
    normalise = Normalise(measure_pixels(images), world.device, torch.float64)
    mistakes = MistakeCounter(images, NUM_CLASSES, 0, world)
    result = evaluate(model, images, normalise, NUM_CLASSES, 8, world, mistakes)
    assert mistakes.matrix is not None
    scores = model.eval()(normalise(images.images)).detach().cpu()
    return result.top1, result.top5, mistakes.matrix.numpy(), scores.numpy(), images.labels.numpy()


def test_views_are_averaged_with_the_stated_weights() -> None:
    image = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    weights = torch.randn(3 * 5 * 4, 7, dtype=torch.float64)

    def score(pixels: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(pixels.reshape(2, -1)) @ weights

    pixels = image.numpy()
    padded = np.pad(pixels, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="reflect")
    views = (pixels, padded[..., :-2, :-2], padded[..., 2:, 2:])
    both = [(score(view) + score(view[..., ::-1].copy())) / 2 for view in views]
    expected: dict[TestViews, torch.Tensor]
    expected = {"one": score(pixels), "mirror": both[0], "mirror-shift": both[0] / 2 + both[1] / 4 + both[2] / 4}
    for name, scores in expected.items():
        seen: list[torch.Tensor] = []

        def network(view: torch.Tensor, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            seen.append(view)
            return view.flatten(1) @ weights

        torch.testing.assert_close(VIEWS[name](network, image), scores)
        assert len(seen) == NUM_VIEWS[name]
