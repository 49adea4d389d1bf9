"""Checkpoints: a training state, to the bit, on disk.

checkpoints/step-00000390/state.safetensors   weights (fp32), buffers, optimizer state, loss scale
            step-00000390/state.json          the step, the run's totals, and the checksum of the other file
            last -> step-00000390,  best -> step-00000351

There is little to keep, because position determines data: no generator, sampler or loader has a state.
A checkpoint is written under another name, synced and renamed, so that a kill leaves all of it or nothing.
All ranks hold the same state after every step, so rank 0 alone saves, and shares what it has loaded.  When it does so,
and what it keeps, is in `saves.py`.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct

from megabatch.disk import make_private, private, writing
from megabatch.errors import UserError
from megabatch.planning.tuning import Tuning
from megabatch.runs.files import CHECKPOINTS
from megabatch.runs.model_card import METADATA, ModelCard
from megabatch.runs.totals import RunTotals
from megabatch.train.card import with_results
from megabatch.train.compiled import is_compiled
from megabatch.train.loop import Training
from megabatch.train.tensor_file import read_flat, tensors_in, write_tensors

FORMAT = 2  # of a checkpoint; another one is refused
STATE, DESCRIPTION = "state.safetensors", "state.json"
MODEL, OPTIMIZER, LOSS_SCALE = "model.", "optimizer.", "loss_scale"
NUMBER = "optimizer_number."  # what an optimizer keeps as a Python number, or as None


class Description(Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    step: int
    computed_by: str  # see `describe_arithmetic`
    data: str = ""  # which images it was trained on
    tuning: Tuning | None = None  # how its gradients are all-reduced
    totals: RunTotals
    card: ModelCard | None = None  # what belongs to the weights
    checksum: str  # sha256 of the tensors' file


def describe_arithmetic(training: Training) -> str:
    """What else decides how sums are rounded: a resumed run is the same to the bit where this is the same."""
    threads = torch.get_num_threads()
    plans = training.gradients.plans
    choice = f" (choice {plans.tuning.rounding})" if plans.tuning else ""
    compiled = ", compiled" if is_compiled(training.network) else ""
    return f"{training.plan.num_ranks} ranks of {threads} threads, {plans.names}{choice}{compiled}"


def save_weights(training: Training, totals: RunTotals, path: Path) -> None:
    """The model alone, under the names of its state dict, and what belongs to it: what a run is for."""
    card = msgspec.json.encode(with_results(training.card, totals)).decode()
    with writing(path) as new:
        write_tensors(new, training.master_weights.state_dict(), {METADATA: card})


def training_state(training: Training) -> dict[str, torch.Tensor]:
    """Every tensor that the next step depends on, by name."""
    state = {f"{MODEL}{name}": tensor for name, tensor in training.master_weights.state_dict().items()}
    state[LOSS_SCALE] = training.loss_scale.state()
    for name, parameter in named_parameters(training.optimizer):
        for key, value in training.optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                state[f"{OPTIMIZER}{name}.{key}"] = value
            else:
                state[f"{NUMBER}{name}.{key}"] = number_to_tensor(value, key, training.optimizer)
    return state


def model_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The part of a `training_state` that is the model's state dict."""
    return {name.removeprefix(MODEL): tensor for name, tensor in state.items() if name.startswith(MODEL)}


def restore_training_state(training: Training, state: dict[str, torch.Tensor]) -> None:
    """The inverse of `training_state`."""
    training.master_weights.load_state_dict(model_state(state))
    training.loss_scale.restore(state[LOSS_SCALE])
    parameters = dict(named_parameters(training.optimizer))
    for name, tensor in state.items():
        if name.startswith((OPTIMIZER, NUMBER)):
            parameter_name, _, key = name.partition(".")[2].rpartition(".")
            parameter = parameters[parameter_name]
            of_parameter = training.optimizer.state[parameter]
            of_parameter[key] = tensor_to_number(tensor) if name.startswith(NUMBER) else placed(tensor, parameter)
    defaults = training.optimizer.defaults
    if not defaults.get("fused") and not defaults.get("capturable"):
        for of_parameter in training.optimizer.state.values():
            if isinstance(of_parameter.get("step"), torch.Tensor):
                of_parameter["step"] = of_parameter[
                    "step"
                ].cpu()  # where torch's optimizers count, beside weights on CUDA


