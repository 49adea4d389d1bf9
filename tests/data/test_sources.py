import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megabatch.data.catalog import infer_shape, load_data_set, load_other_images
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.images import ArrayImages, DataSet
from megabatch.data.settings import DataSettings, SyntheticSettings
from megabatch.errors import UserError
from tests.support.photos import make_folder, photo
from tools.embed_fashion import FASHION_MNIST, subset


def load(source: object, image_size: int = 28, **synthetic: int) -> DataSet:
    return load_data_set(
        DataSettings(source=str(source), image_size=image_size, synthetic=SyntheticSettings(**synthetic))
    )


def load_with(source: object, **settings: Any) -> DataSet:
    return load_data_set(DataSettings(source=str(source), image_size=28, **settings))


def pixels(images: object) -> torch.Tensor:
    assert isinstance(images, ArrayImages)
    return images.images


def arrays(channels: tuple[int, ...] = ()) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    return {
        "train_images": generator.integers(0, 256, (12, 28, 28, *channels), np.uint8),
        "train_labels": np.arange(12, dtype=np.uint8) % 3,
        "test_images": generator.integers(0, 256, (6, 28, 28, *channels), np.uint8),
        "test_labels": np.arange(6, dtype=np.uint8) % 3,
    }


def write_idx(folder: Path, content: dict[str, np.ndarray], zipped: bool) -> None:
    for part, prefix in (("train", "train"), ("test", "t10k")):
        for kind, dims in (("images", 3), ("labels", 1)):
            array = content[f"{part}_{kind}"]
            raw = bytes([0, 0, 8, dims]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
            name = f"{prefix}-{kind}-idx{dims}-ubyte"
            (folder / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(raw) if zipped else raw)


def test_the_embedded_set_is_balanced_and_has_the_stated_size() -> None:
    data = load("fashion-mnist-10k")
    assert (len(data.train), len(data.test), data.num_channels) == (10_000, 2_000, 1)
    assert torch.bincount(data.train.labels).tolist() == [1000] * 10
    assert torch.bincount(data.test.labels).tolist() == [200] * 10
    assert data.class_names[9] == "Boot"
    assert data.train.read(np.arange(5)).shape == (5, 1, 28, 28)


@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="needs Debian's dataset-fashion-mnist")
def test_the_embedded_set_is_the_stated_subset_of_the_full_set() -> None:
    data, expected = load("fashion-mnist-10k"), subset()
    assert np.array_equal(pixels(data.train)[:, 0].numpy(), expected["train_images"])
    assert np.array_equal(pixels(data.test)[:, 0].numpy(), expected["test_images"])
    assert np.array_equal(data.train.labels.numpy(), expected["train_labels"])
    assert len(load("fashion-mnist").train) == 60_000


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_folders_load_zipped_or_not(tmp_path: Path, zipped: bool) -> None:
    content = arrays()
    write_idx(tmp_path, content, zipped)
    data = load(tmp_path)
    assert np.array_equal(pixels(data.train)[:, 0].numpy(), content["train_images"])
    assert np.array_equal(data.test.labels.numpy(), content["test_labels"])
    assert data.class_names == ("0", "1", "2")


def test_npz_arrays_load_with_colour_and_class_names(tmp_path: Path) -> None:
    content = arrays((3,)) | {"class_names": np.array(["a", "b", "c", "d"])}
    np.savez(tmp_path / "set.npz", **content)
    data = load(tmp_path / "set.npz")
    assert data.class_names == ("a", "b", "c", "d") and data.num_channels == 3
    assert np.array_equal(pixels(data.train).permute(0, 2, 3, 1).numpy(), content["train_images"])


def test_images_are_resized_to_the_size_in_the_recipe(tmp_path: Path) -> None:
    content = arrays()
    content["train_images"] = np.full_like(content["train_images"], 77)
    np.savez(tmp_path / "set.npz", **content)
    images = load(tmp_path / "set.npz", image_size=32).train.read(np.arange(12))
    assert images.shape == (12, 1, 32, 32) and images.dtype == torch.uint8
    assert (images == 77).all()


