"""The noise scale of one run as a curve, and as a warning before the next run."""

import re
from pathlib import Path

import msgspec
import pytest

from megabatch.errors import UserError
from megabatch.runs import files
from megabatch.runs.epochs import curve_of_run, read_training, warn_of_noise
from megabatch.runs.records import NoiseRecord
from tests.support.made_up_run import BATCH, make_run

NOISE = NoiseRecord(
    signal=1.0, trace=1.0, scale=9000.0, low=6000.0, high=12_000.0, over_run=20_000.0, over_run_low=15_000.0
)


def measured(folder: Path) -> Path:
    """Make a run at batch 8,192 with a noise scale."""
    make_run(folder, steps=40)
    rows = [msgspec.json.decode(line) for line in (folder / files.METRICS).read_bytes().splitlines()]
    rows[0]["noise"] = msgspec.to_builtins(NOISE)
    (folder / files.METRICS).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return measured(Path("runs/recipe-001"))


def with_target(run: Path, target: float) -> Path:
    config = run / files.CONFIG
    config.write_text(re.sub(r"target_top1 = .*", f"target_top1 = {target}", config.read_text()))
    return run


def test_warning_has_the_expected_epochs(run: Path) -> None:
    assert warn_of_noise("recipe", 20_000, 32) is None
    assert warn_of_noise("other", 10**6, 32) is None
    factor = (1 + 65_536 / 20_000) / (1 + BATCH / 20_000)
    length, whole = read_training(with_target(run, 0.9999)), warn_of_noise("recipe", 65_536, 48)
    assert whole and f"about {factor:.2g} times its {length.epochs:.3g} epochs are expected" in whole
    assert "batch.global=20016" in whole  # 417 x 48
    to_target, warning = read_training(with_target(run, 0.01)), warn_of_noise("recipe", 65_536, 48)
    assert to_target.reached and to_target.epochs < length.epochs
    assert warning and f"to train.target_top1=0.01 are expected, {factor * to_target.epochs:.3g}" in warning


def test_warning_is_only_of_the_same_recipe(run: Path) -> None:
    measured(Path("runs/recipe-90-64-001"))
    assert warn_of_noise("recipe-90", 10**6, 32) is None
    newest = warn_of_noise("recipe", 10**6, 32)
    assert newest and "runs/recipe-001" in newest


def test_noise_scale_of_a_run_gives_a_curve_through_its_epochs(run: Path) -> None:
    curve = curve_of_run(with_target(run, 0.01))
    assert curve.critical == 20_000 and 0 < curve.epochs(BATCH) <= 100 and curve.doubt(BATCH) == pytest.approx(1)


def test_run_that_never_reached_its_target_has_no_curve(run: Path) -> None:
    with pytest.raises(UserError, match=r"never reached train\.target_top1=0\.9999"):
        curve_of_run(with_target(run, 0.9999))
