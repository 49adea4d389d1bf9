"""Balanced sampling: its laws, for classes of any sizes."""

import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabatch.data.pipeline.batches import TrainingImages
from megabatch.data.pipeline.images import ArrayImages
from megabatch.data.pipeline.order import BalancedOrder
from megabatch.data.settings import AugmentSettings, DataSettings
from megabatch.planning.batch import BatchSettings, plan_steps

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)
EPOCHS = 5


def labels_of(sizes: list[int]) -> np.ndarray:
    """Return shuffled labels, with a class number that has no images."""
    labels = np.repeat(2 * np.arange(len(sizes)), sizes)
    return np.random.default_rng(0).permutation(labels)


@given(sizes=SIZES, seed=st.integers(0, 2**63 - 1))
def test_every_class_has_its_share_of_each_epoch_and_every_use_of_an_image_is_another(
    sizes: list[int], seed: int
) -> None:
    labels = labels_of(sizes)
    order, quota = BalancedOrder(seed, labels), -(-len(labels) // len(sizes))
    uses = Counter[tuple[int, int]]()
    for epoch in range(EPOCHS):
        samples, cycles = order(epoch)
        assert len(samples) == len(labels)
        counts = Counter(labels[samples].tolist())
        missing = len(sizes) * quota - len(labels)  # cut from the end of the epoch
        assert max(counts.values()) <= quota and min(counts[2 * c] for c in range(len(sizes))) >= quota - missing
        uses.update(zip(samples.tolist(), cycles.tolist(), strict=True))
    assert max(uses.values()) == 1


@given(sizes=SIZES)
def test_the_images_of_a_class_are_used_equally_often(sizes: list[int]) -> None:
    labels = labels_of(sizes)
    order = BalancedOrder(3, labels)
    order.num_samples = len(sizes) * order.quota  # without the cut
    used = np.bincount(np.concatenate([order(epoch)[0] for epoch in range(EPOCHS)]), minlength=len(labels))
    for label in set(labels.tolist()):
        of_class = used[labels == label]
        assert of_class.max() - of_class.min() <= 1


@given(size=st.integers(1, 30), classes=st.integers(1, 6))
def test_classes_of_one_size_make_each_epoch_a_permutation(size: int, classes: int) -> None:
    order = BalancedOrder(5, labels_of([size] * classes))
    orders = [order(epoch) for epoch in range(EPOCHS)]
    for epoch, (samples, cycles) in enumerate(orders):
        assert sorted(samples) == list(range(size * classes)) and set(cycles) == {epoch}
    if size * classes > 20:
        assert len({tuple(samples) for samples, _ in orders}) == EPOCHS


def training_images(num_ranks: int, repeats: int = 1) -> TrainingImages:
    labels = torch.from_numpy(labels_of([3, 40, 5]))
    images = ArrayImages(torch.randint(0, 256, (48, 1, 8, 8), dtype=torch.uint8), labels)
    plan = plan_steps(BatchSettings(global_batch=16, microbatch=4), num_ranks, 48, 3)
    augment = AugmentSettings(repeats=repeats)
    settings = DataSettings(source="", image_size=8, sampling="balanced", flip="alternating", augment=augment)
    return TrainingImages(images, settings, 9, plan)


@pytest.mark.parametrize("repeats", [1, 2])
def test_repeats_and_alternating_flips_see_a_new_use_each_time(repeats: int) -> None:
    images = training_images(1, repeats)
    drawn = [images.samples(step, index) for step in range(images.plan.num_steps) for index in range(4)]
    uses = [pair for samples, epochs in drawn for pair in zip(samples.tolist(), epochs.tolist(), strict=True)]
    assert len({*uses}) == len(uses) == 144
    rare = [epoch for sample, epoch in uses if images.images.labels[sample] == 0]
    assert 16 <= len(rare) <= 48 and abs(np.mean(np.array(rare) % 2) - 0.5) < 0.1  # half of the flips are mirrored


def test_a_resumed_run_and_the_decoder_process_get_the_same_requests() -> None:
    whole, resumed = training_images(2), training_images(2)
    for step in (8, 4, 5):  # in any order
        for index in range(4):
            request = pickle.loads(pickle.dumps(resumed.request(step, index)))()
            samples, epochs = whole.samples(step, index)
            assert request.epochs is not None
            assert np.array_equal(request.samples, samples) and np.array_equal(request.epochs, epochs)