def test_synthetic_images_follow_the_settings_and_are_reproducible() -> None:
    first, again = (load("synthetic", 20, train=500, test=30, classes=7, channels=2) for _ in range(2))
    samples = np.array([3, 499, 3])
    images = first.train.read(samples)
    assert images.shape == (3, 2, 20, 20) and images.dtype == torch.uint8
    assert torch.equal(images, again.train.read(samples)) and torch.equal(images[0], images[2])
    assert (len(first.train), len(first.test), len(first.class_names)) == (500, 30, 7)
    assert set(first.train.labels.tolist()) == set(range(7))
    assert not torch.equal(first.train.labels[:30], first.test.labels)


def test_synthetic_images_are_more_similar_within_a_class() -> None:
    data = load("synthetic", 16, train=200, classes=2, channels=1)
    images = data.train.read(np.arange(200)).float()
    means = [images[data.train.labels == label].mean(0) for label in range(2)]
    assert (means[0] - means[1]).abs().mean() > 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_labels": None}, "has no array 'train_labels'"),
        ({"train_images": np.zeros((12, 28, 28), np.float32)}, r"train_images is float32 .*expected uint8"),
        ({"test_labels": np.zeros(5, np.uint8)}, r"test_labels is uint8 of shape \(5,\) for 6 images"),
        ({"test_labels": -np.ones(6, np.int64)}, "has a label -1; labels must be from 0"),
        ({"test_labels": np.full(6, 2**63, np.uint64)}, "has a label 9223372036854775808; labels must be"),
        ({"train_labels": np.full(12, 2**64 - 1, np.uint64)}, "has a label 18446744073709551615; labels must be"),
        ({"train_labels": np.zeros(12, np.float32)}, "train_labels is float32"),
        ({"class_names": np.array(["a"])}, "has a label 2 but only 1 class_names"),
        ({"class_names": np.array("a")}, r"class_names is <U1 of shape \(\); expected a one-dimensional"),
        ({"class_names": np.array([["a", "b", "c"]])}, r"class_names is <U1 of shape \(1, 3\)"),
        ({"class_names": np.array([b"a", b"b", b"c"])}, r"class_names is \|S1"),
        ({"class_names": np.array(["a", "b\nd", "c"])}, r"class 1 is named 'b.nd'; expected .*characters"),
        ({"class_names": np.array(["a", "\x1b[2J", "c"])}, "class 1 is named .*; expected .*characters"),
        ({"class_names": np.array(["a", "b", "a"])}, "classes 0 and 2 are both named 'a'; rename one of them"),
        ({"class_names": np.array(["a", "", "c"])}, "class 1 is named ''; expected .*characters"),
        ({"class_names": np.array(["a" * 2000, "b", "c"])}, "class 0 is named .*; expected 1 to 1,000"),
        ({"train_images": np.zeros((12, 3, 28, 28), np.uint8)}, r"of shape \(12, 3, 28, 28\); .*C at most"),
        ({"train_images": np.zeros((12, 0, 28), np.uint8)}, r"of shape \(12, 0, 28\)"),
        ({"train_labels": np.full(12, 10**12)}, "has a label 1000000000000; labels must be from 0"),
        ({"test_images": np.zeros((6, 28, 28, 3), np.uint8)}, "same number of channels"),
    ],
)
def test_an_invalid_npz_is_refused_with_a_reason(tmp_path: Path, change: dict[str, object], message: str) -> None:
    content = {name: array for name, array in (arrays() | change).items() if array is not None}
    np.savez(tmp_path / "set.npz", **content)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=rf"set\.npz.*{message}"):
        load(tmp_path / "set.npz")


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.npz"):
        load(tmp_path / "gone.npz")
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(UserError, match=r"torn\.npz cannot be read as \.npz arrays"):
        load(tmp_path / "torn.npz")
    np.savez(tmp_path / "cut.npz", **arrays())  # type: ignore[arg-type]
    content = bytearray((tmp_path / "cut.npz").read_bytes())
    content[5000:5100] = bytes(100)
    (tmp_path / "cut.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"cut\.npz cannot be read as \.npz arrays"):
        load(tmp_path / "cut.npz")
    with pytest.raises(UserError, match=r"cannot be read .File name too long"):
        load("x" * 300)
    with pytest.raises(UserError, match=r"data.source='fashon-mnist' .*nearest: data.source=fashion-mnist"):
        load("fashon-mnist")
    (tmp_path / "t10k-labels-idx1-ubyte").touch()
    with pytest.raises(UserError, match="train-images-idx3-ubyte"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-5], "has 7 bytes .*header states 12"),
        (lambda raw: b"\0\0\x0d\x01" + raw[4:], "is not an IDX file"),
        (lambda raw: b"", "is not an IDX file"),
    ],
)
def test_a_damaged_idx_file_is_refused(tmp_path: Path, damage: object, message: str) -> None:
    write_idx(tmp_path, arrays(), zipped=False)
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UserError, match=rf"train-labels-idx1-ubyte .*({message})"):
        load(tmp_path)


