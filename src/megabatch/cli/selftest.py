"""megabatch selftest: correctness checks and measurements on the user's devices."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.overrides import MOST, count_devices, require_folder_of
from megabatch.errors import UserError, require_one_of
from megabatch.ranks.discover import discover
from megabatch.ranks.lifecycle import exit_like_ranks, print_message, report_start, run_as_rank
from megabatch.ranks.signals import was_launched
from megabatch.text import print_line

if TYPE_CHECKING:
    from megabatch.preflight.selftest.results import SelfTest
    from megabatch.ranks.store import RankStore

FILE = Path("selftest.json")
RESTARTS = 100  # at least one per check: after one that ended the ranks, they continue with the next
MOST_RANKS = 4  # on a CPU: plans between nodes need four, and cores may be few


def selftest(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    ranks: Annotated[int | None, typer.Option(help="Number of ranks. Default: one per GPU, or four on a CPU.")] = None,
    laws: Annotated[
        bool, typer.Option("--laws", help="Run only the correctness checks, without measurements.")
    ] = False,
    json: Annotated[Path, typer.Option("--json", help="File to write.")] = FILE,
) -> None:
    """Check correctness on your devices and measure their speed, in under ten minutes.

    It checks the results of every all-reduce, training in every precision against the CPU, and bitwise identical
    resuming. It compares all-reduces and steps with stock DDP, and measures precisions, JPEG input and memory. Then one
    rank of a small run fails, and it measures the time until that rank is named. A failed check does not stop the
    others. The file holds only numbers, no names, paths or data: please send it to us.

    Under torchrun or srun, it joins the ranks that they started, and no rank fails on purpose.
    """
    info = discover()
    report_start(info)

    from megabatch.preflight.selftest.run import run_selftest
    from megabatch.ranks.backends import BACKENDS
    from megabatch.ranks.devices import choose_device

    require_one_of("--device", device, ["auto", *BACKENDS])
    require_folder_of(json)
    device_type = choose_device(device)
    if info is None:
        num_ranks = MOST_RANKS if device_type == "cpu" else count_devices(device_type)
        num_ranks = num_ranks if ranks is None else ranks
        if num_ranks > MOST:
            raise UserError(f"--ranks {ranks}: the limit is {MOST:,}; use fewer ranks")
        if num_ranks < 1:
            raise UserError(f"--ranks {ranks}: a self-test needs at least 1 rank; use --ranks 1")
        options = ["--device", device_type, "--json", str(json), *["--laws"] * laws]
        write_start(json, device_type, num_ranks)
        run_checks(["selftest", *options], json, num_ranks)
        print_end(run_drills(json, device_type, num_ranks), json)
        return

    def work(store: "RankStore") -> int:
        shown = 0

        def show(report: "SelfTest") -> None:
            nonlocal shown
            shown = show_newest(report, shown, json)

        report = run_selftest(store.info, store, device_type, laws, show)
        if info.rank == 0 and not was_launched():
            print_end(report, json)
        return 0

    run_as_rank(info, work)


def write_start(file: Path, device_type: str, num_ranks: int) -> None:
    """Write a report without checks, which the ranks replace."""
    import torch

    from megabatch import __version__
    from megabatch.preflight.selftest.results import SelfTest

    write_report(
        SelfTest(
            megabatch=__version__,
            torch=str(torch.__version__),
            device=device_type,
            backend="",
            num_ranks=num_ranks,
            hosts_of=[num_ranks],
        ),
        file,
    )


def run_checks(command: Sequence[str], file: Path, num_ranks: int) -> None:
    """Run the checks on ranks of this machine.  If the ranks cannot be restarted, the report has that as a check."""
    from megabatch.preflight.selftest.results import Check, anonymous
    from megabatch.ranks.failures import RankFailed
    from megabatch.ranks.launch import launch

    with exit_like_ranks():
        try:
            launch(command, num_ranks, RESTARTS, log=print_message)
        except RankFailed as failed:
            report = read_report(file)
            if failed.exit_code > 128 or not report.checks:  # a requested stop, or nothing runs here
                raise
            found = f"not run: rank {failed.rank}: {anonymous(str(failed))}"
            missing = Check(name="the remaining checks", passed=False, found=found)
            show_newest(report.with_checks([missing], report.seconds), len(report.checks), file)


def run_drills(file: Path, device_type: str, num_ranks: int) -> "SelfTest":
    """Run the failure drills, which need ranks that may fail, after those of the self-test."""
    import time

    from megabatch.preflight.selftest.drills import DRILLS, MOST_RANKS, run_drill

    report = read_report(file)
    for drill in DRILLS if num_ranks > 1 else ():
        began_s = time.perf_counter()
        check = run_drill(drill, device_type, min(num_ranks, MOST_RANKS))
        report = report.with_checks([check], report.seconds + time.perf_counter() - began_s)
        show_newest(report, len(report.checks) - 1, file)
    return report


def show_newest(report: "SelfTest", shown: int, file: Path) -> int:
    """Print the checks after the first `shown`, write the report so far, and return the number of checks."""
    is_restarted = shown == 0 and len(report.checks) > 1
    if is_restarted:  # the last check ended the ranks
        shown = len(report.checks) - 1
    elif shown == 0:
        nodes = " + ".join(map(str, report.hosts_of))
        backend = f"{report.backend} ({report.backend_class})"
        print_line(f"megabatch {report.megabatch}, torch {report.torch}, {report.device}, {backend}")
        print_line(f"{report.num_ranks} ranks on {'simulated ' * report.is_simulated}nodes of {nodes}")
        print_line("")
    for check in report.checks[shown:]:
        outcome = {True: "ok", False: "FAILED", None: ""}[check.passed]
        print_line(f"{outcome:6} {check.name:44} {check.found}")
    write_report(report, file)
    return len(report.checks)


def read_report(file: Path) -> "SelfTest":
    import msgspec

    from megabatch.preflight.selftest.results import SelfTest

    return msgspec.json.decode(file.read_bytes(), type=SelfTest)


def write_report(report: "SelfTest", file: Path) -> None:
    import msgspec

    from megabatch.io.disk import write_file

    write_file(file, msgspec.json.format(msgspec.json.encode(report), indent=1).decode())


def print_end(report: "SelfTest", file: Path) -> None:
    asked = [check for check in report.checks if check.passed is not None]
    good = len(asked) - len(report.failed)
    print_line("")
    print_line(f"{good} of {len(asked)} checks passed in {report.seconds:.0f} s; written to {file}")
    if report.failed:
        names = "; ".join(check.name for check in report.failed)
        raise UserError(f"{len(report.failed)} of {len(asked)} checks failed ({names}); please send us {file}")
