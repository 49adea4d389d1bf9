import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from megabatch_lab.bench import hosts as bench_hosts
from megabatch_lab.bench.cluster import Task, require_planned_bytes, run
from megabatch_lab.bench.gradient_sets import GradientSet, gradient_sizes
from megabatch_lab.bench.host_ranks import CHECKOUT, run_ranks
from megabatch_lab.bench.hosts import hosts
from megabatch_lab.bench.setups import Request, read_request
from megabatch_lab.chaos.namespaces import NAMESPACES, Host, started_at, sweep
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.errors import UserError
from megabatch.ranks.failures import RankFailed


def request(
    ranks: str | None = None, *, num_hosts: int = 2, gbps: str | None = None, wire: str | None = None
) -> Request:
    return read_request(num_hosts, ranks, gbps, wire, ["resnet18"], False, False)


def test_a_setup_is_a_number_for_all_hosts_or_one_for_each() -> None:
    assert request("2,4,2+1").setups == [(2, 2), (4, 4), (2, 1)]
    assert request("3,1+2+3", num_hosts=3).setups == [(3, 3, 3), (1, 2, 3)]
    assert request().setups == [(2, 2), (4, 4)] and request().rates_gbps == [1.0, 2.5]
    assert request(gbps="0.5,10", wire="bf16").rates_gbps == [0.5, 10.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--hosts 5", "--hosts=5 must be 2 to 4; nearest: --hosts=4"),
        ("--hosts 1", "--hosts=1 must be 2 to 4; nearest: --hosts=2"),
        ("--ranks-per-host 5", "--ranks-per-host=5: a host has 1 to 4 ranks; nearest: --ranks-per-host=4"),
        ("--ranks-per-host 2+0", "--ranks-per-host=2+0: a host has 1 to 4 ranks; nearest: --ranks-per-host=2+1"),
        ("--ranks-per-host 2+1+1", "has numbers for 3 hosts, and there are 2; give 2, or --hosts=3"),
        ("--ranks-per-host 2,x", "--ranks-per-host='x' must be a number, or one number per host joined by +"),
        ("--ranks-per-host 2,,4", "--ranks-per-host='' must be a number"),
        ("--gbps fast", "--gbps='fast' must be a number, or several separated by commas; such as 1,2.5"),
        ("--gbps nan", "--gbps=nan must be 0.01 to 100"),
        ("--gbps 1000", "--gbps=1000 must be 0.01 to 100; nearest: --gbps=100"),
        ("--wire fp32,fp8", "--wire='fp8' is not one of fp32, bf16, fp16; nearest: --wire="),
        ("--model resnet51", "--model='resnet51' is not one of"),
        ("--train --compare", "--train with --compare: a training is of alexnet_bn"),
        ("--train --model alexnet", "--train with --model: a training is of alexnet_bn"),
        ("--train --ranks-per-host 4", "has 8 ranks; memory is for 4: --hosts=2 --ranks-per-host=2"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_started(options: str, said: str) -> None:
    refused = CliRunner().invoke(app, ["bench", "cluster", *options.split()])
    assert isinstance(refused.exception, UserError), refused.output
    assert said in str(refused.exception) and "\n" not in str(refused.exception)


def test_without_root_or_iproute2_one_line_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    refused = CliRunner().invoke(app, ["bench", "cluster"])
    assert isinstance(refused.exception, UserError)
    assert "needs root and tc; run it as root, with iproute2" in str(refused.exception)


def test_gradients_are_the_models_in_backward_order_and_their_buckets_cover_them() -> None:
    sizes = gradient_sizes("resnet50")
    assert len(sizes) == 161 and sizes[:2] == [1000, 2048 * 1000] and sizes[-1] == 64 * 3 * 7 * 7
    gradients = GradientSet([3, 16, 5])
    assert [bucket.num_bytes for bucket in gradients.described] == [12, 64, 20]
    assert [len(gradients.bucket(indices)) for indices in ([0], [1, 2], [0, 1, 2])] == [16, 32, 48]
    for wrong in (None, 1):
        gradients.fill(0)
        total = gradients.flat.clone()
        gradients.fill(1)
        gradients.flat += total
        if wrong is None:
            gradients.check(2, 1.0)
            assert gradients.flat.eq(0).all()
        else:
            gradients.flat[wrong] += 1
            with pytest.raises(AssertionError):
                gradients.check(2, 1.0)


def test_bytes_that_were_not_planned_fail_the_bench() -> None:
    row = {"model": "resnet50", "gbps": 1.0, "ranks_per_host": 2, "wire": "fp32", "bytes_planned": 100_000_000}
    require_planned_bytes(row | {"bytes_counted": 100_300_000.0})
    for counted in (0.0, 90_000_000.0, 110_000_000.0):
        with pytest.raises(SystemExit, match=r"hosts have sent [\d,]+ bytes, and the plans say 100,000,000"):
            require_planned_bytes(row | {"bytes_counted": counted})


@pytest.fixture(scope="module")
def namespaces() -> None:
    """CI may have no right to make any, or a kernel without them."""
    try:
        with hosts(2, 1.0):
            pass
    except UserError as error:
        pytest.skip(f"needs root and iproute2: {error}")


def names_of(process: int) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"mb{process}-*")]


