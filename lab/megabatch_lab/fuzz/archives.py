"""Tars of samples in WebDataset's layout, and packs: shards with an index."""

import io
import tarfile
from contextlib import ExitStack
from pathlib import Path
from random import Random

import numpy as np

from megabatch.data.catalog import load_data_set
from megabatch.data.pack.identity import PackSettings
from megabatch.data.pack.shards import verify
from megabatch.data.pack.write import pack
from megabatch.data.settings import DataSettings
from megabatch.data.sources.index import INDEX
from megabatch.errors import UserError
from megabatch_lab.fuzz.arrays import archive, arrays_in, corrupt_archive, is_archive, require_sane
from megabatch_lab.fuzz.formats import Bench, Files, Format, by_functions, read_back, write_input
from megabatch_lab.fuzz.images import NAME, encoded, picture
from megabatch_lab.fuzz.mutations import DEPTH, corrupt_array, nonsense

SIDE = 16
TRAIN, TEST = "train-000000.tar", "val-000000.tar"
BLOCK = 512
SIZE, KIND, CHECKSUM = slice(124, 136), slice(156, 157), slice(148, 156)
MEMBER_NAMES = ("../../evil.jpg", "/evil.jpg", "a\x1b[31m.jpg", "two\nlines.jpg", "x" * 5000 + ".jpg", ".jpg", "a.", "")
LABEL_TEXTS = (
    b"",
    b"-1",
    b"9" * 5000,
    b"1" * 100_000,
    b"\xff\xfe",
    b"\x1b[31m",
    b"a\nb",
    b"[" * DEPTH,
    b"1e400",
    b"nan",
)


def sample(number: int) -> tuple[bytes, int]:
    return encoded(picture(24 + number, 20), "JPEG")[NAME], number % 2


def tar_of(members: list[tuple[str, bytes]], kind: int = tarfile.GNU_FORMAT) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=kind) as tar:
        for name, member in members:
            info = tarfile.TarInfo(name)
            info.size = len(member)
            tar.addfile(info, io.BytesIO(member))
    return content.getvalue()


def members_of(prefix: str, count: int, as_json: bool = False) -> list[tuple[str, bytes]]:
    members = []
    for number in range(count):
        image, label = sample(number)
        members.append((f"{prefix}/{number:04d}.jpg", image))
        text = b'{"label": %d}' % label if as_json else b"%d" % label
        members.append((f"{prefix}/{number:04d}.{'json' if as_json else 'cls'}", text))
    return members


def tars() -> list[Files]:
    long_name = "folder" * 30
    return [
        {TRAIN: tar_of(members_of("a", 4)), TEST: tar_of(members_of("b", 2))},
        {TRAIN: tar_of(members_of("a", 4, as_json=True)), TEST: tar_of(members_of("b", 2))},
        {TRAIN: tar_of(members_of(long_name, 3)), TEST: tar_of(members_of("b", 2))},
        {TRAIN: tar_of(members_of(long_name, 3), tarfile.PAX_FORMAT), TEST: tar_of(members_of("b", 2))},
    ]


def corrupt_tar(files: Files, rng: Random) -> Files:
    name = rng.choice(sorted(files))
    return files | {name: corrupt_header(files[name], rng) if rng.random() < 0.5 else corrupt_members(rng)}


