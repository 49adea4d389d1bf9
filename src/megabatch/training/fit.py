"""megabatch.fit: train a custom network on custom images, from Python."""

import copy
import hashlib
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, Dataset

from megabatch.config.loading import load_config, print_to_stderr, silent
from megabatch.config.reference_results import require_known
from megabatch.data.catalog import FROM_PYTHON, load_data_set, split
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.images import DataSet, ImageSet, ImageSubset
from megabatch.data.settings import DataSettings
from megabatch.data.sources.from_python import as_image_set, number_label_sets
from megabatch.data.sources.labels import require_names, warn_of_names
from megabatch.errors import NotSaved, UserError
from megabatch.models.loss import SummedLoss, wrap_user_loss
from megabatch.optim.optimizers import MakeOptimizer
from megabatch.ranks.machine import usable_cores
from megabatch.ranks.signals import StopRequest
from megabatch.ranks.world import current_rank
from megabatch.runs.records import EvaluationRecord, Record, StepRecord, Summary
from megabatch.text import expand_home
from megabatch.training.build import Overrides
from megabatch.training.checkpoint.state import result_of
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
    train: Images | str | Path,
    test: Images | float | None = None,
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
    """Train `model` with a recipe and return the run's summary.

    `fit` uses the ranks that exist and never starts any. Under torchrun, srun, mpiexec or another launcher that sets
    RANK, WORLD_SIZE and MASTER_ADDR, call it on every rank with the same arguments; the weights are taken from rank 0.
    On return, `model` has the trained weights, in its original dtype and on its original device.

    Args:
        model: A network that maps images [B, C, H, W] to logits.
        train: The training images, as one of

            - a pair of uint8 images ([N, C, H, W], [N, H, W, C] with 1 or 3 channels, or [N, H, W]) and integer labels
              from 0, as tensors or numpy arrays; if an image may have several labels, the labels are [N, classes] of 0
              and 1, and the recipe's loss must be bce;
            - a torch Dataset of (PIL image or uint8 array, label) with `__getitem__` and `__len__`, or a DataLoader,
              of which only the dataset is used;
            - a custom `ImageSet`;
            - the path of a folder with a folder of images per class, or another `data.source`. The images are decoded
              to the recipe's `data.image_size`.
        test: The test images, in the same forms. A share, such as 0.1, holds out that share of each class of `train`.
            With a path, None uses the source's test images, or holds out a tenth if there are none.
        recipe: The name of a recipe, or the path of a TOML file. Its model section and the source and size of images
            are ignored; its crops, flips, other augmentation and test views apply.
        overrides: Settings that replace those of the recipe, such as "batch.global=256".
        class_names: A name for each label; by default "0", "1", ...
        resume: "auto" resumes an unfinished run of the same recipe, "never" starts a new run, and a path resumes that
            run or checkpoint.
        strict: Raise an error, instead of a warning, for settings that are not known to converge.
        retune: Choose again how a resumed run all-reduces its gradients.
        loss: A function of (logits, labels) that returns the SUM over the samples as a tensor with one element, such
            as a torch loss with reduction="sum"; the sum is divided by the global batch. Logits are fp32 or wider. The
            default is the recipe's cross-entropy.
        optimizer: A function of (parameter groups, the recipe's `optim` section) that returns a
            torch.optim.Optimizer. The schedule sets its learning rate before every step.
        on_step: Called on rank 0 with each step's record after it was written. An exception ends the run.
        on_evaluation: Called on rank 0 with each evaluation's record after it was written. An exception ends the run.

    Returns:
        The summary of the run, as in its summary.json.

    Raises:
        UserError: A setting, an image or a label is invalid; or a loss or gradient is not finite.
        NotSaved: The result could not be written. `model` still has the trained weights.
        KeyboardInterrupt: SIGINT arrived; the run stopped after a step and saved a checkpoint.
        SystemExit: SIGTERM or `run.preempt_signal` arrived; the run stopped after a step and saved a checkpoint.

    Examples:
        >>> images = torch.randint(0, 256, (64, 1, 8, 8), dtype=torch.uint8)
        >>> labels = torch.arange(64) % 4
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
        >>> settings = ["batch.global=16", "batch.micro=16", "train.epochs=2", "run.dir=runs/docstring"]
        >>> summary = megabatch.fit(network, (images, labels), (images, labels), overrides=settings)
        megabatch ...
        >>> summary.steps
        8
    """
    info = current_rank()
    report = silent if info.rank else print_to_stderr
    found = images_at(train, test, recipe, overrides) if isinstance(train, str | Path) else None
    if found:
        train_images, test_images, label_sets = found.train, found.test, found.label_sets
        class_names = class_names or found.class_names
    else:
        pair = pair_of(as_image_set(train, "train", report), test, report)
        (train_images, test_images), label_sets = number_label_sets(pair)
    if label_sets is None:
        num_classes = 1 + int(max(train_images.labels.max(), test_images.labels.max()))
    else:
        num_classes = label_sets.shape[1]
    names = require_names(list(class_names or map(str, range(num_classes))), "class_names")
    if len(names) < num_classes:
        raise UserError(
            f"there is a label {num_classes - 1} but only {len(names)} class_names; give a name for every label"
        )
    if label_sets is not None and len(names) > num_classes:
        raise UserError(f"labels are [N, {num_classes}], but there are {len(names)} class_names; give {num_classes}")
    channels, size = channels_and_size(train_images)
    test_channels, test_size = channels_and_size(test_images)
    if test_channels != channels:
        raise UserError(f"train has {channels} channels and test has {test_channels}; convert them to the same number")
    network = type(model)
    config = load_config(
        recipe,
        [
            f"model.name={network.__module__}:{network.__qualname__}",
            "model.options={}",
            f"data.source={FROM_PYTHON}{digest(model, [train_images, test_images], label_sets, [loss, optimizer])}",
            f"data.multi_label={'false' if label_sets is None else 'true'}",
            f"data.image_size={size}",
            "data.sizes=[]",
            f"data.test_image_size={test_size}",
            *overrides,
        ],
        report=report,
    )
    if (config.data.image_size, config.data.test_side) != (size, test_size):
        raise UserError(
            f"data.image_size={config.data.image_size} and data.test_image_size={config.data.test_side}: the given "
            f"images have {size} and {test_size} pixels; resize them, and leave these settings out"
        )
    if config.data.multi_label != (label_sets is not None):
        raise UserError(
            f"data.multi_label={str(config.data.multi_label).lower()} does not fit the labels of train; omit it: rows "
            "of 0 and 1 have several labels per image, and class numbers one"
        )
    if loss and config.loss.class_weights is not None:
        raise UserError("loss.class_weights has no effect on fit(loss=...); omit it, and weight classes in the loss")
    if strict:
        require_known(config, len(train_images))
    warnings, tested_on = (found.warnings, found.tested_on) if found else (warn_of_names(names, "train"), "")
    data = DataSet(train_images, test_images, names, channels, label_sets, tested_on, warnings)
    with (
        StopRequest(signal.Signals[config.run.preempt_signal]) as stop,
        prepare(
            config,
            info,
            data=data,
            # A copy, because training changes its device, dtype and forward.
            overrides=Overrides(copy_model(model), wrap_user_loss(loss) if loss else None, optimizer),
            stop_requested=stop.received,
            resume=expand_home(resume),
            retune=retune,
        ) as ready,
        ready.training.world.rank_0_leaves_first(),
    ):
        observe = partial(call_back, on_step, on_evaluation)
        try:
            summary = train_and_record(ready.config, ready.start, ready.training, observe=observe)
        except NotSaved:  # the caller keeps the weights at least
            model.load_state_dict(result_of(ready.training))
            raise
        model.load_state_dict(result_of(ready.training))
    if summary.status == "stopped":  # the checkpoint is written: exit as the signal would have
        raise KeyboardInterrupt if stop.number == signal.SIGINT else SystemExit(stop.exit_code())
    return summary