def test_a_decompression_bomb_in_an_idx_file_is_refused(tmp_path: Path) -> None:
    write_idx(tmp_path, arrays(), zipped=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    for shape in ((2**32 - 1, 2**32 - 1, 2**32 - 1), (2**16, 2**16, 2**32 - 1), (1000, 1000, 1000)):
        path.write_bytes(gzip.compress(bytes([0, 0, 8, 3]) + np.array(shape, ">u4").tobytes() + bytes(1000)))
        with pytest.raises(UserError, match=r"gz cannot be read .*would expand to .*limit is 100"):
            load(tmp_path)
    path.write_bytes(gzip.compress(bytes([0, 0, 8, 3]) + np.array((12, 28, 28), ">u4").tobytes() + bytes(10**7)))
    with pytest.raises(UserError, match=r"more than 9,408 bytes .*header states 9,408"):
        load(tmp_path)


def test_a_damaged_gzip_is_refused(tmp_path: Path) -> None:
    write_idx(tmp_path, arrays(), zipped=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"t10k-images-idx3-ubyte\.gz cannot be read"):
        load(tmp_path)


def labels_of(data: DataSet) -> list[list[int]]:
    return [part.labels.tolist() for part in (data.train, data.test)]


@pytest.mark.parametrize("source", ["fashion-mnist-10k", "synthetic", "photos"])
def test_held_out_images_are_the_same_share_of_every_class(tmp_path: Path, source: str) -> None:
    if source == "photos":
        source = str(make_folder(tmp_path / "photos", per_class=10))
    whole = load_with(source, validation=0.5)
    every = Counter(whole.train.labels.tolist()) + Counter(whole.test.labels.tolist())
    data, again, other = (load_with(source, validation=0.2, validation_seed=seed) for seed in (1, 1, 2))
    for label, count in every.items():
        assert Counter(data.test.labels.tolist())[label] == round(0.2 * count)
    assert Counter(data.train.labels.tolist()) + Counter(data.test.labels.tolist()) == every
    some = np.arange(20 if source == "synthetic" else 6)
    assert torch.equal(data.test.read(some), again.test.read(some))
    assert not torch.equal(data.test.read(some), other.test.read(some))
    assert infer_shape(DataSettings(source=source, image_size=28, validation=0.2)) == data.shape


@pytest.mark.parametrize("source", ["fashion-mnist-10k", "photos"])
def test_train_per_class_limits_training_images_and_keeps_test_images(tmp_path: Path, source: str) -> None:
    if source == "photos":
        make_folder(tmp_path / "photos" / "val", per_class=2)
        make_folder(tmp_path / "photos" / "train", per_class=10)
        source = str(tmp_path / "photos")
    whole = load_with(source)
    data, again, other, more = (
        load_with(source, train_per_class=number, validation_seed=seed)
        for number, seed in ((4, 1), (4, 1), (4, 2), (6, 1))
    )
    assert {*Counter(data.train.labels.tolist()).values()} == {4} and data.test.labels.equal(whole.test.labels)
    every, more_images = np.arange(len(data.train)), more.train.read(np.arange(len(more.train)))
    images = data.train.read(every)
    assert torch.equal(images, again.train.read(every)) and not torch.equal(images, other.train.read(every))
    assert all(any(torch.equal(image, one) for one in more_images) for image in images)
    assert infer_shape(DataSettings(source=source, image_size=28, train_per_class=4)) == data.shape
    held_out = load_with(source, train_per_class=4, validation=0.25)  # of the four
    assert {*Counter(held_out.train.labels.tolist()).values()} == {3}
    assert {*Counter(held_out.test.labels.tolist()).values()} == {1}
    with pytest.raises(UserError, match=r"data.train_per_class=2000: class .* nearest: data.train_per_class="):
        load_with(source, train_per_class=2000)


def test_no_image_is_both_trained_and_tested_on(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "photos", per_class=9)
    data = load_with(folder, validation=0.3)
    assert isinstance(data.train, EncodedImages) and isinstance(data.test, EncodedImages)
    places = [part.files.where(number) for part in (data.train, data.test) for number in range(len(part))]
    assert sorted(places) == sorted(str(path) for path in folder.rglob("*.jpg"))


def test_sources_are_joined_by_the_names_of_their_classes(tmp_path: Path) -> None:
    first = make_folder(tmp_path / "first", 3, ("bag", "coat"))
    second = make_folder(tmp_path / "second", 4, ("ankle", "coat"))
    data = load_with(first, also=[str(second)], validation=0.25)
    assert data.class_names == ("ankle", "bag", "coat")
    counts = Counter(labels_of(data)[0]) + Counter(labels_of(data)[1])
    assert counts == {0: 4, 1: 3, 2: 7}
    assert isinstance(data.train, EncodedImages)
    for number, label in enumerate(data.train.labels.tolist()):
        assert f"/{data.class_names[label]}/" in data.train.files.where(number)


def test_impossible_splits_and_joins_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "photos", per_class=1)
    with pytest.raises(UserError, match=r"data.validation=0.1: class 'ankle' .*1 training image"):
        load_with(folder, validation=0.1)
    with pytest.raises(UserError, match=r"photos has no test images .*data.validation=0.1"):
        load_with(folder)
    with pytest.raises(UserError, match=r"data.also=.*: only folders, CSV files and tars can be joined"):
        load_with("fashion-mnist-10k", also=[str(folder)])
    with pytest.raises(UserError, match=r"gone is neither .*folder.*\.tar"):
        load_with(folder, also=[str(tmp_path / "gone")])
    both = tmp_path / "both"
    make_folder(both / "one/train", 2, ("bag", "coat"))
    make_folder(both / "one/val", 2, ("bag", "coat"))
    make_folder(both / "two/train", 2, ("ankle", "bag"))
    with pytest.raises(UserError, match="no test image of class 'ankle'"):
        load_with(both / "one", also=[str(both / "two")])
    with pytest.raises(UserError, match=r"data.source='imagenet' is the folder ./imagenet, .*data.source=FOLDER"):
        load_with("imagenet")