def corrupt_header(tar: bytes, rng: Random) -> bytes:
    """Change a field of one header and fix its checksum."""
    begin = BLOCK * rng.choice([at for at in range(len(tar) // BLOCK) if tar[BLOCK * at + 257 :][:5] == b"ustar"])
    header = bytearray(tar[begin : begin + BLOCK])
    what = rng.randrange(4)
    if what == 0:
        sizes = (
            b"77777777777\0",
            b"-0000000001\0",
            b"\x80" + b"\xff" * 11,
            b"\xff" * 12,
            b"9" * 12,
            b" " * 12,
            bytes(12),
        )
        header[SIZE] = rng.choice(sizes)
    elif what == 1:
        header[KIND] = rng.choice((b"0", b"1", b"2", b"5", b"7", b"L", b"K", b"x", b"g", b"S", b"\0", b"\xff"))
    elif what == 2:
        header[:100] = (rng.choice(MEMBER_NAMES).encode()[:100]).ljust(100, b"\0")
    else:
        header[rng.randrange(BLOCK)] = rng.randrange(256)
    header[CHECKSUM] = b" " * 8
    header[CHECKSUM] = b"%06o\0 " % sum(header)
    return tar[:begin] + bytes(header) + tar[begin + BLOCK :]


def corrupt_members(rng: Random) -> bytes:
    members = members_of("a", 3, as_json=rng.random() < 0.5)
    at = rng.randrange(len(members))
    name, content = members[at]
    what = rng.randrange(5)
    if what == 0:
        members[at] = (rng.choice(MEMBER_NAMES), content)
    elif what == 1:
        label = rng.choice(LABEL_TEXTS)
        members[at | 1] = (members[at | 1][0], label)
    elif what == 2:
        members[at | 1] = (members[at | 1][0], b'{"label": %s}' % str(nonsense(rng)).encode("utf-8", "replace"))
    elif what == 3:
        members.insert(rng.randrange(len(members)), (name, b""))
    else:
        records = (
            b"30 size=1000000000000000000000\n",
            b"99999999999999999999 path=x\n",
            b"-5 a=b\n",
            b"9" * 5000 + b" a=b\n",
        )
        pax = tar_of([("pax", rng.choice(records))])[: 2 * BLOCK]
        header = bytearray(pax[:BLOCK])
        header[KIND], header[CHECKSUM] = b"x", b" " * 8
        header[CHECKSUM] = b"%06o\0 " % sum(header)
        return bytes(header) + pax[BLOCK:] + tar_of(members)
    return tar_of(members, rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)))


def is_tar_archive(files: Files) -> bool:
    try:
        for content in files.values():
            tarfile.open(fileobj=io.BytesIO(content)).close()
    except Exception:  # tarfile, which is not the reader under test, may raise anything
        return False
    return True


def read_source(folder: Path) -> None:
    require_sane(load_data_set(DataSettings(source=str(folder), image_size=SIDE)))


def set_up_packs(scratch: Path, stack: ExitStack) -> Bench:
    source, packed = scratch / "pictures", scratch / "packed"
    for number in range(8):
        image, label = sample(number)
        write_input({f"{part}/class {label}/{number}.jpg": image for part in ("train", "val")}, source)
    pack(source, packed, PackSettings())
    files = {name: content for name, content in read_back(packed).items() if name[0] != "."}
    # The original index contains the time of packing, so it is written again.
    return Bench([files | {INDEX: archive(arrays_in(files[INDEX]))}], read_pack)


def read_pack(folder: Path) -> None:
    refusal = None
    for read in (read_source, verify_pack):
        try:
            read(folder)
        except UserError as error:
            refusal = error
    if refusal:
        raise refusal


def verify_pack(folder: Path) -> None:
    damaged = verify(folder)
    if damaged:
        raise UserError(damaged[0])


def corrupt_pack(files: Files, rng: Random) -> Files:
    if rng.random() < 0.3:
        return files | {INDEX: corrupt_archive(files[INDEX], rng)}
    index = arrays_in(files[INDEX])
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(sorted(index))
        if name in ("shards", "class_names") and rng.random() < 0.5:
            names = ("../" + TRAIN, "/etc/passwd", ".", "", "a\0b", "\x1b[31m", TRAIN)
            index[name] = np.array([rng.choice(names)] * index[name].size)
        else:
            index[name] = corrupt_array(index[name], rng)
    return files | {INDEX: archive(index)}


ARCHIVES = {
    "tar": Format(by_functions(tars, read_source), corrupt_tar, is_tar_archive),
    "pack": Format(set_up_packs, corrupt_pack, lambda files: is_archive(files[INDEX])),
}
