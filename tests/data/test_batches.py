import numpy as np
import pytest
import torch

from megabatch.data.pipeline.batches import TrainingImages, evaluation_batches
from megabatch.data.pipeline.images import ArrayImages
from megabatch.data.pipeline.order import epoch_order
from megabatch.data.settings import DataSettings
from megabatch.planning.batch import BatchSettings, plan_steps


def numbered(count: int) -> ArrayImages:
    """Return images whose pixels and label are the sample's number."""
    numbers = torch.arange(count)
    return ArrayImages(numbers.to(torch.uint8)[:, None, None, None].expand(count, 1, 8, 8).contiguous(), numbers)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_evaluation_batches_do_not_depend_on_ranks_and_have_every_sample_once(num_ranks: int) -> None:
    images = numbered(37)
    by_number = {}
    for rank in range(num_ranks):
        for number, batch in evaluation_batches(images, 4, rank, num_ranks):
            by_number[number] = batch.labels.tolist()
    assert by_number == {number: list(range(4 * number, min(4 * number + 4, 37))) for number in range(10)}


def test_training_microbatches_follow_the_epoch_order() -> None:
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
