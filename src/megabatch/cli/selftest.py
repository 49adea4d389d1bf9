"""megabatch selftest: the laws of this software on the devices of its user, and how fast they are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.overrides import MOST, count_devices, require_folder_of
from megabatch.errors import UserError
from megabatch.ranks.lifecycle import be_a_rank, start_ranks
from megabatch.text import print_line

if TYPE_CHECKING:
    from megabatch.preflight.selftest import Report
    from megabatch.ranks.store import RankStore

FILE = Path("selftest.json")
MOST_RANKS = 4  # on a CPU: what plans do between hosts needs four, and cores may be few


def selftest(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    ranks: Annotated[int | None, typer.Option(help="Ranks to run on. Default: one per GPU; four on a CPU.")] = None,
    laws: Annotated[bool, typer.Option("--laws", help="The laws alone, without figures of speed.")] = False,
    json: Annotated[Path, typer.Option("--json", help="The file to write.")] = FILE,
) -> None:
    """Check on your devices what must hold, and measure them beside stock DDP; under five minutes.

    Sums of every all-reduce, training in every precision against the CPU, resuming to the bit, host waits, speed and
    memory. The file holds figures alone, no names, paths or data: please send it to us.

    Under torchrun or srun it joins the ranks that they have started.
    """
    from megabatch.preflight.selftest import run_selftest
    from megabatch.ranks.discover import discover
    from megabatch.ranks.world import choose_device

    require_folder_of(json)
    info, device_type = discover(), choose_device(device)
    if info is None:
        num_ranks = ranks or (count_devices(device_type) if device_type != "cpu" else MOST_RANKS)
        if num_ranks > MOST:
            raise UserError(f"--ranks {ranks}: expected at most {MOST:,}; give fewer")
        if num_ranks < 1:
            raise UserError(f"--ranks {ranks}: a self-test needs at least one rank; nearest: --ranks 1")
        options = ["--device", device_type, "--json", str(json), *["--laws"] * laws]
        start_ranks(["selftest", *options], num_ranks)
        return

    def work(store: "RankStore") -> int:
        report = run_selftest(store.info, store, device_type, laws, lambda report: show_newest(report, json))
        if info.rank == 0:
            print_end(report, json)
        return 0

    be_a_rank(info, work)


def show_newest(report: "Report", file: Path) -> None:
    """And keeps what there is so far."""
    import msgspec

    from megabatch.io.disk import write_file

    if len(report.checks) == 1:
        hosts = " + ".join(map(str, report.hosts_of))
        print_line(f"megabatch {report.megabatch}, torch {report.torch}, {report.device}, {report.backend}")
        print_line(f"{report.num_ranks} ranks, taken for hosts of {hosts}")
        print_line("")
    check = report.checks[-1]
    outcome = {True: "ok", False: "FAILED", None: ""}[check.passed]
    print_line(f"{outcome:6} {check.name:44} {check.found}")
    write_file(file, msgspec.json.format(msgspec.json.encode(report), indent=1).decode())


def print_end(report: "Report", file: Path) -> None:
    asked = [check for check in report.checks if check.passed is not None]
    good = len(asked) - len(report.failed)
    print_line("")
    print_line(f"{good} of {len(asked)} laws hold; {report.seconds:.0f} s; written to {file}")
    if report.failed:
        names = "; ".join(check.name for check in report.failed)
        raise UserError(f"{len(report.failed)} of {len(asked)} laws do not hold here ({names}); please send us {file}")
