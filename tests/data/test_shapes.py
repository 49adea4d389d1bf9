"""The shape of a named data set is known without its images."""

from typing import Any

import numpy as np
import pytest

from megabatch.config.loading import load_config
from megabatch.config.recipes import recipe_names
from megabatch.data import catalog as sources
from megabatch.data.catalog import choose_per_class, infer_shape, load_data_set, split
from megabatch.data.settings import DataSettings
from megabatch.data.sources.shapes import FULL_FASHION_MNIST, IMAGENET, KNOWN_SETS
from megabatch.errors import UserError
from tools.embed_fashion import FASHION_MNIST


@pytest.mark.parametrize("source", ["fashion-mnist-10k", "synthetic", "fashion-mnist"])
@pytest.mark.parametrize("part", [{}, {"validation": 0.1}, {"train_per_class": 7, "validation": 0.4}], ids=str)
def test_the_inferred_shape_matches_the_loaded_set(source: str, part: dict[str, Any]) -> None:
    if source == "fashion-mnist" and not FASHION_MNIST.is_dir():
        pytest.skip("needs Debian's dataset-fashion-mnist")
    settings = DataSettings(source=source, image_size=28, **part)
    assert infer_shape(settings) == load_data_set(settings).shape


def count_parts(labels: np.ndarray, num_classes: int, per_class: int | None, share: float) -> tuple[int, int]:
    """Count training and held-out images as a run splits them."""
    settings, names = DataSettings(source="any", image_size=28), tuple(map(str, range(num_classes)))
    if per_class is not None:
        labels = labels[choose_per_class(settings, per_class, labels, names, "any")]
    train, test = split(settings, share, labels, names, "any")
    return len(train), len(test)


@pytest.mark.parametrize("per_class", [None, 2, 7, 2_000, 6_000])
@pytest.mark.parametrize("share", [1e-6, 0.05, 1 / 12, 0.25, 0.5, 0.999_999])
def test_the_inferred_split_of_fashion_mnist_matches_its_labels(per_class: int | None, share: float) -> None:
    labels = np.arange(FULL_FASHION_MNIST.num_train, dtype=np.int64) % 10
    shape = infer_shape(
        DataSettings(source="fashion-mnist", image_size=28, train_per_class=per_class, validation=share)
    )
    assert (shape.num_train, shape.num_test) == count_parts(labels, 10, per_class, share)


def test_the_inferred_split_of_imagenet_is_right_to_half_an_image_per_class() -> None:
    sizes = np.random.default_rng(0).integers(732, 1_301, 1_000)
    sizes[0] += IMAGENET.num_train - sizes.sum()  # one class of another size, so that the total is ImageNet's
    labels = np.repeat(np.arange(1_000), sizes)
    shape = infer_shape(DataSettings(source="imagenet", image_size=224, validation=0.1))
    num_train, num_test = count_parts(labels, 1_000, None, 0.1)
    assert shape.num_train + shape.num_test == num_train + num_test == IMAGENET.num_train
    assert abs(shape.num_test - num_test) <= 500
    assert infer_shape(DataSettings(source="imagenet", image_size=224, train_per_class=13)).num_train == 13_000


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"train_per_class": 6_001}, r"train_per_class=6001: .*6,000 .*nearest: data.train_per_class=6000"),
        ({"train_per_class": 1, "validation": 0.5}, r"validation=0.5: .*leaves 1 training image.*=2 or more"),
    ],
)
def test_an_impossible_split_is_refused_without_images(part: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        infer_shape(DataSettings(source="fashion-mnist", image_size=28, **part))


def test_no_recipe_needs_images_for_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise AssertionError("images were read")

    monkeypatch.setattr(sources, "find_source", refuse)
    named = [config for config in map(load_config, recipe_names()) if config.data.source in KNOWN_SETS]
    assert len(named) > 15
    for config in named:
        assert infer_shape(config.data).num_train > 0


def test_training_on_a_named_set_that_is_missing_is_refused() -> None:
    with pytest.raises(UserError, match=r"^data.source='imagenet' is the folder ./imagenet, .*give data.source=FOLDER"):
        load_data_set(load_config("resnet50-imagenet-64k").data)
