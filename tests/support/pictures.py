"""Small images of different colours, as files and in tar files."""

import io
import json
import tarfile
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image


@cache
def picture(number: int, size: tuple[int, int] = (20, 16), form: str = "JPEG") -> bytes:
    """Return an encoded image of `size` (width, height).  Its pixels depend only on `number`."""
    generator = np.random.default_rng(number)
    coarse = Image.fromarray(generator.integers(0, 256, (4, 4, 3), np.uint8))
    content = io.BytesIO()
    coarse.resize(size, Image.Resampling.BILINEAR).save(content, form)
    return content.getvalue()


def write_files(folder: Path, names: list[str], **options: object) -> dict[str, bytes]:
    """Write one image per name and return the contents."""
    written = {}
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number, **options))  # type: ignore[arg-type]
        written[name] = path.read_bytes()
    return written


def write_tar(
    path: Path, members: list[tuple[str, bytes | str | dict[str, object]]], form: int = tarfile.GNU_FORMAT
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members:
            if isinstance(content, dict):
                content = json.dumps(content)
            if isinstance(content, str):
                content = content.encode()
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 1.5  # type: ignore[assignment]
            tar.addfile(member, io.BytesIO(content))
