import os
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest

from megabatch.data.pack.shards import ShardFiles, Shards, holds_shards, read_shards
from megabatch.data.sources import tars as tar_scan
from megabatch.data.sources.tars import TarSamples, split_by_name
from megabatch.errors import UserError
from megabatch.io.arrays import read_arrays, write_arrays
from megabatch.io.tars import Damaged, member_name, walk_members
from tests.support.pictures import picture, write_tar

pytestmark = pytest.mark.usefixtures("index_cache")


@pytest.fixture
def num_scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    scanned: list[Path] = []
    scan_tar = tar_scan.scan_tar

    def counted(path: Path) -> TarSamples:
        scanned.append(path)
        return scan_tar(path)

    monkeypatch.setattr(tar_scan, "scan_tar", counted)
    return scanned


def write_shards(folder: Path) -> None:
    """Write two classes: samples 0 to 5 in two training shards, 6 and 7 in a test shard."""
    for shard, numbers in {"train-000000": range(3), "train-000001": range(3, 6), "val-000000": range(6, 8)}.items():
        members = [
            (f"{number}.{suffix}", picture(number) if suffix == "jpg" else str(number % 2))
            for number in numbers
            for suffix in ("jpg", "cls")
        ]
        write_tar(folder / f"{shard}.tar", members)  # type: ignore[arg-type]


def test_tars_are_read_in_the_order_of_their_names_and_members(tmp_path: Path) -> None:
    write_shards(tmp_path)
    dataset = read_shards(tmp_path)
    assert dataset.class_names == ("0", "1") and dataset.test is not None
    assert [bytes(dataset.train.content(number)) for number in range(6)] == [picture(number) for number in range(6)]
    assert [bytes(dataset.test.content(number)) for number in range(2)] == [picture(6), picture(7)]
    assert dataset.train.labels.tolist() == [0, 1, 0, 1, 0, 1] and dataset.test.labels.tolist() == [0, 1]
    assert dataset.train.labels.dtype == np.int64


def test_samples_without_an_image_are_counted_by_suffix(tmp_path: Path, num_scans: list[Path]) -> None:
    pairs: dict[str, bytes | str] = {
        "1.jpg": picture(1),
        "1.cls": "0",
        "1.txt": "a caption",
        "2.HEIC": b"x",
        "2.cls": "1",
    }
    write_tar(tmp_path / "train.tar", [*pairs.items(), ("3.heic", b"x"), ("3.json", {"label": 1}), ("4.txt", "alone")])
    for _ in range(2):  # from the tar, and from its index
        assert read_shards(tmp_path).ignored == ((".heic", 2),)
    assert len(num_scans) == 1


def test_a_location_names_the_shard_the_offset_and_the_member(tmp_path: Path) -> None:
    write_shards(tmp_path)
    where = read_shards(tmp_path).train.where(4)
    with tarfile.open(tmp_path / "train-000001.tar") as tar:
        offset = tar.getmember("4.jpg").offset_data
    assert where == f"{tmp_path}/train-000001.tar at offset {offset} (4.jpg)"


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_member_offsets_match_tarfile(tmp_path: Path, form: int) -> None:
    """mtime=1.5 gives every member a pax header, as WebDataset's writer does; long names need extra headers."""
    directory = "d" * 90
    names = ["a.jpg", f"{directory}/{'n' * 60}.jpg", "deep/er/b.x.png", "empty.cls"]
    if form != tarfile.USTAR_FORMAT:
        names += [f"{'l' * 150}/{'n' * 200}.jpg", "ü" * 80 + ".jpg"]
    write_tar(tmp_path / "x.tar", [(name, picture(at)[: 700 * at]) for at, name in enumerate(names)], form)
    with tarfile.open(tmp_path / "x.tar", "a", format=form) as tar:
        tar.add(tmp_path, "folder", recursive=False)
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "l" * 90
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("last.png"))
    content = (tmp_path / "x.tar").read_bytes()
    found = list(walk_members(lambda offset, length: content[offset : offset + length], len(content)))
    with tarfile.open(tmp_path / "x.tar") as tar:
        expected = [(each.name, each.offset_data, each.size) for each in tar.getmembers() if each.isreg()]
    assert [(each.name, each.offset, each.length) for each in found] == expected
    images = Shards([tmp_path / "x.tar"], np.array([len(content)]))
    assert [images.member_name(0, offset) for _, offset, _ in expected] == [name for name, _, _ in expected]


