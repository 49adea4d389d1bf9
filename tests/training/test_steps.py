"""A run whose length is given in steps, and its output."""

import contextlib
import io
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from megabatch.data.catalog import load_data_set
from megabatch.ranks.world import World
from megabatch.runs.records import Summary
from megabatch.training.checkpoint.resume import decide_start
from megabatch.training.prepare import ready_to_train
from megabatch.training.run import train_and_record
from tests.support.rank_pool import RankPool
from tests.support.small_runs import small_run


def record(world: World, folder: str, *overrides: str) -> tuple[Summary, str]:
    """Return the summary and the screen output."""
    config = small_run(*overrides, f"run.dir={folder}")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        summary = train_and_record(
            config, decide_start(config, "auto", world), ready_to_train(config, load_data_set(config.data), world)
        )
    return summary, said.getvalue()


def test_a_run_ends_after_its_steps_with_the_weights_of_the_same_run_in_epochs(ranks: RankPool, tmp_path: Path) -> None:
    """Use fp16, which gives a warning on a CPU."""
    precision = "precision.name=fp16"
    summary, said = ranks.run(record, str(tmp_path / "steps"), "train.steps=3", precision, num_ranks=1)[0]
    assert (summary.status, summary.steps) == ("finished", 3) and summary.top1 is not None
    assert re.search(r"steps +3 in 0.48 epochs \(warm-up shortened to 0.04\)", said)
    assert said.count("warning   precision.name=fp16 computes in fp16") == 1
    assert "time" in said and "3 of 3 steps" in said
    by_epochs = ["train.epochs=0.48", "schedule.warmup_epochs=0.04", "precision.name=fp16"]
    ranks.run(record, str(tmp_path / "epochs"), *by_epochs, num_ranks=1)
    steps, epochs = (load_file(tmp_path / name / "model.safetensors") for name in ("steps", "epochs"))
    assert steps.keys() == epochs.keys() and all(torch.equal(steps[name], epochs[name]) for name in steps)
    assert (tmp_path / "steps/config.toml").read_text().count("steps = 3\n") == 1


def test_a_run_in_epochs_writes_no_steps_to_its_config(ranks: RankPool, tmp_path: Path) -> None:
    _, said = ranks.run(record, str(tmp_path), "train.epochs=0.48", "schedule.warmup_epochs=0", num_ranks=1)[0]
    config = (tmp_path / "config.toml").read_text()
    assert "[train]\nepochs = 0.48\ntarget_top1 = 0.88\nevaluate_every = 1\n" in config
    assert "steps     3 in 0.48 epochs, sgd" in said and "fp16" not in said
