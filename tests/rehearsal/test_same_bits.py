"""The same recipe on an accelerator and on the CPU gives bitwise identical losses and weights.

The device lags behind, so a host that reads a result too early, or overwrites memory during a copy, gets other bits.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megabatch_lab.rehearsal.device_decoder import NAME
from megabatch_lab.rehearsal.fake_cuda import LAG

from megabatch.planning.topology import Topology, regular
from tests.support.photos import encoded, photo
from tests.support.pictures import write_files
from tests.support.rank_pool import RankPool, RanksFailed
from tests.support.rehearsals import on, tiny, train_through

TWO_BY_TWO, TWO_HOSTS = regular(2, 2), regular(2, 1)

# Every precision with every optimizer, and every algorithm with 16 and 32 bits, on 1, 2 and 4 ranks.
NOISE, NOISE_IN_TURNS = "train.noise_every=1", "train.noise_every=2"  # turns: graphs and measured steps
RUNS = [
    (1, None, ("precision.name=fp32", "optim.name=sgd")),
    (1, None, ("precision.name=fp16", "optim.name=lars", NOISE)),
    (2, None, ("precision.name=bf16", "optim.name=sgd", "comm.algorithm=flat", NOISE)),
    (2, TWO_HOSTS, ("precision.name=amp", "optim.name=lars", "comm.algorithm=hierarchical", NOISE)),
    (4, TWO_BY_TWO, ("precision.name=fp32", "optim.name=lars", "comm.algorithm=torus", "comm.dtype=bf16")),
    (
        4,
        TWO_BY_TWO,
        ("precision.name=fp16", "optim.name=sgd", "comm.algorithm=hierarchical", "optim.clip_norm=0.5", NOISE),
    ),
    (4, TWO_BY_TWO, ("precision.name=bf16", "optim.name=lars", "comm.algorithm=flat")),
    (4, TWO_BY_TWO, ("precision.name=amp", "optim.name=sgd", "comm.algorithm=torus")),
    (
        1,
        None,
        (
            "precision.name=fp16",
            "optim.name=lars",
            "model.options.dropout=0.5",
            "model.cuda_graphs=true",
            NOISE_IN_TURNS,
        ),
    ),
    (2, TWO_HOSTS, ("precision.name=amp", "optim.name=sgd", "model.cuda_graphs=true", NOISE_IN_TURNS)),
]


def require_same(
    ranks: RankPool,
    num_ranks: int,
    topology: Topology | None,
    *overrides: str,
    stop: int | None = None,
    scale: float | None = None,
    lag: int = LAG,
) -> list[Any]:
    """Assert that all ranks agree on both devices and return the records.  The CPU's run is not interrupted."""
    config = tiny(*overrides)
    expected, *others = ranks.run(train_through, config, None, scale, num_ranks=num_ranks, join=on("cpu", topology))
    others += ranks.run(train_through, config, stop, scale, lag, num_ranks=num_ranks, join=on("cuda", topology))
    for result in others:
        assert result["records"] == expected["records"]
        assert result["state"].keys() == expected["state"].keys()
        for name, content in expected["state"].items():
            assert np.array_equal(result["state"][name], content), name
        assert result["hazards"] == []
    return list(expected["records"])


@pytest.mark.parametrize(
    ("num_ranks", "topology", "overrides"),
    RUNS,
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_losses_and_weights_are_bitwise_those_of_the_cpu(
    ranks: RankPool, num_ranks: int, topology: Topology | None, overrides: tuple[str, ...]
) -> None:
    assert len(require_same(ranks, num_ranks, topology, *overrides)) == 14 + 2


@pytest.mark.parametrize("precision", ["fp16", "amp"])
def test_overflowing_steps_are_skipped_as_on_the_cpu(ranks: RankPool, precision: str) -> None:
    records = require_same(ranks, 2, TWO_HOSTS, f"precision.name={precision}", "optim.name=lars", scale=2.0**27)
    skipped = [record[-1] for record in records if len(record) == 5]
    assert skipped[0] and not skipped[-1]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resumed_run_equals_the_uninterrupted_run_of_the_cpu(ranks: RankPool, precision: str) -> None:
    require_same(ranks, 2, TWO_HOSTS, f"precision.name={precision}", "optim.name=sgd", stop=5)


@pytest.mark.parametrize("lag", [20, 2000])
def test_images_decoded_by_threads_arrive_unchanged(ranks: RankPool, tmp_path: Path, lag: int) -> None:
    """Their pinned memory is reused, even if the device is many steps behind."""
    names = [f"{'train' if number < 32 else 'val'}/class{number % 2}/{number}.jpg" for number in range(40)]
    write_files(tmp_path, names)
    require_same(ranks, 2, TWO_HOSTS, f"data.source={tmp_path}", "batch.global=8", "precision.name=fp32", lag=lag)


def write_photos(folder: Path) -> None:
    """Write JPEGs, and every fourth image in a form that a decoder on a GPU does not get."""
    for number in range(40):
        path = folder / ("train" if number < 32 else "val") / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        others: dict[int, dict[str, Any]] = {4: {"progressive": True}, 0: {"format": "PNG"}}
        path.write_bytes(encoded(photo(number, 40 + number, 30), **others.get(number % 8, {})))


CROPS = ("data.crop_padding=0", "data.crop_area=0.3", "data.flip=true", "batch.global=8", f"data.decoder={NAME}")


@pytest.mark.parametrize("place", ["process", "threads"])
def test_a_decoder_on_the_device_gets_the_crops_of_the_cpu(ranks: RankPool, tmp_path: Path, place: str) -> None:
    """The stand-in decodes as the CPU does, whose run ignores it."""
    write_photos(tmp_path)
    require_same(ranks, 1, None, f"data.source={tmp_path}", *CROPS, f"run.decode_in={place}", lag=200)


def test_a_jpeg_that_the_device_cannot_decode_is_named(ranks: RankPool, tmp_path: Path) -> None:
    write_photos(tmp_path)
    broken = tmp_path / "val/class1/33.jpg"
    broken.write_bytes(broken.read_bytes()[:-100])
    config = tiny(f"data.source={tmp_path}", *CROPS, "run.decode_in=threads")
    with pytest.raises(
        RanksFailed, match=r"UserError: .*class1/33\.jpg cannot be decoded by data\.decoder=stand-in: .*set"
    ):
        ranks.run(train_through, config, num_ranks=1, join=on("cuda"))