def test_labels_are_numbers_or_names_in_text_or_json(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "a.tar",
        [
            ("x/0.jpg", picture(0)),
            ("x/0.json", {"label": "dog", "caption": "z" * 2000}),
            ("x/1.cls", "cat\n"),
            ("x/1.png", picture(1, form="PNG")),
            ("x/2.JPEG", picture(2)),
            ("x/2.json", {"cls": "ant"}),
            ("x/2.seg.png", b"no image of the sample"),
            ("x/._3.jpg", b"of a Mac"),
            ("x/4.txt", "a sample without an image"),
        ],
    )
    dataset = read_shards(tmp_path / "a.tar")
    assert dataset.class_names == ("ant", "cat", "dog") and dataset.train.labels.tolist() == [2, 1, 0]
    assert [bytes(dataset.train.content(number)) for number in (0, 2)] == [picture(0), picture(2)]


def test_classes_are_numbered_by_labels_and_named_by_classes_txt(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "a.tar", [("0.jpg", picture(0)), ("0.cls", "2"), ("1.jpg", picture(1)), ("1.json", {"cls": 0})]
    )
    dataset = read_shards(tmp_path)
    assert dataset.class_names == ("0", "1", "2") and dataset.train.labels.tolist() == [2, 0]
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    assert read_shards(tmp_path).class_names == ("ant", "bee", "cat")


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["a-000.tar", "b_1.tar", "trivial-0.tar"], [0, 0, 0]),
        (["train-000.tar", "val-000.tar"], [0, 1]),
        (["imagenet1k-train-0000.tar", "imagenet1k-validation-00.tar"], [0, 1]),
        (["data_1.tar", "test_1.tar"], [0, 1]),
        (["training-0.tar", "Valid-0.tar", "testing-0.tar"], [0, 1, None]),
        (["train-0.tar", "dev-0.tar", "eval-0.tar"], [0, 1, None]),
        (["shard-0.tar", "evaluation-0.tar"], [0, 1]),
        (["train2017-1.tar", "val2017-1.tar", "test2017-1.tar"], [0, 1, None]),
    ],
)
def test_the_name_of_a_shard_gives_its_split(names: list[str], splits: list[int | None]) -> None:
    assert split_by_name(names) == splits


def test_a_single_tar_is_for_training_under_any_name(tmp_path: Path) -> None:
    write_shards(tmp_path)
    dataset = read_shards(tmp_path / "val-000000.tar")
    assert len(dataset.train) == 2 and dataset.test is None


