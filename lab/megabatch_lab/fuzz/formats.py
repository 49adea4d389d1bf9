"""A format of the fuzzer: valid inputs, crafted corruptions of them, and the reader under test."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import NamedTuple

from megabatch_lab.fuzz.mutations import mutate

Files = dict[str, bytes]  # an input: contents by relative path
SHARE_VALID = 0.02  # of the inputs, which the reader must accept
SHARE_CRAFTED = 0.6  # of the inputs; the others have changed bytes


class Bench(NamedTuple):
    """Valid inputs of a format and its reader."""

    specimens: Sequence[Files]
    read: Callable[[Path], None]  # takes the folder of an input; raises one of `REFUSALS` to refuse it


class Format(NamedTuple):
    set_up: Callable[[Path, ExitStack], Bench]  # with a scratch folder, and a stack that closes it
    craft: Callable[[Files, Random], Files]  # corrupts the structure, with knowledge of the format
    has_header: Callable[[Files], bool]  # True if the header of an input is accepted


class Input(NamedTuple):
    files: Files
    is_valid: bool


def make_input(name: str, made: Format, specimens: Sequence[Files], seed: int, number: int) -> Input:
    """Return an input, as a function of the seed, the format's name and the number."""
    rng = Random(f"{seed} {name} {number}")
    files = dict(rng.choice(specimens))
    kind = rng.random()
    if kind < SHARE_VALID:
        return Input(files, is_valid=True)
    is_crafted = kind < SHARE_VALID + SHARE_CRAFTED
    if is_crafted:
        files = made.craft(files, rng)
    if not is_crafted or rng.random() < 0.1:
        changed, other = rng.choice(sorted(files)), rng.choice(specimens)
        files = files | {changed: mutate(files[changed], rng, other.get(changed, b""))}
    return Input(files, is_valid=False)


def write_input(files: Files, folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read_back(folder: Path) -> Files:
    """Return the files below a folder as a specimen."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def by_functions(
    specimens: Callable[[], Sequence[Files]], read: Callable[[Path], None]
) -> Callable[[Path, ExitStack], Bench]:
    """Return the `set_up` of a format that needs no scratch folder."""
    return lambda scratch, stack: Bench(specimens(), read)
