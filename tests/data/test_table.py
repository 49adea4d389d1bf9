"""Images that a CSV file lists."""

import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megabatch.cli.overrides import split_arguments
from megabatch.data.catalog import infer_shape, load_data_set, read_encoded, with_label_sets
from megabatch.data.pack.identity import PackSettings
from megabatch.data.pack.write import pack
from megabatch.data.pipeline.images import DataSet
from megabatch.data.settings import DataSettings
from megabatch.data.sources.table import read_table
from megabatch.errors import UserError
from tests.support.photos import CLASSES, make_folder
from tests.support.pictures import write_tar

pytestmark = pytest.mark.usefixtures("index_cache")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders, and a CSV file that lists their images in the same order."""
    folder = make_folder(tmp_path_factory.mktemp("table") / "photos", per_class=4)
    rows = [f"{name}/{number:03d}.jpg,{name}" for name in CLASSES for number in range(4)]
    (folder / "labels.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    return folder


def loaded(source: Path, **settings: object) -> DataSet:
    return load_data_set(DataSettings(source=str(source), image_size=16, validation=0.25, **settings))  # type: ignore[arg-type]


def written(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    path = folder / "list.csv"
    path.write_bytes(text.encode(encoding))
    return path


def test_a_table_in_the_order_of_the_folders_is_the_same_data_set(photos: Path) -> None:
    by_folder, by_table = loaded(photos), loaded(photos / "labels.csv")
    assert by_table.fingerprint() == by_folder.fingerprint()
    for ours, theirs in ((by_table.train, by_folder.train), (by_table.test, by_folder.test)):
        samples = np.arange(len(theirs))
        assert torch.equal(ours.read(samples), theirs.read(samples)) and torch.equal(ours.labels, theirs.labels)
    assert by_table.class_names == CLASSES and not by_table.warnings


def test_a_pack_of_a_table_has_the_bytes_of_a_pack_of_the_folders(photos: Path, tmp_path: Path) -> None:
    for name, source in (("a", photos), ("b", photos / "labels.csv")):
        pack(source, tmp_path / name, PackSettings())
    first, second = (sorted((tmp_path / name).glob("*.tar")) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second] != []


def test_rows_keep_their_order_and_paths_are_absolute_or_below_the_folder(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "coat").symlink_to(photos / "coat")
    rows = ["coat/002.jpg, coat", "", f'"{photos}/bag/001.jpg","bag, leather"', "./coat/000.jpg,coat"]
    train = read_table(written(tmp_path, "\r\n".join(rows), "utf-8-sig")).train
    assert [train.where(number) for number in range(3)] == [
        f"{tmp_path}/coat/002.jpg",
        f"{photos}/bag/001.jpg",
        f"{tmp_path}/./coat/000.jpg",
    ]
    assert train.labels.tolist() == [1, 0, 1]
    assert train.content(1) == (photos / "bag/001.jpg").read_bytes()


def test_the_column_split_takes_the_words_of_folders(tmp_path: Path) -> None:
    rows = ["Path,Label,Split", "a.jpg,x,Train", "b.jpg,y,val", "c.jpg,y,train", "d.jpg,z,test", "e.jpg,x,val"]
    data = read_table(written(tmp_path, "\n".join(rows)))
    assert data.class_names == ("x", "y") and data.test is not None  # test images are not used beside val
    assert data.train.labels.tolist() == [0, 1] and data.test.labels.tolist() == [1, 0]


def test_labels_that_are_numbers_are_the_class_numbers(tmp_path: Path) -> None:
    rows = [f"{label}-{number}.jpg,{label}" for number in range(2) for label in (2, 0, 10)]
    table = written(tmp_path, "\n".join(rows))
    data = read_table(table)
    assert data.class_names == tuple(map(str, range(11))) and data.train.labels.tolist() == [2, 0, 10] * 2
    (warning,) = loaded(table).warnings
    assert "no training images of 8 classes of 11, such as '1'; " in warning and warning.endswith("such as id-0")


def test_tables_and_folders_are_joined_by_class_name(photos: Path, tmp_path: Path) -> None:
    table = written(tmp_path, f"{photos}/bag/000.jpg,bag\n{photos}/bag/001.jpg,zebra\n{photos}/bag/002.jpg,zebra\n")
    data = loaded(photos, also=[str(table)])
    assert data.class_names == (*CLASSES, "zebra") and len(data.train) + len(data.test) == 15


def test_train_takes_the_path_of_a_table(photos: Path) -> None:
    table = str(photos / "labels.csv")
    assert split_arguments([table, "seed=2"]) == ("photos", [f"data.source={table}", "seed=2"])


def test_sets_of_labels_are_numbered_and_may_be_empty(tmp_path: Path) -> None:
    rows = ["path,label", "a.jpg,dog;cat", "b.jpg,", "c.jpg,cat ; dog;", "d.jpg,ant"]
    data = with_label_sets(read_table(written(tmp_path, "\n".join(rows)), multi_label=True))
    assert data.class_names == ("ant", "cat", "dog") and data.label_sets is not None
    marks = data.label_sets[data.train.labels].tolist()
    assert marks == [[False, True, True], [False, False, False], [False, True, True], [True, False, False]]


def test_packs_tars_and_joined_sources_may_have_several_labels(tmp_path: Path) -> None:
    """The targets are those of the CSV file, in which a semicolon stands for no label."""
    long = "bird" * 20
    lists = ["cat;dog", ";", "dog", "cat", f"{long};dog;cat", f"{long};dog"]
    for number in range(6):
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(tmp_path / f"{number}.png")
    rows = [f"{number}.png,{labels}" for number, labels in enumerate(lists)]
    table = written(tmp_path, "\n".join(rows))
    pack(table, tmp_path / "pack", PackSettings())
    for part, numbers in (("a", range(3)), ("b", range(3, 6))):
        members: list[tuple[str, Any]] = []
        for number in numbers:
            members.append((f"{number}.png", (tmp_path / f"{number}.png").read_bytes()))
            members.append((f"{number}.json", {"label": [name for name in lists[number].split(";") if name]}))
        write_tar(tmp_path / f"{part}.tar", members)

    def targets(source: Path, also: Sequence[Path] = ()) -> tuple[tuple[str, ...], list[list[bool]], list[int]]:
        data = loaded(source, also=[str(path) for path in also], multi_label=True)
        assert data.label_sets is not None
        labels = torch.cat([data.train.labels, data.test.labels])
        return data.class_names, data.label_sets[labels].tolist(), data.count_classes()

    expected = targets(table)
    assert expected[0] == (long, "cat", "dog") and sum(map(sum, expected[1])) == 9
    with tarfile.open(tmp_path / "pack/train-000000.tar") as tar:
        assert len({name.partition("/")[0] for name in tar.getnames()}) == len({*lists})
    assert targets(tmp_path / "pack") == expected
    assert targets(tmp_path / "a.tar", [tmp_path / "b.tar"]) == expected
    settings = {"image_size": 16, "multi_label": True}
    for find in (load_data_set, infer_shape):
        with pytest.raises(UserError, match="'fashion-mnist-10k' has one label for each image"):
            find(DataSettings(source="fashion-mnist-10k", **settings))  # type: ignore[arg-type]


def test_a_list_of_labels_without_the_setting_is_a_warning(photos: Path, tmp_path: Path) -> None:
    rows = [f"{photos}/bag/00{number}.jpg,{'cat;dog' if number % 2 else 'cat'}" for number in range(4)]
    (warning,) = loaded(written(tmp_path, "\n".join(rows))).warnings
    assert "'cat;dog'" in warning and "data.multi_label=true" in warning


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no image; give"),
        ("path,label\n", "has no image; give"),
        ("image,class\na.jpg,x\n", "'image,class'; expected the header path,label or path,label,split; correct it"),
        ("a.jpg,x,train\n", "line 1 is 'a.jpg,x,train'; expected the header path,label or path,label,split; add it"),
        ("a.jpg;x\n", "label,split; separate the columns by commas"),
        ("a.jpg,x\nb.jpg\n", "line 2 has 1 columns; expected 2"),
        ("path,label,split\na.jpg,x,train\nb.jpg,x\n", "line 3 has 2 columns; expected 3"),
        ("a.jpg,x\n,y\n", "line 2 has no valid path"),
        ("a.jpg,x\n\x1b[31m.jpg,y\n", "line 2 has no valid path"),
        (
            "a.jpg,x\nb.jpg,\n",
            "or, if an image may have several labels or none, ;",
        ),
        (f"a.jpg,x\nb.jpg,{'y' * 1001}\n", "line 2 has the label 'yyy"),
        ("a.jpg,x\nb.jpg,y\na.jpg,y\n", "line 3: a.jpg is also on line 1; remove one"),
        ("path,label,split\na.jpg,x,holdout\n", "line 2 has the split 'holdout'; expected train"),
        ("path,label,split\na.jpg,train,train\nb.jpg,holdout,holdout\n", "line 3 has the split 'holdout'"),
        ("path,label,split\na.jpg,x,val\n", "has no row of the split train"),
        ("path,label,split\na.jpg,x,train\nb.jpg,x,training\n", "has both train/ and training/"),
        ('a.jpg,x\n"b.jpg,y\n', "line 2: unexpected end of data; check its quotes"),
        ("a.jpg,-1\n", "has a label -1; labels must be from 0"),
    ],
)
def test_a_wrong_table_is_one_line_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_encoded(written(tmp_path, text))
    assert message in str(caught.value) and str(tmp_path) in str(caught.value) and ";" in str(caught.value)


def test_only_text_in_utf_8_of_a_limited_size_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="not text in UTF-8"):
        read_table(written(tmp_path, "a.jpg,käfer", "latin-1"))
    monkeypatch.setattr("megabatch.data.sources.table.LONGEST_TABLE", 10)
    with pytest.raises(UserError, match="larger than 10 bytes"):
        read_table(written(tmp_path, "a.jpg,beetle"))
    with pytest.raises(UserError, match="cannot be read"):
        read_encoded(tmp_path / "gone.csv")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_per_class": 5}, "data.train_per_class=5 with data.multi_label=true"),
        ({"sampling": "balanced"}, "data.sampling=balanced with data.multi_label=true"),
    ],
)
def test_settings_that_need_one_label_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataSettings(**{"source": "x.csv", "image_size": 8, "multi_label": True, **settings})  # type: ignore[arg-type]
