"""Checkpoints: a training state, to the bit, on disk.

checkpoints/step-00000390/state.safetensors   weights (fp32), buffers, optimizer state, loss scale
            step-00000390/state.json          the step, the run's totals, and the checksum of the other file
            last -> step-00000390,  best -> step-00000351

There is little to keep, because position determines data: no generator, sampler or loader has a state.
A checkpoint is written under another name, synced and renamed, so that a kill leaves all of it or nothing.
All ranks hold the same state after every step, so rank 0 alone saves, and shares what it has loaded.  When it does so,
and what it keeps, is in `saves.py`.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct

from megabatch.errors import UserError
from megabatch.io.disk import fill_hashed, make_private, private, write_hashed, writing
from megabatch.io.reading import Undecodable, decode_json, read_regular, reading
from megabatch.io.tensor_header import LENGTH_BYTES, MAX_HEADER_BYTES, Entry, Header, NotTensors, parse_header
from megabatch.planning.tuning import Tuning
from megabatch.planning.validate import require_sound
from megabatch.runs.files import CHECKPOINTS
from megabatch.runs.model_card import METADATA, ModelCard
from megabatch.runs.totals import RunTotals, totals_problem
from megabatch.training.checkpoint.card import with_results
from megabatch.training.numerics import is_compiled
from megabatch.training.parts import Training

# Safetensors files, written and read in one pass each, with the checksum from the same pass.
#
# The bytes are those of safetensors' own writer, whose file would have to be read again to be hashed.  Python's lock
# is held for moments only: training goes on meanwhile.

# The wider come first in a file, and of equally wide ones the later in this table: so each tensor is aligned.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ORDER = {dtype: place for place, dtype in enumerate(DTYPES.values())}
AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # what numpy knows, by bytes
ALIGNED_BYTES = 8


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> str:
    """The sha256 of the file.  Tensors may share memory, and be strided; those of a device are copied one by one."""
    names = sorted(tensors, key=lambda name: (-ORDER[tensors[name].dtype], name))
    return write_hashed(path, parts(names, tensors, metadata))


def parts(names: list[str], tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> Iterator[memoryview]:
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        dtype, shape = NAMES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNED_BYTES)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        yield bytes_of(tensors[name])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """In the order of its indices.  By numpy, which takes no threads from those that compute."""
    integers = tensor.detach().cpu().view(AS_INTEGERS[tensor.dtype.itemsize]).numpy()
    return np.ascontiguousarray(integers).reshape(-1).view(np.uint8).data


def read_flat(path: Path, check: Callable[[Header], None] | None = None) -> tuple[torch.Tensor, str]:
    """The file's bytes, and their sha256.  What `check` says of its header is raised before memory is taken."""
    with reading(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        if check:
            check(parse_header(file, file_bytes))
            file.seek(0)
        flat = np.empty(file_bytes, dtype=np.uint8)
        return torch.from_numpy(flat), fill_hashed(file, flat.data)


def header_of(flat: torch.Tensor) -> Header:
    length = int.from_bytes(flat[:LENGTH_BYTES].numpy().tobytes(), "little")
    begin = flat[: LENGTH_BYTES + min(length, MAX_HEADER_BYTES)].numpy()  # a copy of no more than it needs
    return parse_header(io.BytesIO(begin.data), len(flat))


def tensors_in(flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """They share its memory.  `NotTensors` if it is no file of them."""
    header = header_of(flat)
    data = flat[header.data_begin :]
    return {name: tensor_in(data, entry) for name, entry in header.tensors.items()}


def tensor_in(data: torch.Tensor, entry: Entry) -> torch.Tensor:
    part, dtype = data[slice(*entry.data_offsets)], DTYPES[entry.dtype]
    if part.storage_offset() % dtype.itemsize:  # not as we write them, and a view would be refused
        part = part.clone()
    return part.view(dtype).view(entry.shape)


FORMAT = 3  # of a checkpoint; another one is refused
STATE, DESCRIPTION = "state.safetensors", "state.json"
MAX_DESCRIPTION_BYTES = 64 << 20  # a thousand classes and a thousand unreadable images have a tenth of a MB
NAME = re.compile(r"step-[0-9]{8,18}")


class Description(Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    step: Annotated[int, Meta(ge=1)]
    computed_by: str  # see `describe_arithmetic`
    data: str  # which images it was trained on
    tuning: Tuning | None  # how its gradients are all-reduced
    totals: RunTotals
    card: ModelCard  # what belongs to the weights
    checksum: str  # sha256 of the tensors' file

    def problem(self) -> str | None:
        """What in it contradicts itself, if anything."""
        if self.totals.steps != self.step:
            return f"its totals are of step {self.totals.steps}, and it is of step {self.step}"
        return None


def describe_arithmetic(training: Training) -> str:
    """What else decides how sums are rounded: a resumed run is the same to the bit where this is the same."""
    threads = torch.get_num_threads()
    plans = training.gradients.plans
    choice = f" (choice {plans.tuning.rounding})" if plans.tuning else ""
    compiled = ", compiled" if is_compiled(training.network) else ""
    return f"{training.plan.num_ranks} ranks of {threads} threads, {plans.names}{choice}{compiled}"


def save_weights(training: Training, totals: RunTotals, path: Path) -> None:
    """The model alone, under the names of its state dict, and what belongs to it: what a run is for."""
    card = msgspec.json.encode(with_results(training.card, totals)).decode()
    with writing(path) as new:
        write_tensors(new, training.master_weights.state_dict(), {METADATA: card})


def describe(training: Training, totals: RunTotals) -> Description:
    """What is known before the tensors are written."""
    return Description(
        step=totals.steps,
        computed_by=describe_arithmetic(training),
        data=training.data_fingerprint,
        tuning=training.gradients.plans.tuning,
        totals=totals,
        card=with_results(training.card, totals),
        checksum="",
    )


def write_checkpoint(folder: Path, state: dict[str, torch.Tensor], description: Description) -> str:
    """All of it or nothing; its name.  One that is there has failed at what comes after it, and is whole."""
    name = name_of(description.step)
    if is_own(folder / name):
        return name
    with writing(folder / name) as new:
        make_private(new)
        checksum = write_tensors(new / STATE, state)
        whole = msgspec.structs.replace(description, checksum=checksum)
        with open(new / DESCRIPTION, "xb", opener=private) as file:
            file.write(msgspec.json.encode(whole))
    return name


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    return bool(NAME.fullmatch(name)) and name == name_of(step_of(Path(name)))


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in it: folders of its own, and nothing that only looks like one."""
    return sorted((path for path in entries(folder) if is_own(path)), key=step_of, reverse=True)


def strays(folder: Path) -> list[Path]:
    """What is called like a checkpoint and is none: a copy, a link, a file."""
    return [path for path in entries(folder) if path.name.startswith("step-") and not is_own(path)]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def is_own(path: Path) -> bool:
    return is_checkpoint_name(path.name) and path.is_dir() and not path.is_symlink()


def newest_good(run_folder: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint of a run that is whole; damaged ones are reported and passed over."""
    for path in newest_first(run_folder / CHECKPOINTS):
        try:
            read_description(path)
            return path
        except DamagedCheckpoint as damage:
            report(str(damage))
    return None


class DamagedCheckpoint(UserError):
    """Whoever can do with another one passes it over."""


class Checkpoint(NamedTuple):
    path: Path
    description: Description
    state: dict[str, torch.Tensor]


Check = Callable[[Description, Mapping[str, Entry]], str | None]  # what does not fit; None if all does
CheckValues = Callable[[Description, Mapping[str, torch.Tensor]], str | None]


def read_checkpoint(path: Path, check: Check | None = None, check_values: CheckValues | None = None) -> Checkpoint:
    """All of it, in one pass over the file: its checksum is that of the bytes that are used.

    What `check` says of the description and the tensors' header is heard before there is memory for the tensors.
    """
    with damage_named(path):
        description = decode_description(path)

        def check_header(header: Header) -> None:
            require(path, check and check(description, header.tensors))

        flat, found = read_flat(path / STATE, check_header)
        require_checksum(path, description, found)
        check_header(header_of(flat))  # somebody may have written to the file meanwhile
        state = tensors_in(flat)
        require(path, check_values and check_values(description, state))
    return Checkpoint(path, description, state)


def read_description(path: Path) -> Description:
    """Checks a checkpoint, and says where in the run it stands."""
    with damage_named(path):
        description = decode_description(path)
        with reading(path / STATE) as file:
            parse_header(file, os.fstat(file.fileno()).st_size)
            file.seek(0)
            found = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        require_checksum(path, description, found)
    return description


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Around the reading of a checkpoint, whose bytes may be anything."""
    try:
        yield
    except (OSError, Undecodable, NotTensors, MemoryError) as error:
        raise DamagedCheckpoint(f"checkpoint {path} cannot be read ({error})") from error


def require(path: Path, problem: str | None) -> None:
    if problem:
        raise DamagedCheckpoint(f"checkpoint {path} does not fit this run: {problem}")


def decode_description(path: Path) -> Description:
    content = read_regular(path / DESCRIPTION, MAX_DESCRIPTION_BYTES)
    require_format(content, path)
    description = decode_json(content, Description)
    problem = description.problem() or totals_problem(description.totals)
    if not problem and is_checkpoint_name(path.name) and step_of(path) != description.step:
        problem = f"it says that it is of step {description.step}"
    if problem:
        raise DamagedCheckpoint(f"checkpoint {path} is damaged: {problem}")
    return description


def require_checksum(path: Path, description: Description, found: str) -> None:
    if found != description.checksum:
        raise DamagedCheckpoint(f"checkpoint {path / STATE} is damaged: its checksum does not match")


def read_tuning(description: Path) -> Tuning | None:
    """How the run all-reduced its gradients, without a look at the tensors; `Undecodable` or OSError if damaged."""
    stored = decode_json(read_regular(description, MAX_DESCRIPTION_BYTES), Description).tuning
    return stored and require_sound(stored)


def require_format(description: bytes, path: Path) -> None:
    found = decode_json(description, dict[str, Any]).get("format")
    if type(found) is not int or found != FORMAT:
        raise UserError(
            f"checkpoint {path} was written by another version of megabatch (format {str(found)[:20]}, this one has "
            f"{FORMAT}); finish the run with that version, or begin a new one in another folder (or with --resume "
            "never)"
        )


def step_of(path: Path) -> int:
    """By the checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def read_state(path: Path) -> dict[str, torch.Tensor]:
    with damage_named(path):
        return tensors_in(read_flat(path / STATE)[0])
