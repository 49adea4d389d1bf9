"""Evaluation, exact for any number of ranks: all-reduced integer counts, without padding or repeated samples."""

import base64
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from torch.func import functional_call

from megabatch.data.pipeline.batches import evaluation_batches
from megabatch.data.pipeline.decode import Unreadable
from megabatch.data.pipeline.images import ImageSet
from megabatch.data.pipeline.normalise import Normalise
from megabatch.data.pipeline.reader import BatchRequest, Reader
from megabatch.errors import UserError
from megabatch.models.loss import LossSettings, summed_loss
from megabatch.ranks.world import World
from megabatch.runs.records import (
    MOST_CLASSES,
    MOST_CONFUSIONS,
    Confusion,
    Evaluation,
    Example,
    Mistakes,
    ReliabilityBin,
    Share,
)
from megabatch.training.ema import WeightAverage

# The mistakes of an evaluation: counts of confused pairs of classes, and pictures of the most confident mistakes.
#
# The host does not wait for the device before the evaluation ends.  Each rank sends its few most confident mistakes to
# rank 0, which chooses among them and reads those images again.

PICTURE_SIZE = 96  # pixels of the longer side, at most
LARGEST_PNG = 48  # pixels of the longer side; for larger pictures a JPEG takes a fifth of the bytes
QUALITY = 80
NO_SAMPLE = -1.0
FIELDS = 4  # of a candidate: confidence, sample, label, predicted


class MistakeCounter:
    """Collects the mistakes of an evaluation: `add` every batch, then `collect` on all ranks."""

    def __init__(self, images: ImageSet, num_classes: int, num_examples: int, world: World) -> None:
        self.images, self.num_classes, self.num_examples, self.world = images, num_classes, num_examples, world
        self.is_counting = num_classes <= MOST_CLASSES
        self.batches: list[torch.Tensor] = []  # candidates, float64 [FIELDS, B]
        self.newest: Mistakes | None = None  # from the last evaluation; rank 0 only
        self.matrix: torch.Tensor | None = None  # images by class and predicted class; None: too many classes

    def add(self, first_sample: int, labels: torch.Tensor, logits: torch.Tensor, is_whole: bool) -> None:
        """Add a batch.  If images are missing (`is_whole` is False), sample numbers are unknown: no examples."""
        best, predicted = logits.max(1)
        confidence = (best.double() - logits.double().logsumexp(1)).exp()
        samples = torch.arange(first_sample, first_sample + len(labels), dtype=torch.float64, device=labels.device)
        if not is_whole:
            samples.fill_(NO_SAMPLE)
        self.batches.append(torch.stack([confidence, samples, labels.double(), predicted.double()]))

    def collect(self, class_counts: list[int]) -> None:
        empty = torch.zeros(FIELDS, 0, dtype=torch.float64, device=self.world.device)
        seen = torch.cat([empty, *self.batches], dim=1)
        self.batches = []
        confusions = self.count(seen) if self.is_counting else None
        candidates = self.choose(seen)
        if self.world.rank == 0:
            examples = [example for row in candidates if (example := self.example_of(*row))]
            self.newest = Mistakes(class_counts=class_counts, confusions=confusions, examples=examples)

    def count(self, seen: torch.Tensor) -> list[Confusion]:
        _, _, labels, predicted = seen.long()
        pairs = torch.bincount(labels * self.num_classes + predicted, minlength=self.num_classes**2)
        self.world.all_reduce(pairs)
        self.matrix = pairs.view(self.num_classes, self.num_classes).cpu()
        matrix = self.matrix.clone()
        matrix.fill_diagonal_(0)
        found = [Confusion(label, other, int(matrix[label, other])) for label, other in matrix.nonzero().tolist()]
        return sorted(found, key=lambda pair: (-pair.count, pair.label, pair.predicted))[:MOST_CONFUSIONS]

    def choose(self, seen: torch.Tensor) -> list[list[float]]:
        """Return the most confident mistakes of all ranks, ties in the order of samples."""
        if not self.num_examples:
            return []
        _, samples, labels, predicted = seen
        wrong = seen[:, (labels != predicted) & (samples != NO_SAMPLE)]
        own = torch.full((self.num_examples, FIELDS), NO_SAMPLE, dtype=torch.float64, device=seen.device)
        order = wrong[0].argsort(descending=True, stable=True)[: self.num_examples]
        own[: len(order)] = wrong[:, order].T
        rows = [row for row in self.world.gather(own.flatten()).view(-1, FIELDS).tolist() if row[1] != NO_SAMPLE]
        return sorted(rows, key=lambda row: (-row[0], row[1]))[: self.num_examples]

    def example_of(self, confidence: float, sample: float, label: float, predicted: float) -> Example | None:
        """Return the example with its picture; None if the image is no longer readable, which does not end the run."""
        try:
            batch = Reader(self.images).make(BatchRequest(np.array([int(sample)]), None))
        except (UserError, Unreadable, OSError):
            return None
        if not len(batch.labels):
            return None
        picture = picture_of(batch.images[0].cpu())
        return Example(
            sample=int(sample), label=int(label), predicted=int(predicted), confidence=confidence, picture=picture
        )


