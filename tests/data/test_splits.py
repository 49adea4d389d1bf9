"""Split folders under the names of published data sets, and splits that are mistaken for classes."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megabatch.data.catalog import infer_shape, load_data_set, load_other_images
from megabatch.data.pipeline.images import DataSet
from megabatch.data.settings import DataSettings
from megabatch.data.sources import folders
from megabatch.data.sources.folders import FolderFiles, read_folder
from megabatch.errors import UserError
from tests.support.photos import CLASSES, make_folder
from tests.support.pictures import write_files

pytestmark = pytest.mark.usefixtures("index_cache")


def load(source: Path, **settings: Any) -> DataSet:
    return load_data_set(DataSettings(source=str(source), image_size=28, **settings))


def make_splits(folder: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        make_folder(folder / name, per_class=3 - min(number, 2))
    return folder


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train", "valid"),  # fastai, Roboflow
        ("Train", "Val"),
        ("TRAIN", "TEST"),
        ("training", "validation"),
        ("train", "dev"),
        ("Training", "Testing"),
        ("train", "eval"),
        ("train", "evaluation"),
        ("training_set", "test_set"),
        ("trainset", "Validation Set"),
    ],
)
def test_splits_are_found_under_common_names(tmp_path: Path, train: str, test: str) -> None:
    folder = make_splits(tmp_path / "set", train, test)
    data = load(folder)
    assert data.class_names == CLASSES and (len(data.train), len(data.test)) == (9, 6)
    assert data.tested_on == f"its own {test}/" and data.warnings == ()
    indexed = read_folder(folder)
    for part, name in ((indexed.train, train), (indexed.test, test)):
        assert isinstance(part, FolderFiles) and part.folder == folder / name
        assert {Path(part.where(number)).parents[1] for number in range(len(part))} == {folder / name}


def test_a_single_training_folder_is_a_split_under_any_common_name(tmp_path: Path) -> None:
    data = read_folder(make_splits(tmp_path / "set", "Training"))
    assert data.class_names == CLASSES and data.test is None


def test_validation_folders_are_preferred_to_test_folders(tmp_path: Path) -> None:
    for validation in ("valid", "dev", "Validation"):
        folder = make_splits(tmp_path / validation / "set", "train", validation)
        write_files(folder, ["test/unlabelled.jpg", "testing/unlabelled.jpg"])
        assert load(folder).tested_on == f"its own {validation}/"


@pytest.mark.parametrize(
    ("names", "both"),
    [
        (["train", "val", "valid"], "val/ and valid/ to test on"),
        (["train", "Val", "val", "test"], "Val/ and val/ to test on"),
        (["train", "test", "eval"], "eval/ and test/ to test on"),
        (["Train", "train", "val"], "Train/ and train/ to train on"),
        (["train", "training"], "train/ and training/ to train on"),
    ],
)
def test_two_folders_for_one_split_raise_an_error_that_names_both(tmp_path: Path, names: list[str], both: str) -> None:
    folder = make_splits(tmp_path / "set", *names)
    with pytest.raises(UserError, match=rf"^{folder} has both {both}, .*rename or remove") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_the_index_of_a_folder_with_splits_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_splits(tmp_path / "set", "Train", "Valid")
    read_folder(folder)
    monkeypatch.setattr(folders, "index_folder", None)  # calling it would raise
    again = read_folder(folder).test
    assert isinstance(again, FolderFiles) and again.folder == folder / "Valid"


def test_splits_with_one_nested_folder_raise_an_error_with_the_remedy(tmp_path: Path) -> None:
    write_files(tmp_path / "set", ["training/training/n0/1.jpg", "validation/validation/n0/1.jpg"])
    with pytest.raises(UserError, match=r"only the folder 'training' .*'validation'.*up one level$"):
        read_folder(tmp_path / "set")


@pytest.mark.parametrize(
    ("names", "suspects"),
    [
        (("train", "holdout"), "train"),
        (("valid", "test"), "test, valid"),
        (("Test", "cat", "dog"), "Test"),
        (("seg_pred", "seg_test", "seg_train"), "seg_test, seg_train"),
        (("eval", "train2017", "cat", "val2017", "test2017"), "eval, test2017, train2017 and 1 more"),
        (("train_station", "valley", "testament", "developer"), None),
        (CLASSES, None),
    ],
)
def test_classes_named_like_splits_give_a_warning(tmp_path: Path, names: tuple[str, ...], suspects: str | None) -> None:
    folder = make_folder(tmp_path / "set", 2, names)
    data = load(folder, validation=0.5)
    assert sorted(data.class_names) == sorted(names)  # a real class may have such a name
    if suspects is None:
        assert data.warnings == ()
    else:
        (line,) = data.warnings
        assert line.startswith(f"{folder} has classes named like splits: {suspects}; if they are not classes, rename ")
        assert "\n" not in line


@pytest.mark.parametrize(
    ("source", "images", "hint"),
    [
        ("set", ["set/photos/cat/1.jpg", "set/photos/cat/2.jpg", "set/photos/dog/1.jpg"], "use SET/photos"),
        ("set", ["set/a/b/train/cat/1.jpg", "set/a/b/val/cat/1.jpg"], "use SET/a/b"),
        ("set", ["set/test/cat/1.jpg", "set/test/dog/1.jpg"], "use SET/test"),
        ("set/cat", ["set/cat/near/1.jpg", "set/cat/near/2.jpg", "set/dog/1.jpg"], "if cat is one .* use SET$"),
        (
            "set",
            ["set/train/x/cat/1.jpg", "set/train/x/dog/1.jpg", "set/val/x/cat/1.jpg", "set/val/x/dog/1.jpg"],
            "move them up into SET/train$",
        ),
    ],
)
def test_a_single_class_gives_a_warning_with_the_folder_to_use(
    tmp_path: Path, source: str, images: list[str], hint: str
) -> None:
    write_files(tmp_path, images)
    dataset = read_folder(tmp_path / source)
    (line,) = folders.warn_of_classes(dataset)
    assert f"has one class, {dataset.class_names[0]!r}, so top-1 will be 1.0; " in line
    assert re.search(hint.replace("SET", str(tmp_path / "set")), line)


def test_the_folder_that_a_warning_names_works(tmp_path: Path) -> None:
    make_splits(tmp_path / "download/archive/photos", "train", "valid")
    (line,) = load(tmp_path / "download", validation="auto").warnings
    data = load(Path(line.rpartition("use ")[2]))
    assert data.class_names == CLASSES and data.tested_on == "its own valid/" and data.warnings == ()


def test_arrays_with_one_class_give_a_warning(tmp_path: Path) -> None:
    images, labels = np.zeros((4, 28, 28), np.uint8), np.zeros(4, np.uint8)
    path = tmp_path / "one.npz"
    np.savez(path, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    expected = (f"{path} has one class, '0', so top-1 will be 1.0; check its labels",)
    assert load(path).warnings == load(path, validation=0.25).warnings == expected
    assert infer_shape(DataSettings(source=str(path), image_size=28, train_per_class=2)).warnings == expected


def test_other_images_are_read_from_the_validation_folder(tmp_path: Path) -> None:
    folder = make_splits(tmp_path / "other", "train", "valid")
    settings = DataSettings(source=str(folder), image_size=28)
    assert len(load_other_images(settings, CLASSES, 3, threads=1)[0]) == 6
    (folder / "train").rename(tmp_path / "train")
    with pytest.raises(UserError, match=rf"has images of class 'valid'.*; give {folder}/valid$"):
        load_other_images(settings, CLASSES, 3, threads=1)
