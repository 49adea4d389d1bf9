"""Evaluation, exact under any sharding: integer counts, all-reduced; no sample is padded or seen twice."""

import base64
import io

import numpy as np
import torch
from PIL import Image
from torch import nn

from megabatch.data.pipeline.batches import evaluation_batches
from megabatch.data.pipeline.decode import Unreadable
from megabatch.data.pipeline.images import ImageSet
from megabatch.data.pipeline.normalise import Normalise
from megabatch.data.pipeline.reader import Reader, Request
from megabatch.errors import UserError
from megabatch.models.loss import LossSettings, summed_loss
from megabatch.ranks.world import World
from megabatch.runs.records import MOST_CLASSES, MOST_CONFUSIONS, Confusion, Evaluation, Example, Mistakes

# What an evaluation takes for what: counts of pairs of classes, and pictures of the mistakes it was most confident
# of.
#
# Nothing here waits for the device before the evaluation ends, and nothing grows with the number of ranks but the few
# most confident mistakes of each, of which rank 0 chooses.  It then reads those images once more.

PICTURE_SIZE = 96  # pixels of the longer side, at most
LARGEST_PNG = 48  # pixels of the longer side; of what is larger, a JPEG takes a fifth of the bytes
QUALITY = 80
NO_SAMPLE = -1.0
FIELDS = 4  # of a candidate: confidence, sample, label, predicted


class MistakeCounter:
    """Sees the batches of one evaluation after another; `collect` ends each, on all ranks."""

    def __init__(self, images: ImageSet, num_classes: int, num_examples: int, world: World) -> None:
        self.images, self.num_classes, self.num_examples, self.world = images, num_classes, num_examples, world
        self.is_counting = num_classes <= MOST_CLASSES
        self.batches: list[torch.Tensor] = []  # of candidates, float64 [FIELDS, B]
        self.newest: Mistakes | None = None  # of the evaluation that ended last; on rank 0

    def see(self, first_sample: int, labels: torch.Tensor, logits: torch.Tensor, is_whole: bool) -> None:
        """Of a batch that is not whole, nobody knows which images are missing: none of it becomes an example."""
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
        matrix = pairs.view(self.num_classes, self.num_classes).cpu()
        matrix.fill_diagonal_(0)
        found = [Confusion(label, other, int(matrix[label, other])) for label, other in matrix.nonzero().tolist()]
        return sorted(found, key=lambda pair: (-pair.count, pair.label, pair.predicted))[:MOST_CONFUSIONS]

    def choose(self, seen: torch.Tensor) -> list[list[float]]:
        """The most confident mistakes of all ranks; of equals, the first."""
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
        """None if the image cannot be read any more: no run ends for the sake of a picture."""
        try:
            batch = Reader(self.images).make(Request(np.array([int(sample)]), None))
        except (UserError, Unreadable, OSError):
            return None
        if not len(batch.labels):
            return None
        picture = picture_of(batch.images[0].cpu())
        return Example(
            sample=int(sample), label=int(label), predicted=int(predicted), confidence=confidence, picture=picture
        )


def picture_of(image: torch.Tensor) -> str:
    """Small, in base64: a PNG, of a photo a JPEG."""
    pixels = image[:3].permute(1, 2, 0) if len(image) >= 3 else image[0]
    picture, file = Image.fromarray(pixels.contiguous().numpy()), io.BytesIO()
    is_photo = picture.mode == "RGB" and max(picture.size) > LARGEST_PNG
    picture.thumbnail((PICTURE_SIZE, PICTURE_SIZE))
    picture.save(file, "JPEG" if is_photo else "PNG", quality=QUALITY)
    return base64.b64encode(file.getvalue()).decode()


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
