"""Checkpoints: the exact training state on disk.

checkpoints/step-00000390/state.safetensors   weights (fp32), buffers, optimizer state, loss scale
            step-00000390/state.json          the step, the run's totals, and the checksum of state.safetensors
            last -> step-00000390,  best -> step-00000351

The position in the run determines the data, so no generator, sampler or loader has a state to save.
A checkpoint is written under a temporary name, synced and renamed, so a kill leaves a complete checkpoint or none.
All ranks have the same state after every step, so only rank 0 saves and loads, and broadcasts the loaded state.
`save.py` decides when to save and which checkpoints to keep.
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
from megabatch.io.tensor_header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Entry,
    NotTensors,
    SafetensorsHeader,
    parse_header,
)
from megabatch.planning.tuning import Tuning, validate_tuning
from megabatch.runs.files import CHECKPOINTS
from megabatch.runs.model_card import METADATA, ModelCard
from megabatch.runs.totals import RunTotals, totals_problem
from megabatch.training.checkpoint.card import with_results
from megabatch.training.checkpoint.state import result_of
from megabatch.training.numerics import is_compiled
from megabatch.training.parts import Training

# Safetensors files are written, or read, and hashed in one pass.  The bytes are the same as from the library's writer,
# whose file would have to be read again for the checksum.  The GIL is held only briefly, so training continues.

# Files begin with the widest dtypes, and among equal widths with the later ones in this table, so tensors are aligned.
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
INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by width in bytes; numpy has all
ALIGNED_BYTES = 8


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> str:
    """Write a safetensors file, and return its sha256.

    Tensors may share memory and be strided.  Tensors on a device are copied to the host one by one.
    """
    names = sorted(tensors, key=lambda name: (-ORDER[tensors[name].dtype], name))
    return write_hashed(path, file_parts(names, tensors, metadata))


def file_parts(
    names: list[str], tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None
) -> Iterator[memoryview]:
    """Yield the header and the bytes of each tensor."""
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
        yield tensor_bytes(tensors[name])


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes in row-major order.  Uses numpy, which takes no threads from training."""
    integers = tensor.detach().cpu().view(INTEGER_DTYPES[tensor.dtype.itemsize]).numpy()
    return np.ascontiguousarray(integers).reshape(-1).view(np.uint8).data


