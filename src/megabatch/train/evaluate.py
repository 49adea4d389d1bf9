"""Evaluation, exact under any sharding: integer counts, all-reduced; no sample is padded or seen twice."""

import torch
from torch import nn

from megabatch.data.batches import evaluation_batches
from megabatch.data.images import ImageSet
from megabatch.data.normalise import Normalise
from megabatch.errors import UserError
from megabatch.models.loss import LossSettings, summed_loss
from megabatch.ranks.world import World
from megabatch.runs.records import Evaluation
from megabatch.train.mistakes import MistakeCounter

# For benches and the doctor, which take steps alone.
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
) -> Evaluation:
    """Top-1, top-5, loss and top-1 per class over all of `images`, shared out over the ranks."""
    # Per class: right at first guess, right within five, seen.
    counts = torch.zeros(3, num_classes, dtype=torch.int64, device=world.device)
    # One place per batch, filled by the rank that takes it: summed in one order, whatever the number of ranks.
    losses = torch.zeros(-(-len(images) // batch_size), dtype=torch.float64, device=world.device)
    was_training = model.training
    frozen = [module for module in model.modules() if not module.training]
    model.eval()
    unreadable = list[str]()
    for number, batch in evaluation_batches(images, batch_size, world.rank, world.num_ranks, world.device):
        world.activity.begin("evaluation")  # with every batch: it may be a long one
        unreadable += batch.skipped
        if not len(batch.labels):
            continue
        labels = batch.labels.to(world.device)
        logits = model(normalise(batch.images))
        losses[number] = summed_loss(LossSettings(), logits, labels)
        right = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        marks = torch.stack([right[:, 0], right.any(1), torch.ones_like(labels, dtype=torch.bool)])
        counts.index_add_(1, labels, marks.long())
        if mistakes:
            mistakes.see(number * batch_size, labels, logits, is_whole=not batch.skipped)
    model.train(was_training)
    for module in frozen:
        module.training = False

    world.activity.begin("evaluation")
    world.all_reduce(counts)
    world.all_reduce(losses)
    top1, top5, total = counts.sum(1).tolist()
    if total < len(images):
        unreadable = [line for lines in world.all_gather(unreadable) for line in lines]
    assert total + len(unreadable) == len(images), f"evaluated {total} of {len(images)} samples"
    if not total:
        raise UserError(f"no test image can be read, such as {unreadable[0]}; fix the set")
    first, _, seen = counts.tolist()
    if mistakes:
        mistakes.collect(seen)
    return Evaluation(
        top1=top1 / total,
        top5=top5 / total,
        test_loss=losses.sum().item() / total,
        class_top1=[right / count if count else None for right, count in zip(first, seen, strict=True)],
        samples_evaluated=total,
        unreadable=unreadable,
    )
