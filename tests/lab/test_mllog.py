"""The log of `run.mllog` against MLPerf's own compliance checker (the package mlperf-logging)."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# MLPerf's rules for LARS on 8x8 images: every value but the accuracy can be kept.
RUN = [
    *("model.name=small_cnn", "data.source=synthetic", "data.image_size=8"),
    *("data.synthetic={train=64,test=16,classes=4}", "batch.global=32", "batch.micro=16"),
    *("optim={name='lars', learning_rate=1.0, weight_decay=2e-4}", "schedule={warmup_epochs=1, end=1e-4, power=2.0}"),
    *("loss.label_smoothing=0.1", "train={epochs=6, evaluate_every=4, target_top1=1.0}", "run.mllog=true"),
]


@pytest.fixture
def is_compliant(tmp_path: Path) -> Callable[[Path], bool]:
    """Run the checker on a log."""
    try:
        compliance = importlib.import_module("mlperf_logging.compliance_checker.mlp_compliance")
    except ImportError:
        pytest.skip("needs mlperf-logging")

    def check(log: Path) -> bool:
        checker = compliance.make_checker("training", "4.0.0", quiet=True, werror=False)
        valid, *_ = compliance.main(str(log), "training_4.0.0/common.yaml", checker)
        return bool(valid)

    return check


def test_only_the_accuracy_fails_mlperfs_compliance_checker(
    is_compliant: Callable[[Path], bool], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "megabatch", "train", "fashion", *RUN, f"run.dir={folder}", "--ranks", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    log = folder / "mllog.txt"
    accuracy = re.compile(r'("key": "eval_accuracy", "value": )[\d.]+')
    assert len(accuracy.findall(log.read_text())) == 2 and not is_compliant(log)
    good, wrong = log.with_name("good.txt"), log.with_name("wrong.txt")
    good.write_text(accuracy.sub(r"\g<1>0.76", log.read_text()))
    assert is_compliant(good)
    wrong.write_text(good.read_text().replace('"lars_epsilon", "value": 0.0', '"lars_epsilon", "value": 1.0'))
    assert not is_compliant(wrong)