def processes_in(names: list[str]) -> list[int]:
    found = [subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout for name in names]
    return [int(process) for text in found for process in text.split()]


def bytes_sent(name: str) -> int:
    cards = subprocess.run(["ip", "netns", "exec", name, "cat", "/proc/net/dev"], capture_output=True, text=True).stdout
    return next(int(line.split()[9]) for line in cards.splitlines() if line.strip().startswith("eth0:"))


def is_running(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.usefixtures("namespaces")
def test_two_unequal_hosts_sum_exactly_and_send_what_their_plans_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each arm checks its sums itself; `run` compares the bytes."""
    monkeypatch.setattr(bench_hosts, "STREAM_TOLERANCE", 0.9)  # of a machine that has other tests to run
    path = tmp_path / "bench.json"
    rows = run(request("2+1", gbps="4"), 2, path)  # at 1, half of the time would be waiting
    assert json.loads(path.read_text())["rows"] == rows
    assert [(row["wire"], row["ranks_per_host"], row["algorithm"]) for row in rows] == [
        ("fp32", "2+1", "hierarchical"),
        ("bf16", "2+1", "hierarchical"),
    ]
    size = 4 * sum(gradient_sizes("resnet18"))
    for row, share in zip(rows, (1, 0.5), strict=True):
        assert row["model"] == "resnet18" and row["hosts"] == 2 and row["gbps"] == 4.0 and row["rounds"] == 2
        assert row["bytes_planned"] == pytest.approx(2 * share * size, rel=1e-3)
        assert row["bytes_counted"] == pytest.approx(row["bytes_planned"], rel=0.05)
        assert row["wire_limit_s"] == pytest.approx(2e-9 * share * size, rel=1e-3)
        assert row["ours_s"] > 0 and row["ddp_ratio"] > 0 and row["per_tensor_ratio"] > 0
    assert not names_of(os.getpid())


@pytest.mark.usefixtures("namespaces")
def test_a_rank_that_fails_is_heard_and_nothing_remains(capfd: pytest.CaptureFixture[str]) -> None:
    broken = Task(request("1"), {}, 1.0, 1.0, (1, 1), 9)
    with (
        pytest.raises(RankFailed, match="KeyError: 'resnet18'") as failed,
        hosts(2, 1.0) as made,
    ):
        run_ranks(made, (1, 1), "megabatch_lab.bench.cluster", msgspec.json.encode(broken))
    assert "Traceback" in failed.value.trace and failed.value.exit_code == 1
    assert capfd.readouterr() == ("", "")
    assert not names_of(os.getpid())


@pytest.mark.usefixtures("namespaces")
def test_ctrl_c_in_the_middle_leaves_no_namespace_no_process_and_no_file(tmp_path: Path) -> None:
    words = ["bench", "cluster", "--ranks-per-host", "1", "--gbps", "0.05", "--rounds", "9999", "--model", "small_cnn"]
    # A folder of its own shows what is left behind.
    bench = subprocess.Popen(
        [sys.executable, "-m", "megabatch", *words],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert bench.stderr
    deadline_s, at_start, sent = time.monotonic() + 90, 0, 0
    while sent < at_start + 3_000_000 and time.monotonic() < deadline_s:  # so much is all-reduces
        assert bench.poll() is None, bench.stderr.read()
        inside = processes_in(names_of(bench.pid))
        if len(inside) >= 4:  # two launchers and two ranks
            sent = bytes_sent(next(name for name in names_of(bench.pid) if name.endswith("-h0")))
            at_start = at_start or sent
        time.sleep(0.05)
    bench.send_signal(signal.SIGINT)
    assert bench.wait(timeout=30) == 130
    assert bench.stderr.read() == ""
    assert at_start and not names_of(bench.pid)
    assert not [process for process in inside if is_running(process)]
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_processes_and_namespaces(number: signal.Signals) -> None:
    program = """
import subprocess, time
from megabatch_lab.bench.hosts import hosts
with hosts(2, 1.0) as cluster:
    print(cluster.hosts[1].start(["sleep", "600"]).pid, flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # nohup ignores SIGHUP
    )
    assert process.stdout
    inside = int(process.stdout.readline())
    assert len(names_of(process.pid)) == 3 and is_running(inside)
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    assert not names_of(process.pid) and not is_running(inside)


@pytest.mark.usefixtures("namespaces")
def test_what_a_killed_bench_has_left_is_swept_and_what_a_living_one_has_is_not() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    owners = {f"mb{gone.pid}-1-h0": False, f"mb{os.getpid()}-1-h0": False}  # the second one's number is used again
    owners[f"mb{os.getppid()}-{started_at(os.getppid())}-h0"] = True
    left = []
    try:
        for name in owners:
            subprocess.run(["ip", "netns", "add", name], check=True)
            left.append(Host(name, "").start(["sleep", "600"]))
        sweep()
        assert {name: (NAMESPACES / name).exists() for name in owners} == owners
        assert [process.poll() is None for process in left] == list(owners.values())
    finally:
        for process in left:
            process.kill()
            process.wait()
        for name in owners:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
