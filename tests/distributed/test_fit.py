import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megabatch
from megabatch.ranks.world import World
from tests.support.rank_pool import RankPool


def fit_in(world: World, folder: str, precision: str) -> dict[str, Any]:
    """The example of docs/python.md, in ranks that exist already."""
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
    weights = world.all_gather(network[1].weight.detach())
    assert all(torch.equal(other, weights[0]) for other in weights)
    return {"status": summary.status, "top1": summary.top1, "steps": summary.steps}


@pytest.mark.parametrize(("num_ranks", "precision"), [(1, "fp32"), (2, "fp32"), (2, "fp16"), (2, "amp")])
def test_ones_own_network_and_images_train_in_the_ranks_that_exist(
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


def test_ranks_that_bring_different_networks_are_told_where_they_differ(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(fit_another_on_rank_1, str(tmp_path / "run"), num_ranks=2)
    assert said == ["1.bias is [4] on rank 0 and [5] on rank 1; all ranks must bring the same network"] * 2


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_network_that_cannot_be_copied_is_one_line(tmp_path: Path) -> None:
    labels, images = torch.arange(64) % 4, torch.zeros(64, 1, 8, 8, dtype=torch.uint8)
    network = nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(64, 4)))
    with pytest.raises(megabatch.errors.UserError, match=r"Sequential cannot be copied .*; torch.nn.utils.parametri"):
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
def test_a_stop_signal_writes_a_checkpoint_and_then_does_what_it_would_have_done(
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


def test_images_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(megabatch.UserError, match=r"train: images are torch.float32 \[2, 8, 8\].*expected uint8"):
        megabatch.fit(nn.Flatten(), train=(torch.zeros(2, 8, 8), torch.zeros(2)), test=(torch.zeros(0), torch.zeros(0)))
