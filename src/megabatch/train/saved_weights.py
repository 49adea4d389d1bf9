"""The weights that a run has left, and what belongs to them: of its final model, or of a checkpoint."""

import json
import struct
from pathlib import Path

import torch
from msgspec import Struct
from safetensors.torch import load_file

from megabatch.errors import UserError
from megabatch.runs.files import CHECKPOINTS, WEIGHTS
from megabatch.runs.model_card import METADATA, ModelCard, decode_card
from megabatch.train.checkpoint import STATE, DamagedCheckpoint, newest_good, read_description
from megabatch.train.training_state import model_state

MAX_HEADER_BYTES = 100 << 20  # of a safetensors file, as its own readers have it


class SavedWeights(Struct, frozen=True):
    path: Path
    card: ModelCard

    def read(self) -> dict[str, torch.Tensor]:
        """The model's state dict."""
        tensors = load_file(self.path)
        return model_state(tensors) if self.path.name == STATE else tensors


def find_weights(run: Path, checkpoint: str | None = None) -> SavedWeights:
    """Of a run's folder: the final model, or `best`, `last` or `step-00000390`.  A file is taken as it is."""
    if run.is_file():
        return SavedWeights(run, card_of_file(run))
    if checkpoint is None and (run / WEIGHTS).is_file():
        return SavedWeights(run / WEIGHTS, card_of_file(run / WEIGHTS))
    folder = run / CHECKPOINTS / checkpoint if checkpoint else newest_good(run, report=lambda damage: None)
    if folder is None or not folder.is_dir():
        there = [path.name for path in sorted((run / CHECKPOINTS).glob("[!.]*"))]
        raise UserError(
            f"{run} has no {f'checkpoint {checkpoint!r}' if checkpoint else 'model and no checkpoint yet'}; "
            + (f"there are {', '.join(there)}" if there else "train it first")
        )
    try:
        card = read_description(folder).card
    except DamagedCheckpoint as error:
        raise UserError(f"{error}; give another checkpoint") from None
    if card is None:
        raise UserError(f"{folder} does not say what belongs to its model; train it again")
    return SavedWeights(folder / STATE, card)


def card_of_file(path: Path) -> ModelCard:
    """From the metadata of a safetensors file: no tensor is read."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {length:,} bytes")
            header = json.loads(file.read(length))
        metadata = header.get("__metadata__", {})
    except (OSError, ValueError, struct.error, AttributeError) as error:
        raise UserError(f"{path} is not a safetensors file ({error}); give a run's folder, or its {WEIGHTS}") from None
    if METADATA not in metadata:
        raise UserError(f"{path} does not say what belongs to its model: no run of this version has written it")
    return decode_card(metadata[METADATA], str(path))