def test_other_images_are_labelled_by_the_class_names_of_the_run(tmp_path: Path) -> None:
    trained_on = load_with(make_folder(tmp_path / "trained", 4, ("ankle", "bag", "coat")), validation=0.25)
    other = make_folder(tmp_path / "other", 2, ("bag", "coat"))
    images, _ = load_other_images(DataSettings(source=str(other), image_size=28), trained_on.class_names, 3, threads=1)
    assert images.labels.tolist() == [1, 1, 2, 2]
    make_folder(other, 2, ("dress",))
    with pytest.raises(UserError, match=r"class 'dress', .*not trained"):
        load_other_images(DataSettings(source=str(other), image_size=28), trained_on.class_names, 3, threads=1)


def test_sets_with_differently_numbered_samples_have_different_fingerprints(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "photos", per_class=5)
    whole = load_with(folder, validation=0.2).fingerprint()
    assert load_with(folder, validation=0.2).fingerprint() == whole
    seen = {whole, load_with(folder, validation=0.4).fingerprint()}
    seen.add(load_with(folder, validation=0.2, validation_seed=3).fingerprint())
    (folder / "bag" / "000.jpg").rename(folder / "bag" / "other.jpg")
    seen.add(load_with(folder, validation=0.2).fingerprint())
    photo(5).save(folder / "coat" / "more.jpg")
    seen.add(load_with(folder, validation=0.2).fingerprint())
    seen.add(load_with(folder, validation=0.2, also=[str(make_folder(tmp_path / "also", 2))]).fingerprint())
    assert len(seen) == 6
    assert load("synthetic", train=20).fingerprint() != load("synthetic", train=21).fingerprint()


