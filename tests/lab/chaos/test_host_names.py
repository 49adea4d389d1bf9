"""Hosts whose own name does not resolve, with addresses without reverse DNS entries, as on many private networks."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from megabatch_lab.chaos.namespaces import Host, namespaces

from megabatch.errors import UserError
from tests.support.small_runs import SMALL_RUN

NAME = "unknown-{}"
START = 'hostname "$1" && shift && exec "$@"'


@pytest.fixture
def hosts() -> Iterator[Sequence[Host]]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(namespaces(2))
        except UserError as error:
            pytest.skip(f"needs root and iproute2: {error}")
        yield found


def test_ranks_on_hosts_whose_names_do_not_resolve_connect_without_a_setting_or_warning(
    hosts: Sequence[Host], tmp_path: Path
) -> None:
    joined = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29400"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "NCCL_", "TORCH_"))}
    train = [sys.executable, "-m", "megabatch", "train", *SMALL_RUN, f"run.dir={tmp_path / 'run'}"]
    with ExitStack() as stack:
        ranks = []
        for rank, host in enumerate(hosts):
            process = host.start(
                ["unshare", "--uts", "sh", "-c", START, "sh", NAME.format(rank), *train],
                cwd=tmp_path,
                env=kept | joined | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            ranks.append(process)
        results = [(*rank.communicate(timeout=100), rank.returncode) for rank in ranks]
    assert [(errors, code) for _, errors, code in results] == [("", 0)] * 2
    output = results[0][0]
    assert f"rank 0 on {NAME.format(0)}" in output.splitlines()[0] and "finished" in output
