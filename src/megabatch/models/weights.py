"""Initial weights: reads the tensors of a file, and matches them with a model.

A head of another size keeps its initial weight and bias, because the classes differ.  All other tensors that are
missing or have another shape also keep their initial values and are listed.  No code in a file is executed.
"""

import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from megabatch.errors import UserError
from megabatch.io.reading import reading
from megabatch.io.tensor_header import NotTensors, read_header
from megabatch.models.layers import head_parameters
from megabatch.runs.files import WEIGHTS
from megabatch.text import expand_home, listed, one_line
from megabatch.torch_api import refused_global

Weights = dict[str, torch.Tensor]
# See `training/checkpoint/format.py`.  A later prefix wins: averages replace weights.
CHECKPOINT, CHECKPOINT_PREFIXES = "state.safetensors", ("model.", "average.")
PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
WRAPPED_IN = ("state_dict", "model", "model_state")  # keys under which training scripts save a state dict
ADDED_PREFIXES = ("module.", "_orig_mod.")  # by DistributedDataParallel and torch.compile
COUNTER = "num_batches_tracked"  # of a BatchNorm: older files lack it, and it is not used
MOST_NAMED = 3  # tensors listed in a line
LONGEST_NAME = 200  # characters of a name
# Errors that torch's reader raises for damaged zips and pickles, in addition to `pickle.UnpicklingError`: it does not
# validate its input.  MemoryError: a false size.
DAMAGE = (
    *(RuntimeError, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError),
    *(ArithmeticError, MemoryError, struct.error),
)


@dataclass(frozen=True, kw_only=True)
class MatchReport:
    tensors: Weights  # those that fit, with the model's names and dtypes
    num_parameters: int  # parameters of the model, without buffers
    num_fitting: int  # parameters that fit
    new_head: list[str]  # parameters of the head, if the file has another head
    missing: list[str]
    unexpected: list[str]
    other_shapes: list[str]

    def lines(self, name: str) -> list[str]:
        """Return the lines to print.  `name`: of the file."""
        return [f"from {name}: {self.num_fitting} of {self.num_parameters} tensors"] + [
            f"{what}: {list_tensors(names)}"
            for what, names in {
                "new head": self.new_head,
                "missing in it, left as initialised": self.missing,
                "other shapes in it, left as initialised": self.other_shapes,
                "not in the model, ignored": self.unexpected,
            }.items()
            if names
        ]


def list_tensors(names: Sequence[str]) -> str:
    return listed([one_line(name, LONGEST_NAME) for name in names[:MOST_NAMED]], MOST_NAMED, len(names))