def test_auto_tests_on_the_test_split_of_the_source_or_holds_out_a_tenth(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "photos/train", 12)
    assert load_with(folder, validation="auto").fingerprint() == load_with(folder, validation=0.1).fingerprint()
    assert load_with(folder, validation="auto").tested_on.startswith("10% of each class, held out")
    make_folder(tmp_path / "photos/test", 2)
    data = load_with(tmp_path / "photos", validation="auto")
    assert (len(data.train), len(data.test)) == (36, 6) and data.tested_on == "its own test/"
    assert data.fingerprint() == load_with(tmp_path / "photos").fingerprint()
    make_folder(tmp_path / "photos/val", 3)
    data = load_with(tmp_path / "photos", validation="auto")
    assert len(data.test) == 9 and data.tested_on == "its own val/"
    given = load_with(tmp_path / "photos", validation=0.25)  # the user's value takes precedence
    assert (len(given.train), len(given.test), given.tested_on) == (27, 9, "")
    assert infer_shape(DataSettings(source="imagenet", image_size=28, validation="auto")).num_test == 50_000


def crops(folder: Path, image_size: int, **settings: Any) -> list[float]:
    data = load_data_set(DataSettings(source=str(folder), image_size=image_size, validation=0.25, **settings))
    return [part.center_crop for part in (data.train, data.test)]  # type: ignore[attr-defined]


def test_small_images_are_evaluated_whole_and_larger_ones_cropped(tmp_path: Path) -> None:
    folder = tmp_path / "cifar"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(6):
            photo(number, 32, 32).save(folder / name / f"{number}.png")
    assert crops(folder, 32) == crops(folder, 29) == [1.0, 1.0]
    assert crops(folder, 28) == [0.875, 0.875]  # 28 of 32: the centre crop is as large as a training crop
    assert crops(folder, 32, center_crop=0.875) == [0.875, 0.875] and crops(folder, 8, center_crop=1.0) == [1.0, 1.0]
    data = load_data_set(DataSettings(source=str(folder), image_size=32, validation=0.25))
    at, where = 0, Path(data.test.files.where(0))  # type: ignore[attr-defined]
    with Image.open(where) as image:
        assert np.array_equal(data.test.read(np.array([at]))[0].permute(1, 2, 0).numpy(), np.asarray(image))


@pytest.mark.parametrize("image_size", [28, 64, 100, 224, 299])
def test_images_packed_for_the_center_crop_are_still_cropped(image_size: int, tmp_path: Path) -> None:
    side = round(image_size * 8 / 7)  # the --shorter-side that `doctor` suggests
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGB", (side + 20 * number, side)).save(tmp_path / name / f"{number}.png")
    assert crops(tmp_path, image_size) == [0.875, 0.875]


def test_the_default_crop_of_large_images_does_not_change_their_fingerprint(tmp_path: Path) -> None:
    """Runs from before `auto` existed can be resumed.  Small images are cropped differently now."""
    folder = make_folder(tmp_path / "photos", 4)
    settings: list[dict[str, Any]] = [{}, {"center_crop": 0.875}]
    for image_size, is_same in ((28, True), (60, False)):
        ours, before = (
            load_data_set(DataSettings(source=str(folder), image_size=image_size, validation=0.25, **more))
            for more in settings
        )
        assert (ours.fingerprint() == before.fingerprint()) is is_same
        seen, seen_before = (part.read(np.arange(3)) for part in (ours.test, before.test))
        assert torch.equal(seen, seen_before) is is_same
