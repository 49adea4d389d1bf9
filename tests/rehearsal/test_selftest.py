"""`megabatch selftest`, on a device that rounds as the CPU does."""

import getpass
import os
import platform
from pathlib import Path

import msgspec
from megabatch_lab.rehearsal.backends import REHEARSED

from megabatch.preflight import selftest as laws
from megabatch.preflight.selftest import Report, run_selftest
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.store import RankStore
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import alone


def run_on_one(_: None) -> tuple[Report, list[int]]:
    info, heard = RankInfo(0, 1, 0, 1), []
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the CUDA of a rehearsal has started by now
    laws.TOLERANCE = {"fp32": 0.0, "fp16": 0.0}
    report = run_selftest(info, RankStore(info), "cuda", True, lambda r: heard.append(len(r.checks)), REHEARSED)
    return report, heard


def test_every_law_holds_to_the_bit_and_the_report_names_nobody(ranks: RankPool) -> None:
    ((report, heard),) = ranks.run(run_on_one, num_ranks=1, join=alone)
    assert report.failed == [] and heard == list(range(1, len(report.checks) + 1))
    names = [check.name for check in report.checks if check.passed]
    assert {"all-reduce torus, fp16 travels", "training fp32, lars", "training fp16, sgd", "resume fp16"} <= set(names)
    text = msgspec.json.encode(report).decode()
    assert not any(word in text for word in (platform.node(), str(Path.home()), f"/{getpass.getuser()}", "/tmp"))
