"""Weights to start from: what a file holds, and what of it fits a model.

A head of another size is left as it was initialised, weight and bias together: other classes are to be told apart.
Whatever else is missing or has another shape is left so too, and listed.  Files are data: nothing in them is executed.
"""

import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from megabatch.errors import UserError
from megabatch.models.layers import head_parameters
from megabatch.runs.files import WEIGHTS

Weights = dict[str, torch.Tensor]
CHECKPOINT, CHECKPOINT_PREFIX = "state.safetensors", "model."  # of a run: see `train/checkpoint.py`
WRAPPED_IN = ("state_dict", "model", "model_state")  # what training scripts put a state dict under
ADDED_PREFIXES = ("module.", "_orig_mod.")  # by DistributedDataParallel and torch.compile
COUNTER = "num_batches_tracked"  # of a BatchNorm: older files have none, and nothing depends on it
MOST_NAMED = 3  # of tensors that do not fit


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
    return ", ".join(names[:MOST_NAMED]) + more


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
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({first_line(error)}); copy it again") from None


def read_pickle(path: Path) -> Weights:
    """By torch's loader of tensors alone: whatever else a pickle names is refused before it is imported."""
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"more than tensors ({named[1]})" if named else f"what is no state dict ({first_line(error)})"
        raise UserError(
            f"{path} holds {what}, and loading that could run code; "
            "where it comes from, save the state dict alone: torch.save(model.state_dict(), path)"
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, IndexError) as error:  # of a damaged file
        raise UserError(f"{path} cannot be read ({first_line(error)}); copy it again") from None
    for key in WRAPPED_IN:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    members = content.items() if isinstance(content, dict) else ()
    return {name: value for name, value in members if isinstance(name, str) and isinstance(value, torch.Tensor)}


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


READERS: dict[str, Callable[[Path], Weights]] = {
    ".safetensors": read_safetensors,
    ".pth": read_pickle,
    ".pt": read_pickle,
}
