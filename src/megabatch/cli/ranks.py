"""What `train` and the benches share: a command that is run once starts ranks, which run the same command."""

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from megabatch.errors import UserError


def start_ranks(arguments: Sequence[str], num_ranks: int) -> None:
    """Runs `megabatch ARGUMENTS` on `num_ranks` ranks of this machine, and speaks for the one that fails first."""
    from megabatch.comm.launch import RankFailed, Stopped, launch

    try:
        launch(arguments, num_ranks)
    except Stopped as stopped:
        sys.exit(128 + stopped.signal_number)
    except RankFailed as failed:
        if failed.exit_code > 128:  # it was asked to stop, and has said so
            sys.exit(failed.exit_code)
        is_users_mistake = failed.exit_code == 2
        where = "" if is_users_mistake else f"rank {failed.rank}: "
        print(f"{failed.trace}megabatch: {where}{failed}", file=sys.stderr)
        sys.exit(2 if is_users_mistake else 1)


def be_a_rank(work: Callable[[], int]) -> NoReturn:
    """Does the work of one rank.  Its launcher speaks for it if it fails; without ours, it speaks for itself."""
    from megabatch.comm.launch import die_with_launcher, report_failure, was_launched

    if was_launched():
        die_with_launcher()
    try:
        code = work()
    except Exception as error:
        is_users_mistake = isinstance(error, UserError)
        code = 2 if is_users_mistake else 1
        message = str(error) if is_users_mistake else f"{type(error).__name__}: {error}"
        report_failure(code, message, trace="" if is_users_mistake else traceback.format_exc())
        if not was_launched():
            raise
    sys.exit(code)
