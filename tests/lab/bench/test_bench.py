import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import simplejpeg  # type: ignore[import-untyped]  # has no types
import torch
from megabatch_lab.bench import input as bench_input
from megabatch_lab.bench.allreduce import has_mpi
from megabatch_lab.bench.augmentation import AUGMENTED, MIXED
from megabatch_lab.bench.train import WORKLOADS
from PIL import Image
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.config.loading import load_config
from megabatch.config.resolve import make_model
from megabatch.data.catalog import infer_shape
from megabatch.errors import UserError
from megabatch.ranks.machine import usable_cores


def test_bench_writes_command_machine_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    words = ["bench", "train", "--rounds", "3", "--model", "small_cnn", "--json", str(path)]
    result = subprocess.run([sys.executable, "-m", "megabatch", *words], capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    written = json.loads(path.read_text())
    assert set(written) == {"command", "machine", "rows"}
    assert written["command"].startswith("megabatch bench train --rounds 3")
    assert {"cpu", "cores", "torch"} <= set(written["machine"])
    assert [row["model"] for row in written["rows"]] == ["small_cnn"]
    for row in written["rows"]:
        assert row["ranks"] == 2 and row["rounds"] == 3
        assert row["ours_images_per_s"] > 0 and row["stock_ddp_images_per_s"] > 0 and row["ratio"] > 0
        assert all(0 < row[f"{name}_percent"] < 100 for name in ("check", "record"))
        assert abs(row["noise_percent"]) < 100  # a difference of two times


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_of_bench_train_runs_forward_and_backward(name: str) -> None:
    config = load_config("fashion", WORKLOADS[name][0])
    shape = infer_shape(config.data)
    model = make_model(config, shape)
    logits = model(torch.zeros(2, shape.num_channels, config.data.image_size, config.data.image_size))
    assert logits.shape == (2, shape.num_classes)
    logits.sum().backward()


def test_unknown_model_is_refused_before_anything_starts() -> None:
    refused = CliRunner().invoke(app, ["bench", "train", "--model", "small_cn"])
    assert isinstance(refused.exception, UserError) and "nearest: --model=small_cnn" in str(refused.exception)


def test_bench_allreduce_measures_all_arms_on_two_ranks(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    words = ["bench", "allreduce", "--rounds", "9", "--bytes", "1024", "--bytes", "20480", "--json", str(path)]
    result = subprocess.run([sys.executable, "-m", "megabatch", *words], capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    assert path.exists(), f"{result.stdout}\n{result.stderr}"
    rows = json.loads(path.read_text())["rows"]
    assert [row["bytes"] for row in rows] == [1024, 20480]
    for row in rows:
        assert row["ranks"] == 2 and row["calls"] >= 9
        assert row["ours_s"] > 0 and row["gloo_s"] > 0 and row["memory_limit_fraction"] > 0
        assert row["mpich_s"] > 0 if has_mpi(2) else row["mpich_s"] is None
    assert "up to 256 KiB" in result.stdout


def test_bench_optimizer_measures_one_thread_and_all(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    words = ["bench", "optimizer", "--rounds", "3", "--model", "small_cnn", "--json", str(path)]
    result = subprocess.run([sys.executable, "-m", "megabatch", *words], capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["threads"] for row in rows] == sorted({1, len(usable_cores())})
    for row in rows:
        assert row["model"] == "small_cnn" and row["rounds"] == 3 and row["parameters"] > 1000
        assert row["ours_s"] > 0 and row["sgd_fused_s"] > 0 and row["limit_s"] > 0 and row["ratio_to_sgd"] > 0
        assert row["ours_checked_s"] > 0 and row["sgd_checked_s"] > 0
        assert row["adamw_s"] > 0 and row["lamb_s"] > 0 and row["muon_s"] > 0
        if find_spec("pytorch_optimizer"):
            assert row["peer_lars_s"] > 0 and row["ratio_to_peer"] > 0 and row["peer"]
        else:
            assert row["peer_lars_s"] is None and "were left out; `make" in result.stdout


def write_photos(folder: Path, count: int) -> None:
    draws = np.random.default_rng(1)
    for number in range(count):
        path = folder / f"class{number % 3}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = draws.integers(40, 90, 2)
        path.write_bytes(simplejpeg.encode_jpeg(draws.integers(0, 256, (height, width, 3), np.uint8), 80))


def test_bench_input_measures_all_arms_on_both_sets(tmp_path: Path) -> None:
    path, photos = tmp_path / "bench.json", tmp_path / "photos"
    write_photos(photos, 41)
    words = ["bench", "input", "--source", str(photos), "--image-size", "32", "--batch", "8", "--images", "40"]
    words += ["--workers", "2", "--rounds", "1", "--json", str(path)]
    # A separate TMPDIR shows files that remain.  DataLoaders create sockets there, whose paths must be short.
    with TemporaryDirectory() as temporary:
        environment = os.environ | {"TMPDIR": temporary}
        result = subprocess.run(
            [sys.executable, "-m", "megabatch", *words], capture_output=True, text=True, timeout=110, env=environment
        )
        assert result.returncode == 0, result.stderr
        assert not list(Path(temporary).glob("megabatch-bench-*"))
    rows = json.loads(path.read_text())["rows"]
    assert [row["set"] for row in rows] == ["as_is", "full_size"]
    for row in rows:
        # take_turns() asserts that every arm returned all 40 images in every round.
        assert row["images"] == 40 and row["rounds"] == 1
        for name in ("ours_folder", "ours_packed", "dataloader_pillow", "raw_decode"):
            assert row[name] > 0
        for name in ("folder_to_dataloader", "folder_to_raw", "packed_to_dataloader", "threads_to_processes"):
            assert row[name] > 0
        for peer, ratio in (("torchvision_v2", "folder_to_torchvision"), ("webdataset", "packed_to_webdataset")):
            assert (row[peer] is None) == (row[ratio] is None)
            assert row[peer] is None or row[peer] > 0
        assert (row["webdataset"] is None) == (find_spec("webdataset") is None)
        assert {f"{name}_us" for name in ("flip", *AUGMENTED, *MIXED)} <= row.keys()
        assert row["dataloader_workers"] == 2 and row["raw_decode_by"] in ("threads", "processes")
    assert rows[0]["jpeg_quality"] is None and rows[0]["mean_width"] < 90
    assert 1 <= rows[1]["jpeg_quality"] <= 100 and max(rows[1]["mean_width"], rows[1]["mean_height"]) > 400
    assert "re-encoded at quality" in result.stdout and "re-encoded at quality" in rows[1]["made_by"]


def test_pillow_crops_match_their_box_at_any_decoding_scale(tmp_path: Path) -> None:
    """The image is a ramp from left to right, so the colours of a crop give its position."""
    ramp = np.broadcast_to(np.linspace(0, 255, 512, dtype=np.uint8)[None, :, None], (512, 512, 3))
    path = tmp_path / "ramp.jpg"
    Image.fromarray(ramp).save(path, quality=95)
    for size in (16, 32, 64, 300):
        rising = 0
        for _ in range(20):
            crop = bench_input.crop_with_pillow(path, size)
            assert crop.shape == (size, size, 3)
            columns = crop.float().mean((0, 2))
            rising += bool(columns[-1] > columns[0])
            assert 0.2 * 255 < abs(float(columns[-1] - columns[0])) <= 255
        assert 0 < rising < 20  # some are mirrored
