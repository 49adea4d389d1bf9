import os
import threading
from pathlib import Path

import numpy as np
import pytest

from megabatch.data.sources import folders
from megabatch.data.sources.folders import FolderFiles, read_folder
from megabatch.errors import UserError
from megabatch.io.arrays import read_arrays, write_arrays
from megabatch.io.disk import cache_folder
from tests.support.pictures import write_files

pytestmark = pytest.mark.usefixtures("index_cache")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_files(tmp_path / "photos", ["b/2.jpg", "a/x/9.png", "a/1.JPEG", "b/10.jpg", "c/ü 1.webp"])
    return tmp_path / "photos"


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    walked: list[Path] = []
    index = folders.index_folder

    def counted(path: Path) -> dict[str, np.ndarray]:
        walked.append(path)
        return index(path)

    monkeypatch.setattr(folders, "index_folder", counted)
    return walked


def names(files: object) -> list[str]:
    assert isinstance(files, FolderFiles)
    return [files.name(number) for number in range(len(files))]


def test_samples_are_numbered_by_class_and_then_by_path(photos: Path) -> None:
    dataset = read_folder(photos)
    assert dataset.class_names == ("a", "b", "c") and dataset.test is None
    assert names(dataset.train) == ["a/1.JPEG", "a/x/9.png", "b/10.jpg", "b/2.jpg", "c/ü 1.webp"]
    assert dataset.train.labels.tolist() == [0, 0, 1, 1, 2] and dataset.train.labels.dtype == np.int64


def test_content_is_read_from_the_named_file(photos: Path) -> None:
    train = read_folder(photos).train
    for number in range(len(train)):
        assert train.content(number) == Path(train.where(number)).read_bytes()


def test_hidden_files_and_other_suffixes_are_ignored(photos: Path) -> None:
    before = names(read_folder(photos).train)
    write_files(photos, ["a/.hidden.jpg", ".cache/1.jpg", "a/.ipynb_checkpoints/1.jpg", "a/notes.txt", "list.csv"])
    assert names(read_folder(photos).train) == before


@pytest.mark.parametrize("test_folder", ["val", "validation", "test"])
def test_train_and_test_folders_share_one_numbering(tmp_path: Path, test_folder: str) -> None:
    write_files(tmp_path, ["train/b/1.jpg", "train/a/2.jpg", "train/a/1.jpg", f"{test_folder}/a/7.jpg"])
    write_files(tmp_path, [f"{test_folder}/b/8.jpg", "docs/1.txt"])
    dataset = read_folder(tmp_path)
    assert dataset.class_names == ("a", "b")
    assert names(dataset.train) == ["a/1.jpg", "a/2.jpg", "b/1.jpg"] and dataset.train.labels.tolist() == [0, 0, 1]
    assert dataset.test is not None
    assert names(dataset.test) == ["a/7.jpg", "b/8.jpg"] and dataset.test.labels.tolist() == [0, 1]
    assert Path(dataset.test.where(1)) == tmp_path / test_folder / "b/8.jpg"


def test_val_is_preferred_to_test_and_both_are_optional(tmp_path: Path) -> None:
    write_files(tmp_path / "set", ["train/a/1.jpg"])
    assert read_folder(tmp_path / "set").class_names == ("a",) and read_folder(tmp_path / "set").test is None
    write_files(tmp_path / "set", ["val/a/1.jpg", "test/unlabelled.jpg"])
    test = read_folder(tmp_path / "set").test
    assert test is not None and names(test) == ["a/1.jpg"] and "val" in test.where(0)


def test_a_class_may_be_named_train(tmp_path: Path) -> None:
    write_files(tmp_path / "set", ["train/1.jpg", "plane/1.jpg"])
    assert read_folder(tmp_path / "set").class_names == ("plane", "train")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"set is empty; expected CLASS/IMAGE"),
        (["1.jpg", "2.jpg"], r"set has 2 files \(1.jpg\) but no class folders; put each image .*val/CLASS/IMAGE"),
        (["train/a/1.jpg", "val/1.JPEG"], r"set/val has 1 files \(1.JPEG\) but no class folders"),
        (["a/1.jpg", "b/"], r"set/b has no image \(suffixes .jpg .*\); remove it"),
        (["a/1.jpg", "b/x/1.heic"], r"set/b has no image .*; x/1.heic has another suffix; remove it"),
        (["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg"], r"set/val has no class 'b', but .*set/train has"),
        (
            ["train/a/1.jpg", "val/a/1.jpg", "val/b/1.jpg", "val/c/1.jpg"],
            r"set/train has no class 'b' and 1 more, but .*set/val has",
        ),
        (["a\nb/1.jpg"], r"set has a class folder 'a\\nb' with control characters .*; rename it"),
    ],
)
def test_a_folder_with_another_layout_is_refused_with_a_reason(tmp_path: Path, files: list[str], message: str) -> None:
    (tmp_path / "set").mkdir()
    write_files(tmp_path / "set", [name for name in files if not name.endswith("/")])
    for name in files:
        if name.endswith("/"):
            (tmp_path / "set" / name).mkdir()
    with pytest.raises(UserError, match=message) as caught:
        read_folder(tmp_path / "set")
    assert "\n" not in str(caught.value)