def test_a_member_name_is_never_used_as_a_path(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    names = [
        "../../evil.jpg",
        "../../evil.cls",
        "/etc/evil2.jpg",
        "/etc/evil2.cls",
        "line\nbreak.jpg",
        "line\nbreak.cls",
    ]
    write_tar(tmp_path / "in/x.tar", [(name, picture(0) if name.endswith("jpg") else "0") for name in names])
    before = sorted(tmp_path.rglob("*"))
    dataset = read_shards(tmp_path / "in")
    assert all(bytes(dataset.train.content(number)) == picture(0) for number in range(3))
    assert dataset.train.where(0).endswith("(../../evil.jpg)") and dataset.train.where(2).endswith("(line?break.jpg)")
    new = {path for path in tmp_path.rglob("*") if "cache" not in str(path)} - set(before)
    assert not new and not (tmp_path.parent / "evil.jpg").exists()


def test_tars_are_scanned_again_only_after_a_change(tmp_path: Path, num_scans: list[Path]) -> None:
    write_shards(tmp_path / "set")
    first, again = read_shards(tmp_path / "set"), read_shards(tmp_path / "set")
    assert len(num_scans) == 3
    assert isinstance(first.train, ShardFiles) and isinstance(again.train, ShardFiles)
    assert first.train.fingerprint() == again.train.fingerprint()
    write_tar(tmp_path / "set/train-000001.tar", [("3.jpg", picture(3)), ("3.cls", "1")])
    assert len(read_shards(tmp_path / "set").train) == 4
    (tmp_path / "set/val-000000.tar").unlink()
    assert read_shards(tmp_path / "set").test is None
    assert len(num_scans) == 3 + 3 + 2


def test_any_thread_may_read_first(tmp_path: Path) -> None:
    write_shards(tmp_path)
    train = read_shards(tmp_path).train
    begin = threading.Barrier(8)
    found: list[bool] = []

    def start() -> None:
        begin.wait()
        found.append(all(bytes(train.content(number)) == picture(number) for number in range(6)))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


def test_a_shard_truncated_after_indexing_raises_instead_of_crashing(tmp_path: Path) -> None:
    write_shards(tmp_path)
    dataset = read_shards(tmp_path)
    assert dataset.train.content(0) == picture(0)
    os.truncate(tmp_path / "train-000000.tar", 600)  # while it is open
    with pytest.raises(OSError, match=r"train-000000.tar was truncated: it ends before offset [\d,]+"):
        dataset.train.content(0)


def image_and(*members: tuple[str, object]) -> list[tuple[str, object]]:
    return [("a.jpg", picture(0)), *members]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], r"has no training image"),
        ([("a.cls", "1")], r"has no training image"),
        (image_and(), r"x.tar at offset 512: the image a.jpg has no label; expected a member .*.cls"),
        (image_and(("b.cls", "0")), r"the image a.jpg has no label"),
        (image_and(("a.json", {"caption": "b"})), r"the image a.jpg has no label"),
        (
            image_and(("a.json", "{")),
            r"x.tar at offset \d+ \(a.json\) is not a label: .*; expected the number or the name",
        ),
        (image_and(("a.json", {"label": [1.5]})), r"\[1.5\] is neither a number nor a name; .* a list of them"),
        (image_and(("a.json", {"label": ["a;b"]})), r"'a;b'\] is neither a number nor a name"),
        (image_and(("a.cls", "")), r"'' is neither a number nor a name"),
        (image_and(("a.cls", b"\xff")), r"\(a.cls\) is not a label"),
        (image_and(("a.cls", "-1")), r"has a label -1; labels must be from 0"),
        (image_and(("a.cls", "10000000")), r"has a label 10000000; labels must be from 0"),
        (image_and(("a.cls", "9" * 5000)), r"is not a label: 5,000 characters; the limit is 1,000"),
        (image_and(("a.json", '{"label": ' + "9" * 5000 + "}")), r"\(a.json\) is not a label"),
        (image_and(("a.json", '{"label": ' + "[" * 100_000)), r"\(a.json\) is not a label"),
        (image_and(("a.cls", "\x1b[2J")), r"is neither a number nor a name"),
        (image_and(("a.png", picture(0)), ("a.cls", "0")), r"x.tar has two images of one sample, a.jpg and a.png"),
    ],
)
def test_a_tar_without_valid_samples_is_refused_with_a_reason(tmp_path: Path, members: object, message: str) -> None:
    write_tar(tmp_path / "x.tar", members)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message) as caught:
        read_shards(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: b"", r"x.tar is damaged at offset 0 \(it is truncated\); download"),
        (lambda raw: raw[:700], r"x.tar is damaged at offset 0 \(its member has .* bytes, more than are left\)"),
        (lambda raw: raw[:1536], r"x.tar is damaged at offset 1536 \(it is truncated\)"),
        (lambda raw: raw[:1700], r"x.tar is damaged at offset 1536 \(it is truncated\)"),
        (lambda raw: raw[:1540] + b"?" + raw[1541:], r"damaged at offset 1536 \(it is not a header\)"),
        (lambda raw: raw[:124] + b"????????" + raw[132:], r"damaged at offset 0 "),
        (lambda raw: b"\x1f\x8b" + raw[2:], r"damaged at offset 0 "),
    ],
)
def test_a_damaged_tar_is_named_with_the_offset(tmp_path: Path, damage: object, message: str) -> None:
    write_tar(tmp_path / "x.tar", [("a.jpg", picture(0)[:600]), ("a.cls", "1")])
    content = (tmp_path / "x.tar").read_bytes()
    (tmp_path / "x.tar").write_bytes(damage(content))  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        read_shards(tmp_path)


