"""Check the tensors of a checkpoint against the training, before any of them is loaded.

The layout of the model's tensors and of the loss scale is known exactly.  Optimizers create their state in the first
step, so it is checked by the conventions of torch's optimizers.  The state of a user-defined optimizer may have any
layout, but must belong to existing parameters.  A checksum does not replace these checks: it comes with the file.
"""

from collections.abc import Iterator, Mapping

import torch

from megabatch.io.tensor_header import Entry
from megabatch.optim.lamb import LAMB
from megabatch.optim.lars import BUFFER, LARS
from megabatch.optim.muon import Muon
from megabatch.optim.optimizers import DecoupledSGD, parts_of
from megabatch.runs.totals import RunTotals
from megabatch.training.checkpoint.format import NAMES
from megabatch.training.checkpoint.save import is_finite
from megabatch.training.checkpoint.state import LOSS_SCALE, NUMBER, OPTIMIZER, named_parameters, split_name
from megabatch.training.checkpoint.state import training_state as state_of
from megabatch.training.parts import Training

# State of torch's optimizers that has the shape and the dtype of its parameter.
ELEMENTWISE = {
    BUFFER,
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta", "ax", "sum", "prev"),
}
STEP = "step"  # the counter of torch's optimizers
NUMBERS = {("I64", ()), ("F64", ()), ("BOOL", ()), ("F32", (0,))}  # results of `number_to_tensor`

Tensors = Mapping[str, Entry]
Problems = Iterator[str]


def layout_problems(found: Tensors, training: Training, totals: RunTotals) -> Problems:
    """Yield the problems with the names, dtypes and shapes in a file's header."""
    expected = state_of(training)
    fixed = {name: tensor for name, tensor in expected.items() if not name.startswith((OPTIMIZER, NUMBER))}
    yield from differences(found, fixed)
    parameters = dict(named_parameters(training.optimizer))
    of_optimizer = [name for name in found if name not in fixed]
    for name in of_optimizer:
        yield from optimizer_problems(name, found, parameters, training.optimizer)
    yield from missing_state(of_optimizer, expected, training, totals)


def differences(found: Tensors, expected: Mapping[str, torch.Tensor]) -> Problems:
    """Yield the expected tensors that are missing or have another dtype or shape."""
    for name, tensor in expected.items():
        wanted = f"{NAMES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}"
        if name not in found:
            yield f"{name} ({wanted}) is missing"
        elif str(found[name]) != wanted:
            yield f"{name} is {found[name]}, expected {wanted}"


def optimizer_problems(
    name: str, found: Tensors, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> Problems:
    parameter_name, key = split_name(name)
    parameter, entry = parameters.get(parameter_name), found[name]
    if not name.startswith((OPTIMIZER, NUMBER)) or parameter is None or not key:
        yield f"{name} ({entry}) does not belong to this model or optimizer"
    elif name.startswith(NUMBER):
        if (entry.dtype, tuple(entry.shape)) not in NUMBERS:
            yield f"{name} is {entry}, expected a number"
        if f"{OPTIMIZER}{parameter_name}.{key}" in found:
            yield f"{name} is stored both as a number and as a tensor"
    elif is_conventional(optimizer) and key in ELEMENTWISE:
        yield from differences(found, {name: torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")})
    elif is_conventional(optimizer) and key == STEP and entry.shape:
        yield f"{name} is {entry}, expected a number"


def is_conventional(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for optimizers of torch and ours, whose keys are known.  Subclasses may change their meaning."""
    return all(
        type(part) in (LARS, LAMB, Muon, DecoupledSGD) or type(part).__module__.startswith("torch.optim.")
        for part in parts_of(optimizer)
    )


def missing_state(
    of_optimizer: list[str], expected: Mapping[str, object], training: Training, totals: RunTotals
) -> Problems:
    """Yield missing state: a key of one parameter must exist for all, and momentum must exist after an update."""
    optimizer = training.optimizer
    if not is_conventional(optimizer):
        return
    has_updated, found = totals.steps > totals.skipped_steps, set(of_optimizer)
    pairs = [split_name(name) for name in (*of_optimizer, *expected)]
    for part in parts_of(optimizer):
        names = [name for name, _ in named_parameters(part)]
        keys = {key for name, key in pairs if key in ELEMENTWISE and name in set(names)}
        if has_updated and part.defaults.get("momentum") and isinstance(part, LARS):
            keys.add(BUFFER)
        for key in sorted(keys):
            for name in names:
                if not found & {f"{OPTIMIZER}{name}.{key}", f"{NUMBER}{name}.{key}"}:
                    yield f"{OPTIMIZER}{name}.{key} is missing"


def value_problems(state: Mapping[str, torch.Tensor], training: Training, totals: RunTotals) -> Problems:
    """Yield the problems with the values of tensors whose layout is correct.  Saved tensors have no inf or NaN."""
    problem = training.loss_scale.problem_with(state[LOSS_SCALE], totals.steps)
    if problem:
        yield f"{LOSS_SCALE} {problem}"
    counts_steps = is_conventional(training.optimizer)
    for name, tensor in state.items():
        if name.startswith(NUMBER):  # any value is allowed
            continue
        yield from bad_values(name, tensor)
        if counts_steps and name.startswith(OPTIMIZER) and split_name(name)[1] == STEP:
            count = tensor.item()
            if not 0 <= count <= totals.steps or count != int(count):
                yield f"{name} is {count:g}, expected a count up to {totals.steps}"


def bad_values(name: str, tensor: torch.Tensor) -> Problems:
    if not is_finite(tensor):
        yield f"{name} has inf or NaN"
    if tensor.dtype is torch.bool and tensor.numel() and tensor.view(torch.uint8).max() > 1:
        yield f"{name} has a boolean that is neither 0 nor 1"


def totals_problems(totals: RunTotals, training: Training) -> Problems:
    plan = training.plan
    if totals.global_batch != plan.global_batch:
        yield f"its global batch is {totals.global_batch}, expected {plan.global_batch}"
    if totals.steps > plan.num_steps:
        yield f"it is for step {totals.steps:,}, but the run has {plan.num_steps:,} steps"
