"""Weights to start from: what a file holds, and what of it fits a model.

A head of another size is left as it was initialised, weight and bias together: other classes are to be told apart.
Whatever else is missing or has another shape is left so too, and listed.  Files are data: nothing in them is executed.
"""

import os
import pickle
import re
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
from megabatch.text import one_line

Weights = dict[str, torch.Tensor]
CHECKPOINT, CHECKPOINT_PREFIX = "state.safetensors", "model."  # of a run: see `training/checkpoint/format.py`
PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
WRAPPED_IN = ("state_dict", "model", "model_state")  # what training scripts put a state dict under
ADDED_PREFIXES = ("module.", "_orig_mod.")  # by DistributedDataParallel and torch.compile
COUNTER = "num_batches_tracked"  # of a BatchNorm: older files have none, and nothing depends on it
MOST_NAMED = 3  # of tensors that do not fit
LONGEST_NAME = 200  # letters of one
# What torch's reader of damaged zips and pickles raises, beside `pickle.UnpicklingError`: it takes its steps as they
# come, and fails as Python does.  MemoryError: a size that is a lie.
DAMAGE = (
    *(RuntimeError, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError),
    *(ArithmeticError, MemoryError, struct.error),
)


@dataclass(frozen=True, kw_only=True)
class MatchReport:
    tensors: Weights  # that fit, under the model's names and in its dtypes
    num_parameters: int  # tensors of the model that are trained, buffers not counted
    num_fitting: int  # of them
    new_head: list[str]  # what the head needs and the file has otherwise; the head stays as it was initialised
    missing: list[str]
    unexpected: list[str]
    other_shapes: list[str]

    def lines(self, name: str) -> list[str]:
        """What to say of it; `name` is the file's."""
        return [f"from {name}: {self.num_fitting} of {self.num_parameters} tensors"] + [
            f"{what}: {shorten(names)}"
            for what, names in {
                "new head": self.new_head,
                "not in it, so as initialised": self.missing,
                "of other shapes, so as initialised": self.other_shapes,
                "in it, but not in the model": self.unexpected,
            }.items()
            if names
        ]


def shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(one_line(name, LONGEST_NAME) for name in names[:MOST_NAMED]) + more


def match(model: nn.Module, weights: Weights) -> MatchReport:
    """What of `weights` fits the model.  Changes nothing; UserError if nothing does."""
    own: Weights = {name: t for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    weights = without_added_prefixes(weights, own)
    missing = [name for name in own if name not in weights]
    differing = [name for name in own if name in weights and own[name].shape != weights[name].shape]
    head = [name for name in head_parameters(model) if name in own]
    renewed = head if any(name in differing or name in missing for name in head) else []
    unusable = {*missing, *differing, *renewed}
    parameters = [name for name, _ in model.named_parameters()]
    fitting = [name for name in parameters if name not in unusable]
    for name in own:
        if name not in unusable:
            require_kind(name, weights[name], own[name])
    if not fitting:
        raise UserError(
            f"none of its {len(weights)} tensors ({shorten(list(weights))}) fits the model ({shorten(parameters)}); "
            "give the weights of this model, or another model.name"
        )
    return MatchReport(
        tensors={name: weights[name].to(own[name].dtype) for name in own if name not in unusable},
        num_parameters=len(parameters),
        num_fitting=len(fitting),
        new_head=[describe(name, own, weights) for name in renewed],
        missing=[name for name in missing if name not in renewed and not name.endswith(COUNTER)],
        unexpected=[name for name in weights if name not in own],
        other_shapes=[describe(name, own, weights) for name in differing if name not in renewed],
    )


def require_kind(name: str, given: torch.Tensor, own: torch.Tensor) -> None:
    """Numbers as the model has them: torch would take an int8 for a weight.  Counters may be cast."""
    if (own.is_floating_point() and not given.is_floating_point()) or given.is_complex() != own.is_complex():
        raise UserError(f"{name} is {given.dtype} there and {own.dtype} here; give weights of that kind of number")


def require_finite(tensors: Weights) -> None:
    """In the model's dtype, to which they are rounded."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{name} has inf or NaN; give other weights")


def describe(name: str, own: Weights, weights: Weights) -> str:
    there = str(list(weights[name].shape)) if name in weights else "not"
    return f"{name} is {there} there and {list(own[name].shape)} here"


def without_added_prefixes(weights: Weights, own: Weights) -> Weights:
    """Names as the model has them, if all of them begin with what a wrapper has put before them."""
    for prefix in ADDED_PREFIXES:
        if all(name.startswith(prefix) for name in weights) and not any(name.startswith(prefix) for name in own):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def read_weights(path: Path) -> Weights:
    """Of a .safetensors, .pth or .pt file, of a run's folder (its final weights), or of one of its checkpoints."""
    file = file_of(path.expanduser())
    if file.suffix not in READERS:
        raise UserError(f"{file} is not one of {', '.join(READERS)}; save a state dict as one of them")
    weights = READERS[file.suffix](file)
    if file.name == CHECKPOINT:
        own = {name: tensor for name, tensor in weights.items() if name.startswith(CHECKPOINT_PREFIX)}
        weights = {name.removeprefix(CHECKPOINT_PREFIX): tensor for name, tensor in own.items()}
    if not weights:
        raise UserError(f"{file} holds no tensors by name; save model.state_dict()")
    return weights


def file_of(path: Path) -> Path:
    if not path.exists():
        raise UserError(f"{path} does not exist; give a .safetensors, .pth or .pt file, or the folder of a run")
    if not path.is_dir():
        return path
    for name in (WEIGHTS, CHECKPOINT):
        if (path / name).is_file():
            return path / name
    raise UserError(
        f"{path} has no {WEIGHTS}: it is not a finished run; give one, or a checkpoint of it (checkpoints/last)"
    )


def read_safetensors(path: Path) -> Weights:
    try:
        read_header(path)  # it refuses more than the library does
        return load_file(path)
    except (SafetensorError, NotTensors, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({first_line(error)}); copy it again") from None


def read_pickle(path: Path) -> Weights:
    """By torch's loader of tensors alone: whatever else a pickle names is refused before it is imported."""
    require_stored_as_is(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # what torch says of a pickle that is not its own
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"more than tensors ({named[1]})" if named else f"what is no state dict ({first_line(error)})"
        raise UserError(
            f"{path} holds {what}, and loading that could run code; "
            "where it comes from, save the state dict alone: torch.save(model.state_dict(), path)"
        ) from None
    except DAMAGE as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}); copy it again") from None
    # By the methods of dict and Tensor themselves: a pickle may have put others into the objects.
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
            raise UserError(f"{path}: {name} is no plain tensor; save it as one")
    return {name: torch.Tensor.detach(value) for name, value in found.items()}


def require_stored_as_is(path: Path) -> None:
    """As torch writes them: what is compressed may be a thousand times as large in memory as in the file."""
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
        raise UserError(f"{path} is compressed, which torch does not do; save the state dict again: torch.save")


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


READERS: dict[str, Callable[[Path], Weights]] = {
    ".safetensors": read_safetensors,
    ".pth": read_pickle,
    ".pt": read_pickle,
}
