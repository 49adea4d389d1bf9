"""Evaluation of images with several labels, exact for any number of ranks: average precision and counts per class.

The average precision of a class ranks all test images by their score, so every rank writes the scores of its images
into the rows of a tensor of zeros, and the tensors are summed: adding zero is exact.  Rank 0 then computes it in fp64.
"""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from megabatch.data.pipeline.images import ImageSet
from megabatch.data.pipeline.normalise import Normalise
from megabatch.errors import UserError
from megabatch.models.loss import LossSettings, summed_loss
from megabatch.ranks.world import World
from megabatch.runs.records import Evaluation
from megabatch.training.ema import WeightAverage
from megabatch.training.evaluate import class_means, gather_unreadable, scored_batches

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
