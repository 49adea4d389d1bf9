from types import ModuleType

import numpy as np
import pytest
import torch

from megabatch.data.pipeline.batches import TrainingImages, evaluation_batches
from megabatch.data.pipeline.images import ArrayImages
from megabatch.data.pipeline.order import epoch_order
from megabatch.data.settings import AugmentSettings, DataSettings
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


@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_repeated_augmentation_has_the_samples_of_timm(
    torchvision: ModuleType, monkeypatch: pytest.MonkeyPatch, repeats: int
) -> None:
    """timm's sampler gives the copies of a sample to different ranks; here they are in different microbatches."""
    from timm.data.distributed_sampler import RepeatAugSampler

    num_samples, num_epochs, ranks = 48, 3, 4
    augment = AugmentSettings(repeats=repeats)
    plan = plan_steps(BatchSettings(global_batch=16, microbatch=4), 1, num_samples, num_epochs)
    training = TrainingImages(numbered(num_samples), DataSettings(source="", image_size=8, augment=augment), 9, plan)
    copies = [[training.samples(step, index) for index in range(ranks)] for step in range(plan.num_steps)]
    for step, microbatches in enumerate(copies):
        epoch, place = divmod(4 * step, num_samples // ranks)
        order = torch.from_numpy(epoch_order(9, epoch, num_samples))
        monkeypatch.setattr(torch, "randperm", lambda count, generator, order=order: order)
        theirs = []
        for rank in range(ranks):
            sampler = RepeatAugSampler(range(num_samples), ranks, rank, num_repeats=repeats, selected_round=0)
            theirs += list(sampler)[place : place + 4]
        assert sorted(np.concatenate([samples for samples, _ in microbatches])) == sorted(theirs)
        for samples, _ in microbatches:
            assert len({*samples}) == 4
    drawn = [(*pair,) for step in copies for samples, epochs in step for pair in zip(samples, epochs, strict=True)]
    assert len({*drawn}) == len(drawn) == num_samples * num_epochs  # all are augmented differently