def test_a_path_that_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone does not exist; give a folder"):
        read_folder(tmp_path / "gone")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file is not a folder; give a folder"):
        read_folder(tmp_path / "file")


def test_a_folder_that_contains_itself_is_refused(photos: Path) -> None:
    (photos / "a" / "again").symlink_to(photos)
    with pytest.raises(UserError, match=r"cannot be read \(Too many levels"):
        read_folder(photos)


def test_a_folder_is_indexed_again_only_after_a_change(photos: Path, walked: list[Path]) -> None:
    first, again = read_folder(photos), read_folder(photos)
    assert len(walked) == 1
    assert isinstance(first.train, FolderFiles) and isinstance(again.train, FolderFiles)
    assert first.train.fingerprint() == again.train.fingerprint() and first.class_names == again.class_names
    for change in (
        lambda: write_files(photos, ["a/x/10.png"]),
        lambda: (photos / "b/2.jpg").unlink(),
        lambda: (photos / "b/10.jpg").rename(photos / "b/11.jpg"),
        lambda: (photos / "c").rename(photos / "d"),
    ):
        change()
        changed = read_folder(photos)
        assert names(changed.train) == sorted(
            str(path.relative_to(photos)) for path in photos.rglob("*") if path.is_file()
        )
    assert len(walked) == 5


@pytest.mark.parametrize("damage", [lambda raw: b"", lambda raw: raw[:200], lambda raw: raw[:300] + b"?" + raw[301:]])
def test_a_damaged_cache_is_rebuilt(photos: Path, index_cache: Path, walked: list[Path], damage: object) -> None:
    expected = names(read_folder(photos).train)
    (stored,) = index_cache.glob("*.npz")
    stored.write_bytes(damage(stored.read_bytes()))  # type: ignore[operator]
    assert names(read_folder(photos).train) == expected and len(walked) == 2
    assert names(read_folder(photos).train) == expected and len(walked) == 2


@pytest.mark.parametrize(
    "name", ["parts", "class_names", "folders", "folder_ends", "ctimes", "names_0", "ends_0", "labels_0"]
)
def test_a_cache_with_wrong_values_is_rebuilt(photos: Path, index_cache: Path, name: str) -> None:
    expected = names(read_folder(photos).train)
    (stored,) = index_cache.glob("*.npz")
    index = read_arrays(stored)
    for array in (index[name][:-1], index[name][None], np.array(7), np.full(index[name].shape, 2**64 - 1)):
        write_arrays(stored, index | {name: array})
        assert names(read_folder(photos).train) == expected


def test_only_regular_files_below_the_size_limit_are_read(photos: Path) -> None:
    """Links to such files are read too.  A FIFO would block, and a sparse file of terabytes would fill the memory."""
    os.mkfifo(photos / "fifo")
    (photos / "a/link.jpg").symlink_to(photos / "b/2.jpg")
    (photos / "a/to_fifo.jpg").symlink_to(photos / "fifo")
    (photos / "a/to_null.jpg").symlink_to("/dev/null")
    (photos / "a/sparse.jpg").touch()
    os.truncate(photos / "a/sparse.jpg", 6 << 30)
    files = read_folder(photos).train
    number_of = {files.where(number).rpartition("/")[2]: number for number in range(len(files))}
    assert files.content(number_of["link.jpg"]) == (photos / "b/2.jpg").read_bytes()
    for name in ("to_fifo.jpg", "to_null.jpg"):
        with pytest.raises(OSError, match="it is not a regular file"):
            files.content(number_of[name])
    with pytest.raises(OSError, match=r"its 6,442,450,944 bytes exceed data.max_file_mb=256"):
        files.content(number_of["sparse.jpg"])


def test_a_folder_is_read_without_a_writable_cache(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(read_folder(photos).train) == len(read_folder(photos).train) == 5
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home/.cache/megabatch"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user without a passwd entry
    assert cache_folder() is None


def test_concurrent_starts_index_the_folder_once(photos: Path, walked: list[Path]) -> None:
    """flock locks open files, so threads exclude each other as processes do."""
    begin = threading.Barrier(6)
    found: list[list[str]] = []

    def start() -> None:
        begin.wait()
        found.append(names(read_folder(photos).train))

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(walked) == 1 and len(found) == 6 and all(each == found[0] for each in found)


def test_the_cache_is_not_a_pickle(photos: Path, index_cache: Path) -> None:
    read_folder(photos)
    (stored,) = index_cache.glob("*.npz")
    with np.load(stored, allow_pickle=False) as archive:
        assert all(archive[name].dtype.kind in "iuU" for name in archive.files)
    assert not [path for path in index_cache.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user other than root")
def test_an_unreadable_class_folder_is_named(photos: Path) -> None:
    (photos / "b").chmod(0)
    with pytest.raises(UserError, match=r"photos/b cannot be read \(Permission denied\)"):
        read_folder(photos)
    (photos / "b").chmod(0o755)