def read_flat(path: Path, check: Callable[[SafetensorsHeader], None] | None = None) -> tuple[torch.Tensor, str]:
    """Return the file's bytes and their sha256.  `check` may raise for the header before memory is allocated."""
    with reading(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        if check:
            check(parse_header(file, file_bytes))
            file.seek(0)
        flat = np.empty(file_bytes, dtype=np.uint8)
        return torch.from_numpy(flat), fill_hashed(file, flat.data)


def parse_flat_header(flat: torch.Tensor) -> SafetensorsHeader:
    length = int.from_bytes(flat[:LENGTH_BYTES].numpy().tobytes(), "little")
    begin = flat[: LENGTH_BYTES + min(length, MAX_HEADER_BYTES)].numpy()  # BytesIO copies it
    return parse_header(io.BytesIO(begin.data), len(flat))


def tensors_in(flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a file as views of its bytes.  Raises `NotTensors` if it is not a safetensors file."""
    header = parse_flat_header(flat)
    data = flat[header.data_begin :]
    return {name: tensor_in(data, entry) for name, entry in header.tensors.items()}


def tensor_in(data: torch.Tensor, entry: Entry) -> torch.Tensor:
    part, dtype = data[slice(*entry.data_offsets)], DTYPES[entry.dtype]
    if part.storage_offset() % dtype.itemsize:  # another writer did not align it, so torch refuses a view
        part = part.clone()
    return part.view(dtype).view(entry.shape)


FORMAT = 4  # checkpoints of another format are refused
STATE, DESCRIPTION = "state.safetensors", "state.json"
MAX_DESCRIPTION_BYTES = 64 << 20  # 1000 classes and 1000 unreadable images take 0.1 MB
NAME = re.compile(r"step-[0-9]{8,18}")


class Description(Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    step: Annotated[int, Meta(ge=1)]
    computed_by: str  # see `describe_arithmetic`
    data: str  # fingerprint of the images
    tuning: Tuning | None  # how gradients are all-reduced
    totals: RunTotals
    card: ModelCard
    checksum: str  # sha256 of state.safetensors

    def problem(self) -> str | None:
        """Return the first contradiction, or None."""
        if self.totals.steps != self.step:
            return f"its totals are for step {self.totals.steps}, but it is for step {self.step}"
        return None


def describe_arithmetic(training: Training) -> str:
    """Return all that affects rounding except the recipe.  A resumed run is bitwise identical if this is equal."""
    threads = torch.get_num_threads()
    plans = training.gradients.plans
    choice = f" (choice {plans.tuning.rounding})" if plans.tuning else ""
    compiled = ", compiled" if is_compiled(training.network) else ", in graphs" if training.graph else ""
    return f"{training.plan.num_ranks} ranks of {threads} threads, {plans.names}{choice}{compiled}"


def save_weights(training: Training, totals: RunTotals, path: Path) -> None:
    """Write the model's state dict, with the model card as metadata."""
    card = msgspec.json.encode(with_results(training.card, totals)).decode()
    with writing(path) as new:
        write_tensors(new, result_of(training), {METADATA: card})


def make_description(training: Training, totals: RunTotals) -> Description:
    """Return the description without its checksum, which is known once the tensors are written."""
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
    """Write a checkpoint atomically, and return its name.

    A checkpoint that exists is complete: an earlier attempt failed after writing it.
    """
    name = checkpoint_name(description.step)
    if is_checkpoint(folder / name):
        return name
    with writing(folder / name) as new:
        make_private(new)
        checksum = write_tensors(new / STATE, state)
        complete = msgspec.structs.replace(description, checksum=checksum)
        with open(new / DESCRIPTION, "xb", opener=private) as file:
            file.write(msgspec.json.encode(complete))
    return name


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    return bool(NAME.fullmatch(name)) and name == checkpoint_name(step_of(Path(name)))


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first.  Links and files are not checkpoints."""
    return sorted((path for path in entries(folder) if is_checkpoint(path)), key=step_of, reverse=True)


def invalid_entries(folder: Path) -> list[Path]:
    """Return the paths that are named like a checkpoint but are not one: copies, links, files."""
    return [path for path in entries(folder) if path.name.startswith("step-") and not is_checkpoint(path)]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def is_checkpoint(path: Path) -> bool:
    return is_checkpoint_name(path.name) and path.is_dir() and not path.is_symlink()


def newest_valid(run_folder: Path, report: Callable[[str], None]) -> Path | None:
    """Return the newest undamaged checkpoint of a run, or None.  Damaged ones are reported and skipped."""
    for path in newest_first(run_folder / CHECKPOINTS):
        try:
            read_description(path)
            return path
        except DamagedCheckpoint as damage:
            report(str(damage))
    return None


class DamagedCheckpoint(UserError):
    """Error for a checkpoint that is damaged or does not match the run.  Callers may use an older one."""


class Checkpoint(NamedTuple):
    path: Path
    description: Description
    state: dict[str, torch.Tensor]


# Both return the first problem, or None.
CheckLayout = Callable[[Description, Mapping[str, Entry]], str | None]
CheckValues = Callable[[Description, Mapping[str, torch.Tensor]], str | None]


def read_checkpoint(
    path: Path, check_layout: CheckLayout | None = None, check_values: CheckValues | None = None
) -> Checkpoint:
    """Read and check a checkpoint in one pass, so that the checksum covers the bytes that are used.

    `check_layout` runs before memory for the tensors is allocated.
    """
    with damage_raised(path):
        description = decode_description(path)

        def check_header(header: SafetensorsHeader) -> None:
            require_fit(path, check_layout and check_layout(description, header.tensors))

        flat, found = read_flat(path / STATE, check_header)
        require_checksum(path, description, found)
        check_header(parse_flat_header(flat))  # the file may have changed since the first check
        state = tensors_in(flat)
        require_fit(path, check_values and check_values(description, state))
    return Checkpoint(path, description, state)


def read_description(path: Path) -> Description:
    """Check a checkpoint, and return its description."""
    with damage_raised(path):
        description = decode_description(path)
        with reading(path / STATE) as file:
            parse_header(file, os.fstat(file.fileno()).st_size)
            file.seek(0)
            found = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        require_checksum(path, description, found)
    return description


@contextmanager
def damage_raised(path: Path) -> Iterator[None]:
    """Raise errors of reading a checkpoint as DamagedCheckpoint with its path."""
    try:
        yield
    except (OSError, Undecodable, NotTensors, MemoryError) as error:
        raise DamagedCheckpoint(f"checkpoint {path} cannot be read ({error})") from error


def require_fit(path: Path, problem: str | None) -> None:
    if problem:
        raise DamagedCheckpoint(f"checkpoint {path} does not fit this run: {problem}")


def decode_description(path: Path) -> Description:
    content = read_regular(path / DESCRIPTION, MAX_DESCRIPTION_BYTES)
    require_format(content, path)
    description = decode_json(content, Description)
    problem = description.problem() or totals_problem(description.totals)
    if not problem and is_checkpoint_name(path.name) and step_of(path) != description.step:
        problem = f"its description is for step {description.step}"
    if problem:
        raise DamagedCheckpoint(f"checkpoint {path} is damaged: {problem}")
    return description


def require_checksum(path: Path, description: Description, found: str) -> None:
    if found != description.checksum:
        raise DamagedCheckpoint(f"checkpoint {path / STATE} is damaged: the checksum does not match")


def read_tuning(description: Path) -> Tuning | None:
    """Return how the run all-reduced its gradients.  Reads no tensor.  Raises `Undecodable` or OSError if damaged."""
    stored = decode_json(read_regular(description, MAX_DESCRIPTION_BYTES), Description).tuning
    return stored and validate_tuning(stored)


def require_format(description: bytes, path: Path) -> None:
    found = decode_json(description, dict[str, Any]).get("format")
    if type(found) is not int or found != FORMAT:
        raise UserError(
            f"checkpoint {path} was written by another version of megabatch (format {str(found)[:20]}, expected "
            f"{FORMAT}); finish the run with that version, or start a new one in another folder (or with --resume "
            "never)"
        )


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def read_state(path: Path) -> dict[str, torch.Tensor]:
    with damage_raised(path):
        return tensors_in(read_flat(path / STATE)[0])