def images_at(source: str | Path, test: object, recipe: str, overrides: Sequence[str]) -> DataSet:
    """Load a folder or another source, with the test images that it has or a held-out share."""
    if test is not None and not isinstance(test, float):
        raise UserError(
            f"train={str(source)!r} is a path and test is of type {type(test).__name__}; "
            "give the share to hold out, such as test=0.1, or leave test out"
        )
    share = "auto" if test is None else require_share(test)
    given = [f"data.source={source}", f"data.validation={share}", *overrides]
    config = load_config(recipe, given, report=silent)
    return load_data_set(config.data, config.run.decode_threads or len(usable_cores()))


def pair_of(train: ImageSet, test: Any, report: Callable[[str], None]) -> tuple[ImageSet, ImageSet]:
    """Return training and test images; `test` may be the share of the training images to hold out."""
    if test is None:
        raise UserError("test is missing; give test images, or the share to hold out, such as test=0.1")
    if not isinstance(test, float):
        return train, as_image_set(test, "test", report)
    settings = DataSettings(source="train", image_size=1)
    labels = train.labels if train.labels.ndim == 1 else torch.zeros(len(train), dtype=torch.int64)  # one stratum
    names = tuple(map(str, range(1 + int(labels.max()))))
    remaining, held_out = split(settings, require_share(test), labels.numpy(), names, "train")
    return ImageSubset(train, remaining), ImageSubset(train, held_out)


def require_share(test: float) -> float:
    if not 0 < test < 1:
        raise UserError(f"test={test:g}: a held-out share is above 0 and below 1; for example test=0.1")
    return test


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
        return 3, images.side
    _, channels, _, size = images.read(np.zeros(1, np.int64)).shape
    return channels, size


def copy_model(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:  # such as from torch.nn.utils.weight_norm
        raise UserError(
            f"{type(model).__name__} cannot be copied ({error}); use torch.nn.utils.parametrizations instead"
        ) from error


def digest(
    model: nn.Module, sets: Sequence[ImageSet], label_sets: torch.Tensor | None, functions: Sequence[object]
) -> str:
    """Return a fingerprint of the network, images and functions, so that only a run with the same ones is resumed."""
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    content = hashlib.sha256(str(shapes).encode())
    if label_sets is not None:
        content.update(label_sets.numpy().tobytes())
    for images in sets:
        content.update(images.labels.numpy().tobytes())
        if isinstance(images, EncodedImages):
            content.update(images.fingerprint().encode())
        else:
            first, again = (images.read(np.arange(min(16, len(images)))) for _ in range(2))
            if torch.equal(first, again):  # a Dataset with random augmentation returns other pixels each time
                content.update(first.numpy().tobytes())
    for function in functions:
        if function is not None:
            named = function if hasattr(function, "__qualname__") else type(function)
            content.update(f"{named.__module__}:{named.__qualname__}".encode())
    return content.hexdigest()[:16]
