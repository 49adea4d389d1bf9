"""megabatch.fit: one's own network and images, from Python, in the ranks that exist.  It never starts any."""

import copy
import hashlib
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, Dataset

from megabatch.config.loading import load_config, print_to_stderr, silent
from megabatch.config.reference_results import require_known
from megabatch.data.catalog import FROM_PYTHON
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.images import DataSet, ImageSet
from megabatch.data.sources.from_python import as_image_set
from megabatch.data.sources.labels import require_names, warn_of_names
from megabatch.errors import NotSaved, UserError
from megabatch.models.loss import SummedLoss, own_loss
from megabatch.optim.optimizers import MakeOptimizer
from megabatch.ranks.signals import StopRequest
from megabatch.ranks.world import current_rank
from megabatch.runs.records import EvaluationRecord, Record, StepRecord, Summary
from megabatch.training.build import Own
from megabatch.training.prepare import prepare
from megabatch.training.run import train_and_record

Images = (
    ImageSet
    | tuple[torch.Tensor | NDArray[Any], torch.Tensor | NDArray[Any] | Sequence[int]]
    | Dataset[Any]
    | DataLoader[Any]
)


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
    *,
    loss: SummedLoss | None = None,
    optimizer: MakeOptimizer | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    on_evaluation: Callable[[EvaluationRecord], None] | None = None,
) -> Summary:
    """Trains `model` (images [B, C, H, W] to logits) as `recipe` says, and returns the run's summary.

    `train` and `test` are each one of
      - a pair of uint8 images ([N, C, H, W], [N, H, W, C] with 1 or 3 channels, or [N, H, W]) and integer labels from
        0, as tensors or numpy arrays;
      - a torch Dataset of (PIL image or uint8 array, label) that has `__getitem__` and `__len__`, or a DataLoader of
        one, of which the dataset alone is used;
      - an `ImageSet` of your own.

    `loss(logits, labels)` returns the SUM over the samples, a tensor of one number, which is divided by the global
    batch (of torch's, reduction="sum"); logits are fp32 or wider.  By default it is the recipe's cross-entropy.
    `optimizer(groups, settings)` returns a torch.optim.Optimizer of parameter groups such as torch's take, and of the
    recipe's `optim` section; its learning rate is set before every step, as the schedule says.  `on_step(record)` and
    `on_evaluation(record)` are called on rank 0, after the record was written; what they raise ends the run.

    The recipe's model and data sections do not count, but for crops and flips.  Under torchrun, srun, mpiexec or
    another launcher that sets RANK, WORLD_SIZE and MASTER_ADDR, call it on every rank, with the same arguments; the
    model's weights are taken from rank 0.  `strict` refuses what is not known to converge, of which there is otherwise
    a warning; `retune` chooses again how a resumed run all-reduces its gradients.
    """
    info = current_rank()
    report = silent if info.rank else print_to_stderr
    train_images, test_images = as_image_set(train, "train", report), as_image_set(test, "test", report)
    num_classes = 1 + int(max(train_images.labels.max(), test_images.labels.max()))
    names = require_names(list(class_names or map(str, range(num_classes))), "class_names")
    if len(names) < num_classes:
        raise UserError(f"there is a label {num_classes - 1} but only {len(names)} class_names; name them all")
    channels, size = channels_and_size(train_images)
    if channels_and_size(test_images)[0] != channels:
        raise UserError(
            f"train has {channels} channels and test has {channels_and_size(test_images)[0]}; they must be alike"
        )
    network = type(model)
    config = load_config(
        recipe,
        [
            f"model.name={network.__module__}:{network.__qualname__}",
            "model.options={}",
            f"data.source={FROM_PYTHON}{digest(model, [train_images, test_images], [loss, optimizer])}",
            f"data.image_size={size}",
            *overrides,
        ],
        report=report,
    )
    if strict:
        require_known(config, len(train_images))
    data = DataSet(train_images, test_images, names, channels, warnings=warn_of_names(names, "train"))
    with (
        StopRequest(signal.Signals[config.run.preempt_signal]) as stop,
        prepare(
            config,
            info,
            data=data,
            # A copy: what becomes of it (its device, 16 bits, autocast) is not the caller's concern.
            own=Own(copy_of(model), own_loss(loss) if loss else None, optimizer),
            stop_requested=stop.received,
            resume=resume,
            retune=retune,
        ) as ready,
        ready.training.world.rank_0_leaves_first(),
    ):
        observe = partial(call_back, on_step, on_evaluation)
        try:
            summary = train_and_record(ready.config, resume, ready.training, observe=observe)
        except NotSaved:  # then the caller has them at least
            model.load_state_dict(ready.training.master_weights.state_dict())
            raise
        model.load_state_dict(ready.training.master_weights.state_dict())
    if summary.status == "stopped":  # the checkpoint is written; now the signal does what it would have done
        raise KeyboardInterrupt if stop.number == signal.SIGINT else SystemExit(stop.exit_code())
    return summary


def call_back(
    on_step: Callable[[StepRecord], None] | None,
    on_evaluation: Callable[[EvaluationRecord], None] | None,
    record: Record,
) -> None:
    if isinstance(record, StepRecord):
        if on_step:
            on_step(record)
    elif on_evaluation:
        on_evaluation(record)


def channels_and_size(images: ImageSet) -> tuple[int, int]:
    if isinstance(images, EncodedImages):
        return 3, images.settings.image_size
    _, channels, _, size = images.read(np.zeros(1, np.int64)).shape
    return channels, size


def copy_of(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:  # of torch.nn.utils.weight_norm, for one
        raise UserError(
            f"{type(model).__name__} cannot be copied ({error}); torch.nn.utils.parametrizations has what can be"
        ) from error


def digest(model: nn.Module, sets: Sequence[ImageSet], functions: Sequence[object]) -> str:
    """Tells this network, these images and functions from others, so that nobody else's run is resumed."""
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    content = hashlib.sha256(str(shapes).encode())
    for images in sets:
        content.update(images.labels.numpy().tobytes())
        if isinstance(images, EncodedImages):
            content.update(images.fingerprint().encode())
        else:
            first, again = (images.read(np.arange(min(16, len(images)))) for _ in range(2))
            if torch.equal(first, again):  # a Dataset may change its images at random: then they tell nothing
                content.update(first.numpy().tobytes())
    for function in functions:
        if function is not None:
            named = function if hasattr(function, "__qualname__") else type(function)
            content.update(f"{named.__module__}:{named.__qualname__}".encode())
    return content.hexdigest()[:16]