def placed(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """In the parameter's memory order (channels_last), which fused kernels rely on; other shapes stay as they are."""
    if tensor.shape != parameter.shape:
        return tensor.clone()
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)


def number_to_tensor(value: Any, key: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    if value is None:
        return torch.empty(0)
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise UserError(
        f"{type(optimizer).__name__} keeps {key!r} of a parameter as a {type(value).__name__}; "
        "a checkpoint holds tensors and numbers, so keep it as one of them"
    )


def tensor_to_number(tensor: torch.Tensor) -> bool | int | float | None:
    """The inverse of `number_to_tensor`."""
    return tensor.item() if tensor.numel() else None


def named_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def describe(training: Training, totals: RunTotals) -> Description:
    """What is known before the tensors are written."""
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
    """All of it or nothing; its name.  One that is there has failed at what comes after it, and is whole."""
    name = f"step-{description.step:08d}"
    if (folder / name).exists():
        return name
    with writing(folder / name) as new:
        make_private(new)
        checksum = write_tensors(new / STATE, state)
        whole = msgspec.structs.replace(description, checksum=checksum)
        with open(new / DESCRIPTION, "xb", opener=private) as file:
            file.write(msgspec.json.encode(whole))
    return name


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in it."""
    return sorted(folder.glob("step-*"), reverse=True)


def newest_good(run_folder: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint of a run that is whole; damaged ones are reported and passed over."""
    for path in newest_first(run_folder / CHECKPOINTS):
        try:
            read_description(path)
            return path
        except DamagedCheckpoint as damage:
            report(str(damage))
    return None


class DamagedCheckpoint(Exception):
    pass


class Checkpoint(NamedTuple):
    path: Path
    description: Description
    state: dict[str, torch.Tensor]


def read_checkpoint(path: Path) -> Checkpoint:
    """All of it, in one pass over the file: its checksum is that of the bytes that are used."""
    try:
        description = decode_description(path)
        flat, found = read_flat(path / STATE)
    except (OSError, msgspec.MsgspecError) as error:
        raise DamagedCheckpoint(f"checkpoint {path} cannot be read ({error})") from error
    require_checksum(path, description, found)
    return Checkpoint(path, description, tensors_in(flat))


def read_description(path: Path) -> Description:
    """Checks a checkpoint, and says where in the run it stands."""
    try:
        description = decode_description(path)
        with (path / STATE).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, msgspec.MsgspecError) as error:
        raise DamagedCheckpoint(f"checkpoint {path} cannot be read ({error})") from error
    require_checksum(path, description, found)
    return description


def decode_description(path: Path) -> Description:
    content = (path / DESCRIPTION).read_bytes()
    require_format(content, path)
    return msgspec.json.decode(content, type=Description)


def require_checksum(path: Path, description: Description, found: str) -> None:
    if found != description.checksum:
        raise DamagedCheckpoint(f"checkpoint {path / STATE} is damaged: its checksum does not match")


def read_tuning(description: Path) -> Tuning | None:
    """How the run all-reduced its gradients, without a look at the tensors."""
    return msgspec.json.decode(description.read_bytes(), type=Description).tuning


def require_format(description: bytes, path: Path) -> None:
    found = msgspec.json.decode(description, type=dict[str, Any]).get("format", 1)
    if found != FORMAT:
        raise UserError(
            f"checkpoint {path} was written by another version of megabatch (format {found}, this one has {FORMAT}); "
            "finish the run with that version, or begin a new one in another folder (or with --resume never)"
        )


def step_of(path: Path) -> int:
    """By the checkpoint's name."""
    return int(path.name.rpartition("-")[2])


def read_state(path: Path) -> dict[str, torch.Tensor]:
    return tensors_in(read_flat(path / STATE)[0])


def what_is(name: str) -> str:
    """A tensor of a `training_state`, in a user's words."""
    part = next((part for part in (MODEL, OPTIMIZER) if name.startswith(part)), "")
    of = {MODEL: "the model's", OPTIMIZER: "the optimizer's"}.get(part, "the")
    return f"{of} {name.removeprefix(part)}"
