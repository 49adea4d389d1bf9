"""A tiny ImageNet in every layout in which it is distributed."""

import io
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.data.catalog import read_encoded
from megabatch.data.sources.imagenet import read_imagenet, read_structs
from megabatch.errors import UserError
from tests.support.pictures import picture, write_tar

# Synsets by their number in the devkit, which is not the order of their names.
SYNSETS = {1: "n02119789", 2: "n01440764", 3: "n02100735", 4: "n00001740"}  # the last is a parent without images
TRAIN = [f"{name}_{number}" for name in ("n01440764", "n02100735", "n02119789") for number in (10, 2)]
VALIDATION = [2, 1, 3, 2]  # the class of each image, in order
SYNSET_LIST = "imagenet_2012_validation_synset_labels.txt"
DATA = Path("ILSVRC2012_devkit_t12/data")


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def element(kind: int, content: bytes) -> bytes:
    """Return an element as MATLAB writes it: short values are inside the tag."""
    if 0 < len(content) <= 4:
        return struct.pack("<HH", kind, len(content)) + content.ljust(4, b"\0")
    return struct.pack("<II", kind, len(content)) + content.ljust(-(-len(content) // 8) * 8, b"\0")


def matrix(matrix_class: int, shape: tuple[int, int], values: bytes, name: str = "") -> bytes:
    flags, dims = element(6, struct.pack("<II", matrix_class, 0)), element(5, struct.pack("<ii", *shape))
    return element(14, flags + dims + element(1, name.encode()) + values)


def matlab_value(value: Any) -> bytes:
    if isinstance(value, str):
        return matrix(4, (1, len(value)), element(4, value.encode("utf-16-le")))
    numbers = value if isinstance(value, list) else [value]
    return matrix(6, (1, len(numbers)), element(2, bytes(numbers)))


def matlab_file(name: str, structs: list[dict[str, Any]]) -> bytes:
    fields = list(structs[0])
    names = element(5, struct.pack("<i", 32)) + element(
        1, b"".join(field.encode().ljust(32, b"\0") for field in fields)
    )
    values = b"".join(matlab_value(value) for members in structs for value in members.values())
    written = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
    for variable in (matrix(6, (1, 1), element(2, b"\7"), "other"), matrix(2, (len(structs), 1), names + values, name)):
        compressed = zlib.compress(variable)
        written += struct.pack("<II", 15, len(compressed)) + compressed
    return written


def meta() -> bytes:
    return matlab_file(
        "synsets",
        [
            {"ILSVRC2012_ID": number, "WNID": name, "words": "a fish, größe", "children": [1, 2] if number == 4 else []}
            for number, name in SYNSETS.items()
        ],
    )


def val_name(number: int) -> str:
    return f"ILSVRC2012_val_{number:08d}.JPEG"


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_train(layout: str) -> None:
    images = {name: picture(number) for number, name in enumerate(TRAIN)}
    if layout == "folders":
        for name, content in images.items():
            write(Path("in/train") / name.partition("_")[0] / f"{name}.JPEG", content)
        return
    class_tars = {}
    for label in {name.partition("_")[0] for name in TRAIN}:
        write_tar(Path("made.tar"), [(f"{name}.JPEG", images[name]) for name in TRAIN if name.startswith(label)])
        class_tars[f"{label}.tar"] = Path("made.tar").read_bytes()
    if layout == "class tars":
        for name, content in class_tars.items():
            write(Path("in/train") / name, content)
    else:
        write_tar(Path("in/ILSVRC2012_img_train.tar"), list(class_tars.items()))


def write_validation(layout: str) -> None:
    images = {val_name(number): picture(100 + number) for number in range(1, 5)}
    if layout == "tar":
        write_tar(Path("in/ILSVRC2012_img_val.tar"), list(images.items()))
    for (name, content), number in zip(images.items(), VALIDATION, strict=True):
        if layout == "flat":
            write(Path("in/val") / name, content)
        if layout == "folders":
            write(Path("in/val") / SYNSETS[number] / name, content)


def write_classes(form: str) -> None:
    truth = "".join(f"{number}\n" for number in VALIDATION).encode()
    names = [SYNSETS[number] for number in VALIDATION]
    if form == "devkit":
        write("in" / DATA / "ILSVRC2012_validation_ground_truth.txt", truth)
        write("in" / DATA / "meta.mat", meta())
    elif form == "devkit.tar.gz":
        with tarfile.open("in/ILSVRC2012_devkit_t12.tar.gz", "w:gz") as tar:
            for name, content in (("ILSVRC2012_validation_ground_truth.txt", truth), ("meta.mat", meta())):
                member = tarfile.TarInfo(str(DATA / name))
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    elif form == "synsets":
        write(Path("in/imagenet_2012_validation_synset_labels.txt"), "".join(f"{name}\n" for name in names).encode())
    elif form == "csv":
        rows = [f"{val_name(number)[:-5]},{name} 1 2 3 4 \n" for number, name in enumerate(names, 1)]
        write(Path("in/LOC_val_solution.csv"), "".join(["ImageId,PredictionString\n", *reversed(rows)]).encode())


def pack(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["pack", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize(
    ("train", "validation", "classes"),
    [
        ("tar", "flat", "devkit"),
        ("tar", "tar", "devkit.tar.gz"),
        ("class tars", "flat", "synsets"),
        ("folders", "flat", "csv"),
        ("folders", "folders", ""),
    ],
)
def test_a_pack_of_the_downloads_equals_a_pack_of_the_sorted_folders(
    train: str, validation: str, classes: str, tmp_path: Path
) -> None:
    write_train(train)
    write_validation(validation)
    write_classes(classes)
    printed = pack("--imagenet", "in", "packed")
    assert "10 images of 3 classes" in printed
    assert printed.splitlines()[-1] == "train     megabatch train resnet50-imagenet-256 data.source=packed"
    Path("in").rename("downloaded")
    write_train("folders")
    write_validation("folders")
    pack("in", "expected")
    for name in ("train-000000.tar", "val-000000.tar", "classes.txt"):
        assert (tmp_path / "packed" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    ours, theirs = read_encoded(Path("packed")), read_encoded(Path("expected"))
    assert ours.class_names == theirs.class_names == ("n01440764", "n02100735", "n02119789")
    assert ours.test is not None and theirs.test is not None
    assert ours.test.labels.tolist() == theirs.test.labels.tolist() == [0, 0, 1, 2]


def remove(path: str) -> None:
    Path(path).rename("removed")


def meta_of(variable: bytes) -> bytes:
    return b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM" + variable


def nested(depth: int) -> bytes:
    """Return nested structs."""
    inner = matlab_value("x")
    names = element(5, struct.pack("<i", 8)) + element(1, b"a".ljust(8, b"\0"))
    for level in range(depth):
        inner = matrix(2, (1, 1), names + inner, "synsets" if level == depth - 1 else "")
    return inner


def bomb() -> bytes:
    compressed = zlib.compress(bytes(65_000_000), 9)
    return struct.pack("<II", 15, len(compressed)) + compressed


def many() -> bytes:
    """Return a huge array of structs without fields."""
    names = element(5, struct.pack("<i", 8)) + element(1, b"")
    return matrix(2, (2**30, 2**30), names, "synsets")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: remove("in/ILSVRC2012_img_train.tar"),
            r"^in has no training images; expected one of ILSVRC2012_img_tr",
        ),
        (lambda: remove("in/val"), r"^in has no validation images; expected one of ILSVRC2012_img_val.tar, val"),
        (
            lambda: remove("in/ILSVRC2012_devkit_t12"),
            r"^in has no list of the classes .*; add the devkit \(ILSVRC2012_d",
        ),
        (
            lambda: remove(f"in/{DATA}/meta.mat"),
            r"devkit_t12 has no data/meta.mat; download the devkit again, or add imagen",
        ),
        (lambda: write("in" / DATA / "meta.mat", b"x" * 300), r"cannot be read \(it is not a .mat file of"),
        (lambda: write("in" / DATA / "meta.mat", meta()[:250]), r"data/meta.mat cannot be read \(it is damaged"),
        (lambda: write("in" / DATA / "meta.mat", meta_of(nested(60))), r"cannot be read \(its structs are nested"),
        (
            lambda: write("in" / DATA / "meta.mat", meta_of(bomb())),
            r"cannot be read \(it .* more than 64,000,000",
        ),
        (lambda: write("in" / DATA / "meta.mat", meta_of(many())), r"cannot be read \(it is damaged: 0 members"),
        (lambda: write(Path("in/LOC_val_solution.csv"), b"a\nb,\n"), r"LOC_val_solution.csv has a line 'b' without a"),
        (lambda: write(Path(f"in/{SYNSET_LIST}"), b"\xff\xfe\n"), r"but 1 are listed"),
        (lambda: remove(f"in/val/{val_name(3)}"), r"in/val has 3 images, but 4 are listed .*some are miss"),
        (lambda: write(Path("in/val/x.jpg"), b""), r"in/val has 5 images, .*x.jpg is not listed"),
        (lambda: write(Path("in/ILSVRC2012_img_train.tar"), b"x" * 2000), r"img_train.tar is damaged at offset 0 \("),
    ],
)
def test_missing_and_damaged_files_raise_one_line(change: Any, message: str) -> None:
    write_train("tar")
    write_validation("flat")
    write_classes("devkit")
    change()
    with pytest.raises(UserError, match=message) as caught:
        read_imagenet(Path("in"))
    assert "\n" not in str(caught.value)


def test_the_error_for_a_flat_val_folder_names_the_command_that_sorts_it() -> None:
    write_train("folders")
    write_validation("flat")
    with pytest.raises(UserError, match=r"no class folders; .*megabatch pack --imagenet DIR OUT"):
        read_encoded(Path("in"))


def test_matlab_struct_arrays_are_read() -> None:
    structs = read_structs(meta(), "synsets")
    assert [(members["ILSVRC2012_ID"], members["WNID"]) for members in structs] == [
        ([number], name) for number, name in SYNSETS.items()
    ]
    assert structs[0]["words"] == "a fish, größe" and structs[0]["children"] == [] and structs[3]["children"] == [1, 2]
    with pytest.raises(ValueError, match="no struct array 'gone'"):
        read_structs(meta(), "gone")
