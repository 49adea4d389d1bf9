import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import megabatch
from megabatch.optim.optimizers import OptimSettings
from megabatch.ranks.world import World
from megabatch.runs.records import EvaluationRecord, StepRecord
from tests.support.rank_pool import RankPool


def fit_in(world: World, folder: str, precision: str) -> dict[str, Any]:
    """Run the example of docs/python.md on existing ranks."""
    labels = torch.arange(200) % 4
    images = (labels[:, None, None, None] * 60 + torch.randint(0, 20, (200, 1, 8, 8))).to(torch.uint8)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    summary = megabatch.fit(
        network,
        train=(images[:160], labels[:160]),
        test=(images[160:], labels[160:]),
        overrides=[
            "batch.global=24",
            "batch.micro=4",
            "train.epochs=6",
            "run.threads=1",
            f"run.dir={folder}",
            f"precision.name={precision}",
            "comm.timeline=true",
        ],
    )
    assert network[1].weight.dtype == torch.float32 and network(images[:2].float()).dtype == torch.float32
    weights = world.all_gather(network.get_parameter("1.weight").tolist())
    assert all(other == weights[0] for other in weights)
    return {"status": summary.status, "top1": summary.top1, "steps": summary.steps}


@pytest.mark.parametrize(
    ("num_ranks", "precision"), [(1, "fp32"), (2, "fp32"), (2, "fp16"), (2, "amp"), (1, "amp-bf16")]
)
def test_a_custom_network_and_images_train_on_existing_ranks(
    ranks: RankPool, num_ranks: int, precision: str, tmp_path: Path
) -> None:
    if num_ranks > ranks.size:
        pytest.skip("needs more ranks")
    results = ranks.run(fit_in, str(tmp_path / "run"), precision, num_ranks=num_ranks)
    assert all(result == {"status": "finished", "top1": 1.0, "steps": 40} for result in results)
    assert (tmp_path / "run/model.safetensors").exists()
    assert (tmp_path / f"run/timeline/rank-{num_ranks - 1}.json").exists()


def fit_another_on_rank_1(world: World, folder: str) -> str:
    labels = torch.arange(64) % 4
    images = torch.zeros(64, 1, 8, 8, dtype=torch.uint8)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 5 if world.rank == 1 else 4))
    try:
        megabatch.fit(network, (images, labels), (images, labels), overrides=["batch.micro=4", f"run.dir={folder}"])
    except megabatch.errors.UserError as error:
        return str(error)
    raise AssertionError("it was trained")


def test_a_network_that_differs_between_ranks_is_refused_with_the_difference(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(fit_another_on_rank_1, str(tmp_path / "run"), num_ranks=2)
    assert said == ["1.bias is [4] on rank 0 and [5] on rank 1; all ranks must pass the same network"] * 2


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_network_that_cannot_be_copied_is_refused_in_one_line(tmp_path: Path) -> None:
    labels, images = torch.arange(64) % 4, torch.zeros(64, 1, 8, 8, dtype=torch.uint8)
    network = nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(64, 4)))
    with pytest.raises(megabatch.errors.UserError, match=r"Sequential cannot be copied .*; use torch.nn.utils.para"):
        megabatch.fit(network, (images, labels), (images, labels), overrides=[f"run.dir={tmp_path / 'run'}"])


SCRIPT = """
import torch
from torch import nn

import megabatch

labels = torch.arange(64) % 4
images = (labels[:, None, None, None] * 60).expand(64, 1, 8, 8).to(torch.uint8)
overrides = ["batch.global=16", "batch.micro=8", "train.epochs=1000000", "run.dir=run", "run.threads=1"]
try:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    megabatch.fit(network, train=(images, labels), test=(images, labels), overrides=overrides)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(("number", "code", "said"), [(signal.SIGINT, 0, "interrupted"), (signal.SIGTERM, 143, "")])
def test_a_stop_signal_writes_a_checkpoint_and_then_has_its_usual_effect(
    number: int, code: int, said: str, tmp_path: Path
) -> None:
    rows = tmp_path / "run/metrics.jsonl"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (rows.exists() and rows.stat().st_size > 100):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code and output.endswith(said + "\n" if said else "")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "stopped"
    assert (tmp_path / "run/checkpoints/last").readlink().name == f"step-{summary['steps']:08d}"


LABELS = torch.arange(60) % 3
IMAGES = (
    (LABELS[:, None, None, None] * 70 + torch.arange(12)[:, None]).expand(60, 3, 12, 12).to(torch.uint8).contiguous()
)


def fit_small(folder: Path, train: Any = (IMAGES, LABELS), **more: Any) -> tuple[dict[str, Any], nn.Module]:
    """Return the summary without times, and the network."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(432, 16), nn.ReLU(), nn.Linear(16, 3))
    small = ["batch.global=20", "batch.micro=10", "train.epochs=2", "run.threads=1"]
    small += ["schedule.warmup_epochs=0", "optim.learning_rate=0.02", "loss.label_smoothing=0"]
    overrides = [*small, f"run.dir={folder}", *more.pop("overrides", [])]
    summary = megabatch.fit(network, train, (IMAGES[:20], LABELS[:20]), overrides=overrides, **more)
    return {"steps": summary.steps, "top1": summary.top1, "test_loss": summary.test_loss}, network


def have_same_weights(ours: nn.Module, theirs: nn.Module) -> bool:
    expected = theirs.state_dict()
    return all(torch.equal(tensor, expected[name]) for name, tensor in ours.state_dict().items())


class Pictures(Dataset[Any]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, number: int) -> Any:
        return Image.fromarray(IMAGES[number].permute(1, 2, 0).numpy()), int(LABELS[number])


