"""Load the weights and the model card of a run: of its final model or of a checkpoint."""

from pathlib import Path

import torch
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file

from megabatch.errors import UserError
from megabatch.io.tensor_header import Entry, NotTensors, read_header
from megabatch.runs.files import CHECKPOINTS, WEIGHTS
from megabatch.runs.model_card import METADATA, ModelCard, decode_card, require_card
from megabatch.training.checkpoint.format import STATE, DamagedCheckpoint, entries, newest_valid, read_description
from megabatch.training.checkpoint.state import AVERAGE, MODEL, model_state


class SavedWeights(Struct, frozen=True):
    """A file of weights and its model card.  Nothing is read until `layout` or `read` is called."""

    path: Path
    card: ModelCard

    @property
    def prefix(self) -> str:
        """Prefix of the names of the model's tensors."""
        return MODEL if self.path.name == STATE else ""

    def layout(self) -> dict[str, Entry]:
        """Return the dtypes and shapes of the model's tensors by name.  Checks the header, and reads no tensor."""
        try:
            tensors = read_header(self.path).tensors
        except (OSError, NotTensors) as error:
            raise UserError(f"{self.path} is not a safetensors file ({error}); copy it again") from None
        return {
            name.removeprefix(self.prefix): entry for name, entry in tensors.items() if name.startswith(self.prefix)
        }

    def read(self) -> dict[str, torch.Tensor]:
        """Return the model's state dict, with averages if the run has them."""
        try:
            tensors = load_file(self.path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.path} cannot be read ({error}); copy it again") from None
        return model_state(tensors) | model_state(tensors, AVERAGE) if self.path.name == STATE else tensors


def find_weights(run: Path, checkpoint: str | None = None) -> SavedWeights:
    """Find the weights of a run.

    Args:
        run: a run's folder or a file of weights.
        checkpoint: `best`, `last` or `step-00000390`.  None: the final model, or else the newest checkpoint.
    """
    if run.is_file():
        return SavedWeights(run, read_card_metadata(run))
    if checkpoint is None and (run / WEIGHTS).is_file():
        return SavedWeights(run / WEIGHTS, read_card_metadata(run / WEIGHTS))
    if not run.exists():
        raise UserError(f"{run} does not exist; give the folder of a run (megabatch runs lists them) or its weights")
    if checkpoint and checkpoint != Path(checkpoint).name:
        raise UserError(f"checkpoint {checkpoint!r} is a path, not a name; give best, last or step-...")
    folder = run / CHECKPOINTS / checkpoint if checkpoint else newest_valid(run, report=lambda damage: None)
    if folder is None or not folder.is_dir():
        names = [path.name for path in entries(run / CHECKPOINTS) if not path.name.startswith(".")]
        raise UserError(
            f"{run} has no {f'checkpoint {checkpoint!r}' if checkpoint else 'model and no checkpoint yet'}; "
            + (f"choose from {', '.join(names)}" if names else "train it first")
        )
    try:
        card = read_description(folder).card
    except DamagedCheckpoint as error:
        raise UserError(f"{error}; give another checkpoint") from None
    return SavedWeights(folder / STATE, require_card(card, str(folder)))


def read_card_metadata(path: Path) -> ModelCard:
    """Read the model card from the metadata of a safetensors file.  Reads no tensor."""
    try:
        metadata = read_header(path).metadata
    except (OSError, NotTensors) as error:
        raise UserError(f"{path} is not a safetensors file ({error}); give a run's folder, or its {WEIGHTS}") from None
    if METADATA not in metadata:
        raise UserError(f"{path} has no model card; give a {WEIGHTS} written by a run of this version")
    return decode_card(metadata[METADATA], str(path))
