import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megabatch_lab.chaos.judge import differences
from safetensors.torch import load_file, save_file

STEP = {"kind": "step", "step": 1, "loss": 0.5, "lr": 0.1, "images_per_s": 100.0, "data_wait_s": 0.1, "straggler": 1}
EVALUATION = {"kind": "evaluation", "step": 1, "top1": 0.25, "class_top1": [0.5, None], "resident_mb": 300.0}
SUMMARY = {"status": "finished", "steps": 1, "top1": 0.25, "wall_s": 3.0}
STATE = "checkpoints/last/state.safetensors"


def make_run(folder: Path) -> Path:
    (folder / STATE).parent.mkdir(parents=True)
    weights = {"w": torch.tensor([[1.0, -0.0], [float("nan"), 3.0]]), "b": torch.tensor([7], dtype=torch.int64)}
    save_file(weights, folder / "model.safetensors")
    save_file(weights | {"momentum": torch.ones(3)}, folder / STATE)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (STEP, EVALUATION)))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return make_run(tmp_path / "expected"), make_run(tmp_path / "found")


def change_tensor(name: str, tensor: str, place: int) -> Callable[[Path], None]:
    """Flip the last bit of one byte."""

    def change(run: Path) -> None:
        tensors = load_file(run / name)
        tensors[tensor].view(torch.uint8).flatten()[place] ^= 1
        save_file(tensors, run / name)

    return change


def change_row(number: int, **fields: object) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows[number] |= fields
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return change


def cut(name: str, num_bytes: int) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).write_bytes((run / name).read_bytes()[:-num_bytes])

    return change


def test_runs_that_differ_only_in_times_have_no_difference(runs: tuple[Path, Path]) -> None:
    assert differences(*runs) == []
    change_row(0, images_per_s=7.0, data_wait_s=9.9, straggler=0, data_wait={"read": 1.0}, times={"data": 1.0})(runs[1])
    change_row(1, resident_mb=1.0)(runs[1])
    (runs[1] / "summary.json").write_text(json.dumps(SUMMARY | {"wall_s": 99.0}))
    assert differences(*runs) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_tensor("model.safetensors", "w", 12), "model.safetensors: 1 of 2 tensors differ, first w"),
        (change_tensor("model.safetensors", "w", 7), "model.safetensors: 1 of 2 tensors differ, first w"),  # -0.0
        (change_tensor(STATE, "momentum", 0), "state.safetensors: 1 of 3 tensors differ, first momentum"),
        (cut("model.safetensors", 1), "model.safetensors cannot be read (w is truncated)"),
        (lambda run: (run / STATE).unlink(), "state.safetensors cannot be read"),
        (change_row(0, loss=0.5000000000000001), "row 1: loss is 0.5000000000000001; undisturbed: 0.5"),
        (change_row(1, class_top1=[0.5, 0.0]), "row 2: class_top1"),
        (change_row(1, future_field=3), "row 2: future_field is 3; undisturbed: None"),
        (change_row(0, straggler_delay_s=1.0, step=2), "row 1: step is 2"),
        (cut("metrics.jsonl", len(json.dumps(EVALUATION)) + 1), "has 1 rows; undisturbed: 2"),
        (cut("metrics.jsonl", 9), "metrics.jsonl cannot be read"),
        (lambda run: shutil.copy(run / "metrics.jsonl", run / "summary.json"), "summary.json cannot be read"),
        (lambda run: (run / "summary.json").write_text('{"status": "stopped"}'), "status is stopped"),
    ],
)
def test_every_difference_is_found(runs: tuple[Path, Path], change: Callable[[Path], None], message: str) -> None:
    change(runs[1])
    found = differences(*runs)
    assert found and message in found[0], found
