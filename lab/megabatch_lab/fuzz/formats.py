"""What a format is to the fuzzer: whole inputs, lies about them, and the reader that must not be hurt by them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import NamedTuple

from megabatch_lab.fuzz.mutations import mutate

Files = dict[str, bytes]  # an input: its files, by their names below a folder
SHARE_WHOLE = 0.02  # of the inputs, which the reader must accept
SHARE_LIES = 0.6  # and of lies; the others have bytes changed


class Bench(NamedTuple):
    """A format that is set up to be read."""

    specimens: Sequence[Files]
    read: Callable[[Path], None]  # the folder of an input; returns, or refuses it by one of `REFUSALS`


class Format(NamedTuple):
    set_up: Callable[[Path, ExitStack], Bench]  # with a folder for what it needs, and what closes it
    lie: Callable[[Files, Random], Files]  # structured: what only somebody who knows the format can write
    has_header: Callable[[Files], bool]  # whether an input gets past the first look at its header


class Input(NamedTuple):
    files: Files
    is_whole: bool


def make_input(name: str, made: Format, specimens: Sequence[Files], seed: int, number: int) -> Input:
    """A function of the seed, the format's name and the number alone."""
    rng = Random(f"{seed} {name} {number}")
    files = dict(rng.choice(specimens))
    kind = rng.random()
    if kind < SHARE_WHOLE:
        return Input(files, is_whole=True)
    is_lie = kind < SHARE_WHOLE + SHARE_LIES
    if is_lie:
        files = made.lie(files, rng)
    if not is_lie or rng.random() < 0.1:
        changed, other = rng.choice(sorted(files)), rng.choice(specimens)
        files = files | {changed: mutate(files[changed], rng, other.get(changed, b""))}
    return Input(files, is_whole=False)


def write_input(files: Files, folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read_back(folder: Path) -> Files:
    """A specimen from what was written by the code that writes such things."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def by_functions(
    specimens: Callable[[], Sequence[Files]], read: Callable[[Path], None]
) -> Callable[[Path, ExitStack], Bench]:
    """For formats that need no more."""
    return lambda scratch, stack: Bench(specimens(), read)
