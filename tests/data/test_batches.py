import numpy as np
import pytest
import torch

from megabatch.data.batches import Normalise, TrainingImages, evaluation_batches
from megabatch.data.images import ArrayImages
from megabatch.data.order import epoch_order
from megabatch.data.settings import DataSettings
from megabatch.planning.batch import BatchSettings, plan_steps


def numbered(count: int) -> ArrayImages:
    """Images whose every pixel is the sample's number, as is the label."""
    numbers = torch.arange(count)
    return ArrayImages(numbers.to(torch.uint8)[:, None, None, None].expand(count, 1, 8, 8).contiguous(), numbers)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_evaluation_reads_every_sample_once_in_batches_that_do_not_depend_on_the_ranks(num_ranks: int) -> None:
    images = numbered(37)
    by_number = {}
    for rank in range(num_ranks):
        for number, batch in evaluation_batches(images, 4, rank, num_ranks):
            by_number[number] = batch.labels.tolist()
    assert by_number == {number: list(range(4 * number, min(4 * number + 4, 37))) for number in range(10)}


def test_training_microbatches_follow_the_order_of_the_epochs() -> None:
    images = numbered(50)
    plan = plan_steps(BatchSettings(global_batch=12, microbatch=4), 1, 50, 3)
    training = TrainingImages(images, DataSettings(source="", image_size=8), 9, plan)
    seen = []
    for step in range(plan.num_steps):
        for index in range(3):
            pixels, labels = training.microbatch(step, index)
            assert torch.equal(pixels[:, 0, 0, 0].long(), labels)
            seen += labels.tolist()
    assert seen == np.concatenate([epoch_order(9, epoch, 50) for epoch in range(3)])[: len(seen)].tolist()


def test_normalised_images_have_zero_mean_and_unit_deviation() -> None:
    pixels = torch.randint(0, 200, (2300, 3, 8, 8), dtype=torch.uint8)
    pixels[:, 1] = 7  # a channel without variation
    images = ArrayImages(pixels, torch.zeros(2300, dtype=torch.int64))
    result = Normalise(images, torch.device("cpu"), torch.float64)(pixels)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), atol=1e-9, rtol=0)
    deviations = result.std((0, 2, 3), correction=0)
    torch.testing.assert_close(deviations, torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), atol=1e-9, rtol=0)