def match(model: nn.Module, weights: Weights) -> MatchReport:
    """Match `weights` with the model, without changing it.  Raise UserError if no parameter fits."""
    own: Weights = {name: t for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    weights = strip_added_prefixes(weights, own)
    missing = [name for name in own if name not in weights]
    differing = [name for name in own if name in weights and own[name].shape != weights[name].shape]
    head = [name for name in head_parameters(model) if name in own]
    renewed = head if any(name in differing or name in missing for name in head) else []
    unusable = {*missing, *differing, *renewed}
    parameters = [name for name, _ in model.named_parameters()]
    fitting = [name for name in parameters if name not in unusable]
    for name in own:
        if name not in unusable:
            require_compatible_dtype(name, weights[name], own[name])
    if not fitting:
        raise UserError(
            f"none of its {len(weights)} tensors ({list_tensors(list(weights))}) fits the model "
            f"({list_tensors(parameters)}); use weights of this model, or another model.name"
        )
    return MatchReport(
        tensors={name: weights[name].to(own[name].dtype) for name in own if name not in unusable},
        num_parameters=len(parameters),
        num_fitting=len(fitting),
        new_head=[describe_shapes(name, own, weights) for name in renewed],
        missing=[name for name in missing if name not in renewed and not name.endswith(COUNTER)],
        unexpected=[name for name in weights if name not in own],
        other_shapes=[describe_shapes(name, own, weights) for name in differing if name not in renewed],
    )


def require_compatible_dtype(name: str, given: torch.Tensor, own: torch.Tensor) -> None:
    """Check that both are floating-point or complex: torch would copy an int8 into a weight.  Counters may be cast."""
    if (own.is_floating_point() and not given.is_floating_point()) or given.is_complex() != own.is_complex():
        raise UserError(f"{name} is {given.dtype} in the file and {own.dtype} in the model; convert it before saving")


def require_finite(tensors: Weights) -> None:
    """Check that all tensors are finite after rounding to the model's dtype."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{name} has inf or NaN; use other weights")


def describe_shapes(name: str, own: Weights, weights: Weights) -> str:
    given = f"is {list(weights[name].shape)}" if name in weights else "is missing"
    return f"{name} {given} in the file and {list(own[name].shape)} in the model"


def strip_added_prefixes(weights: Weights, own: Weights) -> Weights:
    """Remove a prefix that a wrapper added to all names, unless the model has it too."""
    for prefix in ADDED_PREFIXES:
        if all(name.startswith(prefix) for name in weights) and not any(name.startswith(prefix) for name in own):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def read_weights(path: Path) -> Weights:
    """Read a .safetensors, .pth or .pt file, the folder of a run (its final weights), or one of its checkpoints."""
    file = file_of(Path(expand_home(path)))
    if file.suffix not in READERS:
        raise UserError(f"{file} is not one of {', '.join(READERS)}; save a state dict as one of them")
    weights = READERS[file.suffix](file)
    if file.name == CHECKPOINT:
        weights = {
            name.removeprefix(prefix): tensor
            for prefix in CHECKPOINT_PREFIXES
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }
    if not weights:
        raise UserError(f"{file} holds no tensors by name; save model.state_dict()")
    return weights


def file_of(path: Path) -> Path:
    if not path.exists():
        raise UserError(f"{path} does not exist; pass a .safetensors, .pth or .pt file, or the folder of a run")
    if not path.is_dir():
        return path
    for name in (WEIGHTS, CHECKPOINT):
        if (path / name).is_file():
            return path / name
    raise UserError(
        f"{path} has no {WEIGHTS}: it is not a finished run; pass one, or a checkpoint of it (checkpoints/last)"
    )


def read_safetensors(path: Path) -> Weights:
    try:
        read_header(path)  # stricter than the library
        return load_file(path)
    except (SafetensorError, NotTensors, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({first_line(error)}); copy it again") from None


def read_pickle(path: Path) -> Weights:
    """Read a pickle with torch's loader of tensors, which rejects all other names before it imports them."""
    require_uncompressed(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns about pickles that it did not write
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = refused_global(error)
        content = f"more than tensors ({name})" if name else f"no state dict ({first_line(error)})"
        raise UserError(
            f"{path} holds {content}, and loading that could run code; "
            "in the program that wrote it, save only the state dict: torch.save(model.state_dict(), path)"
        ) from None
    except DAMAGE as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}); copy it again") from None
    # Call the methods of dict and Tensor directly: a pickle may have replaced those of its objects.
    members = dict(dict.items(content)) if isinstance(content, dict) else {}
    for key in WRAPPED_IN:
        if isinstance(members.get(key), dict):
            members = dict(dict.items(members[key]))
            break
    found = {
        name: value for name, value in members.items() if isinstance(name, str) and isinstance(value, torch.Tensor)
    }
    for name, value in found.items():
        if type(value) not in PLAIN_TENSORS or value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise UserError(f"{path}: {name} is not a plain dense tensor; convert it before saving")
    return {name: torch.Tensor.detach(value) for name, value in found.items()}


def require_uncompressed(path: Path) -> None:
    """Check that a zip is not compressed: it could be a thousand times larger in memory.  torch does not compress."""
    try:
        with reading(path) as file:
            if not zipfile.is_zipfile(file):
                return
            file_bytes = os.fstat(file.fileno()).st_size
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}); copy it again") from None
    is_compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if is_compressed or sum(member.file_size for member in members) > file_bytes:
        raise UserError(
            f"{path} is a compressed zip, which torch does not write; save it again: torch.save(state_dict, path)"
        )


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


READERS: dict[str, Callable[[Path], Weights]] = {
    ".safetensors": read_safetensors,
    ".pth": read_pickle,
    ".pt": read_pickle,
}
