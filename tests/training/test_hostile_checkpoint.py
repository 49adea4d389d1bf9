"""A checkpoint that does not match the training is reported, and the previous one is used.

Every altered file has a valid checksum, as a hostile writer would give it.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megabatch.data.catalog import load_data_set
from megabatch.optim.optimizers import MakeOptimizer, OptimSettings
from megabatch.ranks.world import World
from megabatch.runs.totals import RunTotals
from megabatch.training.build import Overrides
from megabatch.training.checkpoint.format import DESCRIPTION, STATE
from megabatch.training.checkpoint.resume import Start, read_start
from megabatch.training.checkpoint.save import Checkpoints
from megabatch.training.loop import train
from megabatch.training.prepare import ready_to_train
from tests.support.rank_pool import RankPool
from tests.support.small_runs import small_run

SHORT = ("precision.name=fp32", "batch.global=24", "train.epochs=1", "checkpoint.keep=9")
WEIGHT = "0.0.weight"
MODEL, MOMENTUM = f"model.{WEIGHT}", f"optimizer.{WEIGHT}.momentum_buffer"
Tensors = dict[str, torch.Tensor]


def adamw(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=settings.learning_rate)


OWN: dict[str, MakeOptimizer] = {"adamw": adamw}


def cast(name: str, dtype: torch.dtype) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def spoil(name: str, value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].view(-1)[:1].fill_(value)


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def scale(*state: float) -> Callable[[Tensors], object]:
    return put("loss_scale", torch.tensor(state, dtype=torch.float64))


TENSOR_LIES: dict[str, Callable[[Tensors], object]] = {
    f"{MODEL} is I8 [4, 3, 3, 3], expected F32 [4, 3, 3, 3]": cast(MODEL, torch.int8),
    f"{MODEL} is F16": cast(MODEL, torch.float16),
    f"{MODEL} is F32 [7], expected": put(MODEL, torch.zeros(7)),
    f"{MODEL} (F32 [4, 3, 3, 3]) is missing": without(MODEL),
    f"{MODEL} has inf or NaN": spoil(MODEL, torch.nan),
    f"{MOMENTUM} is I8": cast(MOMENTUM, torch.int8),
    f"{MOMENTUM} is F32 [7], expected": put(MOMENTUM, torch.zeros(7)),
    f"{MOMENTUM} is missing": without(MOMENTUM),
    f"{MOMENTUM} has inf or NaN": spoil(MOMENTUM, torch.inf),
    "model.new (F32 [3]) does not belong to this model": put("model.new", torch.zeros(3)),
    "junk (F32 [3]) does not belong to this model": put("junk", torch.zeros(3)),
    "optimizer.new.momentum_buffer (F32 [3]) does not belong to this model": put(
        "optimizer.new.momentum_buffer", torch.zeros(3)
    ),
    f"optimizer_number.{WEIGHT}.x is F32 [3], expected a number": put(f"optimizer_number.{WEIGHT}.x", torch.zeros(3)),
    "loss_scale (F64 [3]) is missing": without("loss_scale"),
    "loss_scale is F64 [2]": scale(1, 0),
    "loss_scale is nan": scale(torch.nan, 0, 0),
    "loss_scale is -1": scale(-1, 0, 0),
    "loss_scale counts -5 steps": scale(1, -5, 0),
    "loss_scale counts nan steps": scale(1, 0, torch.nan),
    "loss_scale counts 1e+30 steps": scale(1, 1e30, 0),
}
DESCRIPTION_LIES: dict[str, dict[str, Any]] = {
    "Expected `int` >= 1 - at `$.step`": {"step": -1},
    "its totals are for step 2, but it is for step 3": {"step": 3},
    "its description is for step 1": {"step": 1, "totals.steps": 1},
    "`$.totals.skipped_steps`": {"totals.skipped_steps": -1},
    "totals.skipped_steps=99": {"totals.skipped_steps": 99},
    "totals.best_step=99": {"totals.best_step": 99},
    "`$.totals.steps`": {"totals.steps": 10**30},
    "`$.totals.wall_s`": {"totals.wall_s": 1e300},
    "`$.totals.training_s`": {"totals.training_s": -1.0},
    "`$.totals.epoch`": {"totals.epoch": "x"},
    "its global batch is 25, expected 24": {"totals.global_batch": 25},
    "it is for step 99, but the run has 8": {"step": 99, "totals.steps": 99},
    "`$.tuning`": {"tuning": {}},
    "`$.checksum`": {"checksum": 5},
}


def saved(world: World, folder: str, optimizer: str = "", *overrides: str) -> Any:
    """Return a training whose steps 1 and 2 are saved."""
    config = small_run(*SHORT, *overrides)
    training = ready_to_train(config, load_data_set(config.data), world, Overrides(optimizer=OWN.get(optimizer)))
    checkpoints = Checkpoints(Path(folder), config.checkpoint, 0)
    totals = RunTotals(global_batch=24, target_top1=None)
    for record in train(training, first_step=0):
        totals.add(record, wall_s=1.0)
        checkpoints.save(training, totals)
        checkpoints.drain()
        if record.step == 2:
            break
    checkpoints.close()
    fresh = ready_to_train(config, load_data_set(config.data), world, Overrides(optimizer=OWN.get(optimizer)))
    return fresh


def rewrite(path: Path, lie: Callable[[Tensors], object], other: dict[str, Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path / STATE).items()}
    lie(tensors)
    save_file(tensors, path / STATE)
    description = json.loads((path / DESCRIPTION).read_text())
    description["checksum"] = hashlib.sha256((path / STATE).read_bytes()).hexdigest()
    for key, value in other.items():
        *parts, last = key.split(".")
        place = description
        for part in parts:
            place = place[part]
        place[last] = value
    (path / DESCRIPTION).write_text(json.dumps(description))


def taken(training: Any, folder: Path, path: Path) -> tuple[int, list[str]]:
    """Return the step of the checkpoint in use, and the reports on others."""
    reports: list[str] = []
    checkpoint = read_start(Start(folder, path), reports.append, training)
    assert checkpoint is not None
    return checkpoint.description.step, reports


def tell_lies(world: World, folder: str, optimizer: str, lies: list[str], overrides: list[str]) -> dict[str, Any]:
    run = Path(folder)
    training = saved(world, folder, optimizer, *overrides)
    before = {name: tensor.clone() for name, tensor in training.master_weights.state_dict().items()}
    path = run / "checkpoints/step-00000002"
    state, description = (path / STATE).read_bytes(), (path / DESCRIPTION).read_bytes()
    found: dict[str, Any] = {"honest": taken(training, run, path)}
    for lie in lies:
        target = path.with_name("step-00000099") if "for step 99" in lie else path
        path.rename(target)
        rewrite(target, ADAM_LIES.get(lie) or TENSOR_LIES.get(lie, len), DESCRIPTION_LIES.get(lie, {}))
        found[lie] = taken(training, run, target)
        target.rename(path)
        (path / STATE).write_bytes(state)
        (path / DESCRIPTION).write_bytes(description)
    after = training.master_weights.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())  # nothing changed
    return found


ADAM_LIES: dict[str, Callable[[Tensors], object]] = {
    "exp_avg is F32 [1], expected F32 [4, 3, 3, 3]": put(f"optimizer.{WEIGHT}.exp_avg", torch.zeros(1)),
    "exp_avg_sq is missing": without(f"optimizer.{WEIGHT}.exp_avg_sq"),
    "step is -1, expected a count up to 2": put(f"optimizer.{WEIGHT}.step", torch.tensor(-1.0)),
    "step is F32 [2], expected a number": put(f"optimizer.{WEIGHT}.step", torch.ones(2)),
}


@pytest.mark.parametrize(
    ("optimizer", "lies", "overrides"),
    [
        ("", [*TENSOR_LIES, *DESCRIPTION_LIES], []),
        ("", [f"{MOMENTUM} is missing", f"{MOMENTUM} is I8"], ["optim.name=lars", "precision.name=fp16"]),
        ("adamw", list(ADAM_LIES), []),
    ],
)
def test_a_mismatch_is_named_and_the_previous_checkpoint_is_used(
    ranks: RankPool, tmp_path: Path, optimizer: str, lies: list[str], overrides: list[str]
) -> None:
    found = ranks.run(tell_lies, str(tmp_path), optimizer, lies, overrides, num_ranks=1)[0]
    assert found.pop("honest") == (2, [])
    for lie, (step, reports) in found.items():
        assert step == 1, lie
        assert len(reports) == 1 and lie in reports[0] and "\n" not in reports[0], (lie, reports)