def picture_of(image: torch.Tensor) -> str:
    """Return a thumbnail in base64: a JPEG for photos, else a PNG."""
    pixels = image[:3].permute(1, 2, 0) if len(image) >= 3 else image[0]
    picture, file = Image.fromarray(pixels.contiguous().numpy()), io.BytesIO()
    is_photo = picture.mode == "RGB" and max(picture.size) > LARGEST_PNG
    picture.thumbnail((PICTURE_SIZE, PICTURE_SIZE))
    picture.save(file, "JPEG" if is_photo else "PNG", quality=QUALITY)
    return base64.b64encode(file.getvalue()).decode()


Network = Callable[[torch.Tensor], torch.Tensor]


def one_view(network: Network, pixels: torch.Tensor) -> torch.Tensor:
    return network(pixels)


def mirror(network: Network, pixels: torch.Tensor) -> torch.Tensor:
    return (network(pixels) + network(pixels.flip(3))) / 2


def mirror_shift(network: Network, pixels: torch.Tensor) -> torch.Tensor:
    """Average over shifts by a pixel along the diagonal too, as KellerJordan/cifar10-airbench does."""
    height, width = pixels.shape[2:]
    padded = F.pad(pixels, [1] * 4, mode="reflect")
    shifted = mirror(network, padded[..., :height, :width]) + mirror(network, padded[..., 2:, 2:])
    return mirror(network, pixels) / 2 + shifted / 4


# The scores of a test image from several views of it: see data.test_views.
VIEWS = {"one": one_view, "mirror": mirror, "mirror-shift": mirror_shift}


# Precision, recall, F1 and calibration, from integers, whose sums over ranks are exact for any sharding.

NUM_BINS = 15  # of confidence, as in Guo et al. 2017 and torchmetrics
FIXED_POINT = 2.0**40  # a confidence is added as an integer multiple of its inverse


class CalibrationCounts:
    """Images, correct predictions and confidence per bin: bins include their upper end."""

    def __init__(self, device: torch.device, num_bins: int = NUM_BINS) -> None:
        self.sums, self.num_bins = torch.zeros(3, num_bins, dtype=torch.int64, device=device), num_bins

    def add(self, logits: torch.Tensor, right: torch.Tensor) -> None:
        wide = logits.double()
        confidence = (wide.amax(1) - wide.logsumexp(1)).exp()
        # NaN, which `check_test_loss` reports, would be an invalid index.
        bins = (confidence * self.num_bins).ceil().nan_to_num(1.0).long().sub(1).clamp(0, self.num_bins - 1)
        fixed = (confidence * FIXED_POINT).round().nan_to_num(0.0).long()
        self.sums.index_add_(1, bins, torch.stack([torch.ones_like(bins), right.long(), fixed]))

    def curve(self) -> list[ReliabilityBin]:
        return [
            ReliabilityBin(count, total / FIXED_POINT / count, right / count) if count else ReliabilityBin(0, 0.0, 0.0)
            for count, right, total in self.sums.T.tolist()
        ]