def test_the_container_of_images_does_not_change_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected, network = fit_small(tmp_path / "0")
    held = [
        (IMAGES.permute(0, 2, 3, 1).numpy(), LABELS.tolist()),
        Pictures(),
        DataLoader(Pictures(), batch_size=7, shuffle=True),
    ]
    capfd.readouterr()
    for number, train in enumerate(held, 1):
        found, trained = fit_small(tmp_path / str(number), train)
        assert found == expected
        assert have_same_weights(trained, network)
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "only the dataset of the DataLoader is used" in said


def test_a_custom_loss_and_optimizer_are_used(tmp_path: Path) -> None:
    expected, network = fit_small(tmp_path / "0")
    by_hand = nn.CrossEntropyLoss(reduction="sum")

    def sgd(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
        assert settings.name == "sgd" and {group["name"] for group in groups} == {"weights", "biases"}
        return torch.optim.SGD(groups, lr=1.0, momentum=settings.momentum, nesterov=True, fused=True)

    found, trained = fit_small(tmp_path / "1", loss=by_hand, optimizer=sgd)
    assert found == expected
    assert have_same_weights(trained, network)

    def doubled(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert logits.dtype == torch.float32
        return 2 * by_hand(logits, labels)

    fit_small(tmp_path / "2", loss=doubled, overrides=["precision.name=bf16"])
    ours, theirs = (
        [json.loads(row)["loss"] for row in (tmp_path / run / "metrics.jsonl").read_text().splitlines()[:1]]
        for run in ("2", "1")
    )
    assert ours == pytest.approx([2 * theirs[0]], rel=0.01)


def adamw(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=settings.learning_rate)


def test_a_run_with_a_custom_optimizer_resumes_only_with_the_same_one(tmp_path: Path) -> None:
    expected, network = fit_small(tmp_path / "whole", optimizer=adamw)

    def stop(record: StepRecord) -> None:
        if record.step == 4:
            raise OSError("no more")

    often = ["checkpoint.every_steps=1", "checkpoint.keep=3"]  # more than two: none is skipped
    with pytest.raises(OSError, match="no more"):
        fit_small(tmp_path / "run", optimizer=adamw, on_step=stop, overrides=often)
    with pytest.raises(megabatch.UserError, match=r"holds a run with data.source='python:.*give another run.dir"):
        fit_small(tmp_path / "run", overrides=often)
    seen: list[int] = []
    found, trained = fit_small(
        tmp_path / "run", optimizer=adamw, on_step=lambda record: seen.append(record.step), overrides=often
    )
    assert found == expected and seen == [5, 6]
    assert have_same_weights(trained, network)


def test_callbacks_get_every_record_after_it_is_written(tmp_path: Path) -> None:
    rows, seen = tmp_path / "run/metrics.jsonl", []

    def see(record: StepRecord | EvaluationRecord) -> None:
        assert json.loads(rows.read_text().splitlines()[-1]) == json.loads(msgspec.json.encode(record))
        seen.append((type(record).__name__, record.step))

    fit_small(tmp_path / "run", on_step=see, on_evaluation=see)
    steps = [("StepRecord", step) for step in range(1, 7)]
    assert seen == [*steps[:3], ("EvaluationRecord", 3), *steps[3:], ("EvaluationRecord", 6)]


def fail_in_evaluation(record: EvaluationRecord) -> None:
    raise ZeroDivisionError("mine")


def test_an_exception_in_a_callback_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        fit_small(tmp_path / "run", on_evaluation=fail_in_evaluation)
    assert caught.traceback[-1].name == "fail_in_evaluation"
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"loss": nn.CrossEntropyLoss()},
            r"^loss=CrossEntropyLoss\(reduction='mean'\): expected the sum over the samp",
        ),
        (
            {"loss": lambda logits, labels: logits.sum(1)},
            r"^loss returned a tensor \[10\]; expected the sum over the sa",
        ),
        (
            {"loss": lambda logits, labels: 3.0},
            r"^loss returned a float; expected the sum over the samples, a tensor of",
        ),
        (
            {"loss": nn.CrossEntropyLoss(reduction="sum"), "overrides": ["loss.class_weights=auto"]},
            r"^loss.class_weights has no effect on fit\(loss=...\); omit it",
        ),
        ({"overrides": ["loss.class_weights={cat=2}"]}, r"^loss.class_weights: .* no class 'cat'; nearest: "),
        (
            {"optimizer": lambda groups, settings: None},
            r"^optimizer returned a NoneType; expected a torch.optim.Optimiz",
        ),
        (
            {"optimizer": lambda groups, settings: torch.optim.Adam([p for group in groups for p in group["params"]])},
            r"^optimizer returned a Adam with other parameter groups than it was given; pass them unchanged",
        ),
        ({"train": (IMAGES[:, :1], LABELS)}, r"^train has 1 channels and test has 3; convert them"),
    ],
)
def test_an_invalid_loss_or_optimizer_is_refused_before_anything_is_written(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(megabatch.UserError, match=message):
        fit_small(tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


class Flipped(Pictures):
    """A dataset that changes its images at random, like a transform."""

    def __getitem__(self, number: int) -> Any:
        image, label = super().__getitem__(number)
        return (image.rotate(90) if random.random() < 0.5 else image), label


def test_a_dataset_that_changes_its_images_at_random_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fit_small(tmp_path / "run", Flipped(), on_evaluation=fail_in_evaluation)
    assert fit_small(tmp_path / "run", Flipped())[0]["steps"] == 6


def test_images_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(megabatch.UserError, match=r"train: images are torch.float32 \[2, 8, 8\].*expected uint8"):
        megabatch.fit(nn.Flatten(), train=(torch.zeros(2, 8, 8), torch.zeros(2)), test=(torch.zeros(0), torch.zeros(0)))
