"""megabatch.fit: one's own network and images, from Python, in the ranks that exist.  It never starts any."""

import copy
import hashlib
import signal
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from megabatch.config.loading import load_config, print_to_stderr, silent
from megabatch.data.encoded import EncodedImages
from megabatch.data.images import ArrayImages, DataSet, ImageSet
from megabatch.data.sources import FROM_PYTHON
from megabatch.errors import UserError
from megabatch.preflight.compare import require_known
from megabatch.ranks.signals import StopRequest
from megabatch.ranks.world import current_rank
from megabatch.runs.records import Summary
from megabatch.train.prepare import prepare
from megabatch.train.run import train_and_record

Images = ImageSet | tuple[torch.Tensor, torch.Tensor]


def fit(
    model: nn.Module,
    train: Images,
    test: Images,
    recipe: str = "fashion",
    overrides: Sequence[str] = (),
    class_names: Sequence[str] | None = None,
    resume: str = "auto",
    strict: bool = False,
    retune: bool = False,
) -> Summary:
    """Trains `model` (images [B, C, H, W] to logits) as `recipe` says, and returns the run's summary.

    `train` and `test` are pairs of uint8 images [N, C, H, W] and integer labels from 0, or `ImageSet`s of your own.
    The recipe's model and data sections do not count, but for crops and flips.  Under torchrun, srun or mpiexec
    call it on every rank, with the same arguments; the model's weights are taken from rank 0.  `strict` refuses what
    is not known to converge, of which there is otherwise a warning; `retune` chooses again how a resumed run
    all-reduces its gradients.
    """
    train_images, test_images = as_image_set(train, "train"), as_image_set(test, "test")
    num_classes = 1 + int(max(train_images.labels.max(), test_images.labels.max()))
    names = tuple(class_names or map(str, range(num_classes)))
    if len(names) < num_classes:
        raise UserError(f"there is a label {num_classes - 1} but only {len(names)} class_names; name them all")
    if isinstance(train_images, EncodedImages):
        channels, size = 3, train_images.settings.image_size
    else:
        _, channels, _, size = train_images.read(torch.zeros(1, dtype=torch.int64).numpy()).shape
    network = type(model)
    config = load_config(
        recipe,
        [
            f"model.name={network.__module__}:{network.__qualname__}",
            "model.options={}",
            f"data.source={FROM_PYTHON}{digest(model, train_images, test_images)}",
            f"data.image_size={size}",
            *overrides,
        ],
        report=silent if current_rank().rank else print_to_stderr,
    )
    if strict:
        require_known(config, len(train_images))
    data = DataSet(train_images, test_images, names, channels)
    with (
        StopRequest() as stop,
        prepare(
            config,
            current_rank(),
            data=data,
            network=copy_of(model),  # what becomes of it (its device, 16 bits, autocast) is not the caller's concern
            stop_requested=stop.received,
            resume=resume,
            retune=retune,
        ) as ready,
    ):
        summary = train_and_record(ready.config, resume, ready.training)
        model.load_state_dict(ready.training.master_weights.state_dict())
    if summary.status == "stopped":  # the checkpoint is written; now the signal does what it would have done
        raise KeyboardInterrupt if stop.number == signal.SIGINT else SystemExit(stop.exit_code())
    return summary


def copy_of(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:  # of torch.nn.utils.weight_norm, for one
        raise UserError(
            f"{type(model).__name__} cannot be copied ({error}); torch.nn.utils.parametrizations has what can be"
        ) from error


def digest(model: nn.Module, *sets: ImageSet) -> str:
    """Tells this network and these images from others, so that nobody else's run is resumed."""
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    content = hashlib.sha256(str(shapes).encode())
    for images in sets:
        content.update(images.labels.numpy().tobytes())
        if isinstance(images, EncodedImages):
            content.update(images.fingerprint().encode())
        else:
            content.update(images.read(np.arange(min(16, len(images)))).numpy().tobytes())
    return content.hexdigest()[:16]


def as_image_set(images: Images, name: str) -> ImageSet:
    if not isinstance(images, tuple):
        return images
    pixels, labels = images
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or not len(pixels) or labels.shape != (len(pixels),):
        raise UserError(
            f"{name}: images are {pixels.dtype} {list(pixels.shape)}, labels {list(labels.shape)}; "
            "expected uint8 [N, C, H, W] and [N]"
        )
    return ArrayImages(pixels, labels.long())