def expected_calibration_error(curve: list[ReliabilityBin]) -> float:
    total = sum(each.count for each in curve)
    return sum(each.count / total * abs(each.confidence - each.accuracy) for each in curve)


def class_means(
    right: list[int], seen: list[int], predicted: list[int]
) -> tuple[list[Share | None], float, float, float]:
    """Return the precision of each class, and the means of precision, recall and F1 over classes with images.

    Args:
        right: Test images of each class that were predicted as such.
        seen: Test images of each class.
        predicted: Test images that were predicted as each class.
    """
    rows = [row for row in zip(right, seen, predicted, strict=True) if row[1]]
    precision = [hits / guesses if guesses else 0.0 for hits, _, guesses in rows]
    recall = [hits / count for hits, count, _ in rows]
    f1 = [2 * hits / (count + guesses) for hits, count, guesses in rows]
    of_class = [hits / guesses if guesses else None for hits, guesses in zip(right, predicted, strict=True)]
    means = [sum(values) / len(rows) for values in (precision, recall, f1)]
    return of_class, means[0], means[1], means[2]


class ScoredBatch(NamedTuple):
    first_sample: int
    number: int  # of the batch
    labels: torch.Tensor
    logits: torch.Tensor
    raw_logits: torch.Tensor | None  # of the weights themselves, if `logits` are those of their average
    is_whole: bool  # False: images that could not be read are missing


def scored_batches(
    model: nn.Module,
    images: ImageSet,
    normalise: Normalise,
    batch_size: int,
    world: World,
    views: str,
    average: WeightAverage | None,
    unreadable: list[str],
) -> Iterator[ScoredBatch]:
    """Yield this rank's batches with the scores of the model in evaluation mode.  Lines are added to `unreadable`."""
    weights, scores = average.for_forward() if average else {}, VIEWS[views]
    was_training = model.training
    frozen = [module for module in model.modules() if not module.training]
    model.eval()
    for number, batch in evaluation_batches(images, batch_size, world.rank, world.num_ranks, world.device):
        world.activity.begin("evaluation")  # at every batch, since the watchdog limits the time of one activity
        unreadable += batch.skipped
        if not len(batch.labels):
            continue
        pixels = normalise(batch.images)
        logits, raw = scores(model, pixels), None
        if average:
            logits, raw = scores(partial(functional_call, model, weights), pixels), logits
        labels = batch.labels.to(world.device)
        yield ScoredBatch(number * batch_size, number, labels, logits, raw, is_whole=not batch.skipped)
    model.train(was_training)
    for module in frozen:
        module.training = False
    world.activity.begin("evaluation")


def gather_unreadable(unreadable: list[str], num_read: int, images: ImageSet, world: World) -> list[str]:
    """Return the lines of all ranks, and check that every image was read or has a line."""
    if num_read < len(images):
        unreadable = [line for lines in world.all_gather(unreadable) for line in lines]
    assert num_read + len(unreadable) == len(images), f"evaluated {num_read} of {len(images)} samples"
    if not num_read:
        raise UserError(f"no test image can be read, such as {unreadable[0]}; fix the data set")
    return unreadable


