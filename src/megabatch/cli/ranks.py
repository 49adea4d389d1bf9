"""What `train` and the benches share: a command that is run once starts ranks, which run the same command."""

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from megabatch.errors import UserError

if TYPE_CHECKING:
    from megabatch.comm.launch import RankFailed


def start_ranks(
    arguments: Sequence[str], num_ranks: int, max_restarts: int = 0, files: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Runs `megabatch ARGUMENTS` on `num_ranks` ranks of this machine, and speaks for the one that fails first."""
    from megabatch.comm.launch import RankFailed, Stopped, launch

    try:
        launch(arguments, num_ranks, max_restarts, files)
    except Stopped as stopped:
        sys.exit(128 + stopped.signal_number)
    except RankFailed as failed:
        if failed.exit_code > 128:  # it was asked to stop, and has said so
            sys.exit(failed.exit_code)
        sys.exit(complain(failed))


def complain(failed: "RankFailed") -> int:
    """One line; the traceback goes to the run's log, or above the line if the run has no folder yet."""
    from megabatch.train.folder import append_to_log

    is_users_mistake = failed.exit_code == 2
    where = "" if is_users_mistake else f"rank {failed.rank}: "
    if failed.trace and failed.folder:
        append_to_log(failed.folder, f"rank {failed.rank} failed\n{failed.trace}")
        print(f"megabatch: {where}{failed} (traceback in {failed.folder / 'train.log'})", file=sys.stderr)
    else:
        print(f"{failed.trace}megabatch: {where}{failed}", file=sys.stderr)
    return 2 if is_users_mistake else 1


def be_a_rank(work: Callable[[], int]) -> NoReturn:
    """Does the work of one rank.  Its launcher speaks for it if it fails; without ours, it speaks for itself."""
    from megabatch.comm.launch import die_with_launcher, report_failure, was_launched

    die_with_launcher()
    try:
        code = work()
    except BaseException as error:
        is_users_mistake = isinstance(error, UserError)
        code = 2 if is_users_mistake else 1
        first_line = str(error).strip().partition("\n")[0]
        line = first_line if is_users_mistake else f"{type(error).__name__}: {first_line}"
        trace = "" if is_users_mistake else traceback.format_exc()
        report_failure(code, line, trace)
        if not was_launched():
            rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
            print(f"{trace}megabatch: {rank}{line}", file=sys.stderr)
    # Everything is closed.  The interpreter's own end would meet Gloo's threads, and sometimes abort.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
