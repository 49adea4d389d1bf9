"""The noise scale of one run as a curve, and as a warning before the next run."""

from pathlib import Path

import msgspec
import pytest

from megabatch.errors import UserError
from megabatch.runs import files
from megabatch.runs.epochs import curve_of_run, warn_of_noise
from megabatch.runs.reader import read_summary
from megabatch.runs.records import NoiseRecord
from tests.support.made_up_run import BATCH, make_run

NOISE = NoiseRecord(signal=1.0, trace=1.0, scale=9000.0, low=6000.0, high=12_000.0, over_run=20_000.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run at batch 8,192 with a noise scale."""
    folder = make_run(tmp_path / "recipe-001", steps=40)
    rows = [msgspec.json.decode(line) for line in (folder / files.METRICS).read_bytes().splitlines()]
    rows[0]["noise"] = msgspec.to_builtins(NOISE)
    (folder / files.METRICS).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    summary = read_summary(folder)
    assert summary
    (folder / files.SUMMARY).write_bytes(msgspec.json.encode(msgspec.structs.replace(summary, noise=NOISE)))
    return folder


def with_target(run: Path, target: float) -> Path:
    config = run / files.CONFIG
    config.write_text(config.read_text().replace("target_top1 = 0.75", f"target_top1 = {target}"))
    return run


def test_warning_has_the_expected_epochs(run: Path) -> None:
    assert warn_of_noise("recipe", 20_000, 32, run.parent) is None
    assert warn_of_noise("other", 10**6, 32, run.parent) is None
    warning = warn_of_noise("recipe", 65_536, 48, run.parent)
    expected = (1 + 65_536 / 20_000) / (1 + BATCH / 20_000)
    assert warning and f"about {expected:.2g} times" in warning and "batch.global=20016" in warning  # 417 x 48


def test_noise_scale_of_a_run_gives_a_curve_through_its_epochs(run: Path) -> None:
    curve = curve_of_run(with_target(run, 0.01))
    assert curve.critical == 20_000 and 0 < curve.epochs(BATCH) <= 100 and 0.1 <= curve.doubt(BATCH) <= 1


def test_run_that_never_reached_its_target_has_no_curve(run: Path) -> None:
    with pytest.raises(UserError, match=r"never reached train\.target_top1=0\.9999"):
        curve_of_run(with_target(run, 0.9999))