# For benchmarks and the doctor, which never evaluate.
NOT_EVALUATED = Evaluation(top1=0.0, top5=0.0, test_loss=0.0, class_top1=[], samples_evaluated=0)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    images: ImageSet,
    normalise: Normalise,
    num_classes: int,
    batch_size: int,
    world: World,
    mistakes: MistakeCounter | None = None,
    views: str = "one",
    average: WeightAverage | None = None,
) -> Evaluation:
    """Return top-1, top-5, loss and top-1 per class over all `images`, which are split over the ranks.

    With an `average`, they are those of the averaged weights, and `raw_top1` is that of the model's.  `views`
    names the views of an image whose scores are averaged.
    """
    raw_counts = torch.zeros(1, dtype=torch.int64, device=world.device)
    # Per class: top-1 correct, top-5 correct, evaluated, predicted.
    counts = torch.zeros(4, num_classes, dtype=torch.int64, device=world.device)
    calibration = CalibrationCounts(world.device)
    # One entry per batch, so that the order of the sum does not depend on the number of ranks.
    losses = torch.zeros(-(-len(images) // batch_size), dtype=torch.float64, device=world.device)
    unreadable = list[str]()
    for batch in scored_batches(model, images, normalise, batch_size, world, views, average, unreadable):
        labels, logits = batch.labels, batch.logits
        if batch.raw_logits is not None:
            raw_counts += (batch.raw_logits.argmax(1) == labels).sum()
        losses[batch.number] = summed_loss(LossSettings(), logits, labels)
        predicted = logits.argmax(1)  # the first of equal scores, as in the confusion matrix; topk has no such rule
        right = predicted == labels
        within_five = right | (logits.topk(min(5, logits.shape[1])).indices == labels[:, None]).any(1)
        marks = torch.stack([right, within_five, torch.ones_like(right)])
        counts[:3].index_add_(1, labels, marks.long())
        counts[3].index_add_(0, predicted, torch.ones_like(labels))
        calibration.add(logits, right)
        if mistakes:
            mistakes.add(batch.first_sample, labels, logits, batch.is_whole)

    world.all_reduce(counts)
    world.all_reduce(calibration.sums)
    world.all_reduce(losses)
    if average:
        world.all_reduce(raw_counts)
    top1, top5, total, _ = counts.sum(1).tolist()
    unreadable = gather_unreadable(unreadable, total, images, world)
    first, _, seen, guesses = counts.tolist()
    class_precision, precision, recall, f1 = class_means(first, seen, guesses)
    reliability = calibration.curve()
    if mistakes:
        mistakes.collect(seen)
    return Evaluation(
        top1=top1 / total,
        raw_top1=int(raw_counts) / total if average else None,
        top5=top5 / total,
        test_loss=losses.sum().item() / total,
        class_top1=[right / count if count else None for right, count in zip(first, seen, strict=True)],
        samples_evaluated=total,
        precision=precision,
        balanced_accuracy=recall,
        f1=f1,
        ece=expected_calibration_error(reliability),
        class_precision=class_precision,
        reliability=reliability,
        unreadable=unreadable,
    )


# Images with several labels: average precision and counts per class.
#
# The average precision of a class ranks all test images by their score, so every rank writes the scores of its images
# into the rows of a tensor of zeros, and the tensors are summed: adding zero is exact.  Rank 0 then computes it in
# fp64.

MOST_SCORES = 200_000_000  # test images times classes: 800 MB per rank


def require_evaluable(images: ImageSet, label_sets: torch.Tensor) -> None:
    count, classes = len(images), label_sets.shape[1]
    if count * classes > MOST_SCORES:
        raise UserError(
            f"{count:,} test images of {classes:,} classes have {count * classes:,} scores; the limit with "
            f"data.multi_label=true is {MOST_SCORES:,}; use fewer test images, for example {MOST_SCORES // classes:,}"
        )
    if not label_sets[images.labels.unique()].any():
        raise UserError("no test image has a label, so there is no average precision; add labelled test images")


def average_precision(scores: NDArray[np.float64], is_positive: NDArray[np.bool_]) -> float:
    """Return the sum over thresholds of the precision times the increase of the recall, as scikit-learn defines it.

    Images of equal scores are one threshold.
    """
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)  # the last image of each threshold
    hits = np.cumsum(is_positive[order])[ends]
    return float(np.sum(np.diff(hits, prepend=0) * (hits / (ends + 1))) / hits[-1])


def mean_average_precision(scores: torch.Tensor, is_positive: torch.Tensor) -> float:
    """Return the mean over the classes that have positives.  Both are [images, classes]."""
    values = [
        average_precision(scores[:, number].double().numpy(), is_positive[:, number].numpy())
        for number in is_positive.any(0).nonzero().flatten().tolist()
    ]
    return sum(values) / len(values)


@torch.no_grad()
def evaluate_labels(
    model: nn.Module,
    images: ImageSet,
    label_sets: torch.Tensor,
    normalise: Normalise,
    batch_size: int,
    world: World,
    views: str = "one",
    average: WeightAverage | None = None,
) -> Evaluation:
    """Return the results over all `images`, whose labels number the rows of `label_sets`, bool [sets, classes].

    A class is predicted if its probability is above one half.  Top-1 counts images whose most likely class is one of
    their labels, top-5 those with a label among the five most likely classes.  The loss is the binary cross-entropy,
    summed over classes.
    """
    num_classes, device = label_sets.shape[1], world.device
    all_targets = label_sets.to(device)
    tops = torch.zeros(4, dtype=torch.int64, device=device)  # top-1, top-5, raw top-1, evaluated
    counts = torch.zeros(3, num_classes, dtype=torch.int64, device=device)  # right, with the label, predicted
    losses = torch.zeros(-(-len(images) // batch_size), dtype=torch.float64, device=device)
    # The set of each image plus 1, or 0 for an image that was not read: those are the last ones of their batch.
    sets = torch.zeros(len(images), dtype=torch.int64, device=device)
    scores = torch.zeros(
        len(images), num_classes, dtype=torch.promote_types(normalise.dtype, torch.float32), device=device
    )
    unreadable = list[str]()
    for batch in scored_batches(model, images, normalise, batch_size, world, views, average, unreadable):
        labels, logits = batch.labels, batch.logits
        targets = all_targets[labels]
        rows = slice(batch.first_sample, batch.first_sample + len(labels))
        sets[rows], scores[rows] = labels + 1, logits.to(scores.dtype)
        losses[batch.number] = summed_loss(LossSettings(name="bce"), logits, targets.to(scores.dtype))
        raw = logits if batch.raw_logits is None else batch.raw_logits
        right, raw_right = (targets.gather(1, scored.argmax(1, keepdim=True))[:, 0] for scored in (logits, raw))
        within_five = right | targets.gather(1, logits.topk(min(5, num_classes)).indices).any(1)
        tops += torch.stack([right, within_five, raw_right, torch.ones_like(right)]).sum(1)
        predicted = logits > 0
        counts += torch.stack([predicted & targets, targets, predicted]).sum(1)

    for tensor in (tops, counts, losses, sets, scores):
        world.all_reduce(tensor)
    top1, top5, raw_top1, total = tops.tolist()
    unreadable = gather_unreadable(unreadable, total, images, world)
    right_counts, seen, predicted_counts = counts.tolist()
    if not any(seen):
        raise UserError(f"no test image with a label can be read, such as {unreadable[0]}; fix the data set")
    class_precision, precision, recall, f1 = class_means(right_counts, seen, predicted_counts)
    is_read = sets > 0
    rank = partial(mean_average_precision, scores[is_read].cpu(), all_targets[sets[is_read] - 1].cpu())
    return Evaluation(
        top1=top1 / total,
        raw_top1=raw_top1 / total if average else None,
        top5=top5 / total,
        test_loss=losses.sum().item() / total,
        class_top1=[hits / count if count else None for hits, count in zip(right_counts, seen, strict=True)],
        samples_evaluated=total,
        precision=precision,
        balanced_accuracy=recall,
        f1=f1,
        class_precision=class_precision,
        mean_average_precision=world.from_rank_0(rank, float),
        unreadable=unreadable,
    )