def test_a_corrupt_tar_raises_only_damaged(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [("a.jpg", picture(0)), ("é" * 120, "1")], tarfile.PAX_FORMAT)
    content = (tmp_path / "x.tar").read_bytes()
    generator = np.random.default_rng(0)
    for place in generator.integers(0, len(content), 2000):
        corrupt = bytearray(content)
        corrupt[place] = generator.integers(256)
        try:
            found = list(walk_members(lambda start, length: bytes(corrupt[start : start + length]), len(corrupt)))  # noqa: B023
        except Damaged:
            continue
        assert all(0 < each.offset <= each.offset + each.length <= len(corrupt) for each in found)


def with_pax(records: bytes) -> bytes:
    """Return a tar with one member after a pax header."""
    member = tarfile.TarInfo("x")
    member.size, member.type = len(records), tarfile.XHDTYPE
    padding = bytes(-len(records) % 512)
    return member.tobuf() + records + padding + tarfile.TarInfo("a.jpg").tobuf() + bytes(1024)


@pytest.mark.parametrize(
    "records",
    [
        b"%d size=%s\n" % (9 + 30, b"9" * 30),
        b"12 size=1_0\n",
        b"12 size=-10\n",
        b"9" * 100,
        b"9" * 10_000,
        b"5 =\n" * 300_000,
        b"-5 a=\n",
        b"0 a=b\n",
    ],
)
def test_an_invalid_pax_header_is_damage(records: bytes) -> None:
    content = with_pax(records)
    with pytest.raises(Damaged):
        list(walk_members(lambda start, length: content[start : start + length], len(content)))


def test_a_long_name_without_a_member_is_damage() -> None:
    content = with_pax(b"9 path=b\n")[:1024] + bytes(2048)
    with pytest.raises(Damaged, match="it is not a header"):
        member_name(lambda start, length: content[start : start + length], len(content), 1536)


def test_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "x.tar").symlink_to(tmp_path / "fifo")
    with pytest.raises(UserError, match=r"x\.tar cannot be read .*not a regular file"):
        read_shards(tmp_path)


def test_a_member_above_the_size_limit_is_not_read(tmp_path: Path) -> None:
    write_shards(tmp_path)
    train = read_shards(tmp_path).train
    assert len(train.content(0, most_bytes=len(picture(0)))) == len(picture(0))
    with pytest.raises(OSError, match=r"bytes exceed data\.max_file_mb"):
        train.content(0, most_bytes=len(picture(0)) - 1)


@pytest.mark.parametrize("name", ["stamps", "listed", "offset", "label", "shards", "class_names", "sizes"])
def test_an_invalid_cached_scan_is_rebuilt(tmp_path: Path, index_cache: Path, name: str) -> None:
    write_shards(tmp_path)
    expected = read_shards(tmp_path).train.fingerprint()
    (stored,) = index_cache.glob("*.npz")
    index = read_arrays(stored)
    for array in (index[name][:1], index[name][None], np.array(7), np.full(index[name].shape, 2**64 - 1)):
        write_arrays(stored, index | {name: array})
        assert read_shards(tmp_path).train.fingerprint() == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.tar.gz", r"x.tar.gz is compressed, so .*; decompress it to .tar first"),
        ("x.tgz", r"x.tgz is compressed"),
        ("x.zip", r"x.zip is not a .tar; give a .tar file"),
    ],
)
def test_files_other_than_plain_tars_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=message):
        read_shards(tmp_path / name)


def test_a_folder_without_tars_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone does not exist"):
        read_shards(tmp_path / "gone")
    with pytest.raises(UserError, match=r"no .tar; give a .tar file"):
        read_shards(tmp_path)
    assert not holds_shards(tmp_path) and not holds_shards(tmp_path / "gone")
    write_shards(tmp_path / "set")
    assert holds_shards(tmp_path / "set") and holds_shards(tmp_path / "set/val-000000.tar")
    (tmp_path / "set/more.tar.gz").touch()
    with pytest.raises(UserError, match=r"more.tar.gz is compressed"):
        read_shards(tmp_path / "set")
