import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megabatch.data.pipeline.images import ArrayImages
from megabatch.data.pipeline.normalise import Normalise, measure_pixels
from megabatch.ranks.world import World
from megabatch.training.evaluate import Evaluation, evaluate
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
            assert result == alone  # to the bit, the loss too
            assert result.samples_evaluated == count
            assert result.top1 == first.sum().item() / count
            assert result.top5 == within_five.sum().item() / count
            assert result.test_loss == pytest.approx(F.cross_entropy(logits, images.labels).item(), rel=1e-12)
            for label, accuracy in enumerate(result.class_top1):
                here = images.labels == label
                assert accuracy == (first[here].double().mean().item() if here.any() else None)
