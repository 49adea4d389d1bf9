"""What the tensors of a checkpoint must be, before a training takes any of them.

The model's tensors and the loss scale are known to the byte.  An optimizer may have made its state in its first step:
then the conventions of torch's optimizers say what it looks like.  What a user's own optimizer keeps is its own affair,
as long as it keeps it of parameters that there are.  A checksum does not stand in for any of this: whoever writes the
file writes that too.
"""

from collections.abc import Iterator, Mapping

import torch

from megabatch.io.tensor_header import Entry
from megabatch.optim.lars import BUFFER, LARS
from megabatch.runs.totals import RunTotals
from megabatch.training.checkpoint.format import NAMES
from megabatch.training.checkpoint.save import is_finite
from megabatch.training.checkpoint.state import LOSS_SCALE, NUMBER, OPTIMIZER, named_parameters, split_name
from megabatch.training.checkpoint.state import training_state as state_of
from megabatch.training.parts import Training

# What torch's optimizers keep for every element of a parameter, in its dtype.
ELEMENTWISE = {
    BUFFER,
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta", "ax", "sum", "prev"),
}
STEP = "step"  # what they count in
NUMBERS = {("I64", ()), ("F64", ()), ("BOOL", ()), ("F32", (0,))}  # as `number_to_tensor` makes them

Tensors = Mapping[str, Entry]
Problems = Iterator[str]


def layout_problems(found: Tensors, training: Training, totals: RunTotals) -> Problems:
    """By the names, dtypes and shapes alone, which a file's header has."""
    expected = state_of(training)
    fixed = {name: tensor for name, tensor in expected.items() if not name.startswith((OPTIMIZER, NUMBER))}
    yield from differences(found, fixed)
    parameters = dict(named_parameters(training.optimizer))
    of_optimizer = [name for name in found if name not in fixed]
    for name in of_optimizer:
        yield from optimizer_problems(name, found, parameters, training.optimizer)
    yield from missing_state(of_optimizer, expected, training, totals)


def differences(found: Tensors, expected: Mapping[str, torch.Tensor]) -> Problems:
    """Of tensors that must all be there as expected."""
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
        yield f"{name} ({entry}) belongs to nothing that is trained here"
    elif name.startswith(NUMBER):
        if (entry.dtype, tuple(entry.shape)) not in NUMBERS:
            yield f"{name} is {entry}, expected a number"
        if f"{OPTIMIZER}{parameter_name}.{key}" in found:
            yield f"{name} is there as a tensor too"
    elif is_conventional(optimizer) and key in ELEMENTWISE:
        yield from differences(found, {name: torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")})
    elif is_conventional(optimizer) and key == STEP and entry.shape:
        yield f"{name} is {entry}, expected a number"


def is_conventional(optimizer: torch.optim.Optimizer) -> bool:
    """One of torch's or ours, and not derived from them: whose keys mean what they do there."""
    return type(optimizer) is LARS or type(optimizer).__module__.startswith("torch.optim.")


def missing_state(
    of_optimizer: list[str], expected: Mapping[str, object], training: Training, totals: RunTotals
) -> Problems:
    """What is kept of one parameter is kept of all; and with momentum there is some after the first update."""
    optimizer = training.optimizer
    if not is_conventional(optimizer):
        return
    names = [name for name, _ in named_parameters(optimizer)]
    keys = {key for name in (*of_optimizer, *expected) for _, key in [split_name(name)] if key in ELEMENTWISE}
    has_updated = totals.steps > totals.skipped_steps
    if has_updated and optimizer.defaults.get("momentum") and isinstance(optimizer, LARS):
        keys.add(BUFFER)
    there = set(of_optimizer)
    for key in sorted(keys):
        for name in names:
            if not there & {f"{OPTIMIZER}{name}.{key}", f"{NUMBER}{name}.{key}"}:
                yield f"{OPTIMIZER}{name}.{key} is missing"


def value_problems(state: Mapping[str, torch.Tensor], training: Training, totals: RunTotals) -> Problems:
    """Of tensors whose layout is as it must be.  A run saves nothing that is inf or NaN."""
    problem = training.loss_scale.problem_with(state[LOSS_SCALE], totals.steps)
    if problem:
        yield f"{LOSS_SCALE} {problem}"
    is_counted = is_conventional(training.optimizer)
    for name, tensor in state.items():
        if name.startswith(NUMBER):  # anything
            continue
        yield from bad_values(name, tensor)
        if is_counted and name.startswith(OPTIMIZER) and split_name(name)[1] == STEP:
            count = tensor.item()
            if not 0 <= count <= totals.steps or count != int(count):
                yield f"{name} is {count:g}, expected a count up to {totals.steps}"


def bad_values(name: str, tensor: torch.Tensor) -> Problems:
    if not is_finite(tensor):
        yield f"{name} has inf or NaN"
    if tensor.dtype is torch.bool and tensor.numel() and tensor.view(torch.uint8).max() > 1:
        yield f"{name} has what is neither true nor false"


def totals_problems(totals: RunTotals, training: Training) -> Problems:
    plan = training.plan
    if totals.global_batch != plan.global_batch:
        yield f"its global batch is {totals.global_batch}, expected {plan.global_batch}"
    if totals.steps > plan.num_steps:
        yield f"it is of step {totals.steps:,}, and the run has {plan.num_steps:,}"
