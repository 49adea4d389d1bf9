"""The weights that a run has left, and what belongs to them: of its final model, or of a checkpoint."""

from pathlib import Path

import torch
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file

from megabatch.errors import UserError
from megabatch.io.tensor_header import Entry, NotTensors, read_header
from megabatch.runs.files import CHECKPOINTS, WEIGHTS
from megabatch.runs.model_card import METADATA, ModelCard, decode_card, require_card
from megabatch.training.checkpoint.format import STATE, DamagedCheckpoint, entries, newest_good, read_description
from megabatch.training.checkpoint.state import MODEL, model_state


class SavedWeights(Struct, frozen=True):
    path: Path
    card: ModelCard

    @property
    def prefix(self) -> str:
        """Before the names of the model's tensors."""
        return MODEL if self.path.name == STATE else ""

    def layout(self) -> dict[str, Entry]:
        """Dtypes and shapes of the model's tensors, by their names; none is read, and the file can be."""
        try:
            tensors = read_header(self.path).tensors
        except (OSError, NotTensors) as error:
            raise UserError(f"{self.path} is not a safetensors file ({error}); copy it again") from None
        return {
            name.removeprefix(self.prefix): entry for name, entry in tensors.items() if name.startswith(self.prefix)
        }

    def read(self) -> dict[str, torch.Tensor]:
        """The model's state dict."""
        try:
            tensors = load_file(self.path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.path} cannot be read ({error}); copy it again") from None
        return model_state(tensors) if self.path.name == STATE else tensors


def find_weights(run: Path, checkpoint: str | None = None) -> SavedWeights:
    """Of a run's folder: the final model, or `best`, `last` or `step-00000390`.  A file is taken as it is."""
    if run.is_file():
        return SavedWeights(run, card_of_file(run))
    if checkpoint is None and (run / WEIGHTS).is_file():
        return SavedWeights(run / WEIGHTS, card_of_file(run / WEIGHTS))
    if checkpoint and checkpoint != Path(checkpoint).name:
        raise UserError(f"checkpoint {checkpoint!r} is not a name; give best, last or step-...")
    folder = run / CHECKPOINTS / checkpoint if checkpoint else newest_good(run, report=lambda damage: None)
    if folder is None or not folder.is_dir():
        there = [path.name for path in entries(run / CHECKPOINTS) if not path.name.startswith(".")]
        raise UserError(
            f"{run} has no {f'checkpoint {checkpoint!r}' if checkpoint else 'model and no checkpoint yet'}; "
            + (f"there are {', '.join(there)}" if there else "train it first")
        )
    try:
        card = read_description(folder).card
    except DamagedCheckpoint as error:
        raise UserError(f"{error}; give another checkpoint") from None
    return SavedWeights(folder / STATE, require_card(card, str(folder)))


def card_of_file(path: Path) -> ModelCard:
    """From the metadata of a safetensors file: no tensor is read."""
    try:
        metadata = read_header(path).metadata
    except (OSError, NotTensors) as error:
        raise UserError(f"{path} is not a safetensors file ({error}); give a run's folder, or its {WEIGHTS}") from None
    if METADATA not in metadata:
        raise UserError(f"{path} does not say what belongs to its model: no run of this version has written it")
    return decode_card(metadata[METADATA], str(path))
