"""What a run on one host leaves open: to its network, to other users, to whoever reads its folder.

One run for all of it, in a network namespace where that can be made, started among secrets and with a set-up that names
a cluster's interface.
"""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from megabatch_lab.chaos.namespaces import Host, namespaces

from megabatch.errors import UserError
from tests.support.listeners import Listener, listeners_beside

NOBODY = 65_534
SECRETS = {name: secrets.token_hex(16) for name in ("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "SOMETHING_OF_MINE")}
TRAIN = [sys.executable, "-m", "megabatch", "train", "smoke", "train.epochs=2", "comm.timeline=true", "--ranks", "2"]
# Asked for "address port" lines, it says whether anybody answers there.
KNOCK = """
import socket, sys
for line in sys.stdin:
    address, port = line.split()
    try:
        socket.create_connection((address, int(port)), timeout=5).close()
        print("open", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


class Seen(NamedTuple):
    folder: Path
    output: str
    listeners: set[Listener]
    answers: dict[int, str]  # of every port, asked from another host
    why_unseen: str  # if so


def watch(run: "subprocess.Popen[str]", here: Host, there: Host) -> tuple[set[Listener], dict[int, str]]:
    found, answers = set[Listener](), dict[int, str]()
    with there.start([sys.executable, "-c", KNOCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as knock:
        assert knock.stdin and knock.stdout
        while run.poll() is None:
            found |= listeners_beside(run.pid)
            for port in {listener.port for listener in found if listener.kind.startswith("tcp")} - {*answers}:
                knock.stdin.write(f"{here.address} {port}\n")
                knock.stdin.flush()
                answers[port] = knock.stdout.readline().strip()
            time.sleep(0.1)
        knock.stdin.close()
    return found, answers


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    place = tmp_path_factory.mktemp("open")
    place.chmod(0o755)  # and not pytest's own 0700
    command, environment = [*TRAIN, f"run.dir={place / 'run'}"], os.environ | SECRETS | {"GLOO_SOCKET_IFNAME": "eth0"}
    before = os.umask(0o022)
    found, answers, why = set[Listener](), dict[int, str](), ""
    with ExitStack() as stack:
        stack.callback(os.umask, before)
        out = stack.enter_context((place / "out").open("w+"))
        try:
            here, there = stack.enter_context(namespaces(2))
        except UserError as error:
            why = str(error)
            done = subprocess.run(command, env=environment, stdout=out, stderr=out)
        else:
            run = here.start(command, env=environment, stdout=out, stderr=out)
            found, answers = watch(run, here, there)
            done = subprocess.CompletedProcess(command, run.returncode)
        assert done.returncode == 0, (place / "out").read_text()
        yield Seen(place / "run", (place / "out").read_text(), found, answers, why)


def test_nothing_listens_beyond_loopback_and_another_host_is_refused_at_every_port(seen: Seen) -> None:
    if seen.why_unseen:
        pytest.skip(f"needs root and iproute2: {seen.why_unseen}")
    assert len(seen.listeners) >= 2  # one of Gloo for each rank; the launcher has none
    assert [listener for listener in seen.listeners if not listener.is_private] == []
    assert {*seen.answers.values()} == {"Connection refused"}


def test_what_a_run_leaves_is_its_users_alone(seen: Seen) -> None:
    paths = [seen.folder, *seen.folder.rglob("*")]
    assert {"model.safetensors", "state.json", "train.log", "rank-1.json"} <= {path.name for path in paths}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir() and not path.is_symlink()} == {0o700}
    assert [
        (path.name, oct(path.stat().st_mode)) for path in paths if path.is_file() and path.stat().st_mode & 0o177
    ] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user is asked")
def test_another_user_can_neither_list_nor_read_nor_join_a_run(seen: Seen) -> None:
    for command in (["ls", seen.folder], ["cat", seen.folder / "model.safetensors"], ["touch", seen.folder / "x"]):
        done = subprocess.run(command, capture_output=True, text=True, user=NOBODY, group=NOBODY, extra_groups=[])
        assert "Permission denied" in done.stderr


def test_no_secret_of_the_environment_is_in_any_file_of_the_run_or_printed(seen: Seen) -> None:
    contents = {path.name: path.read_bytes() for path in seen.folder.rglob("*") if path.is_file()}
    assert len(contents) > 8 and b'"variables"' in contents["env.json"]
    contents["out"] = seen.output.encode()
    for secret in SECRETS.values():
        assert [name for name, content in contents.items() if secret.encode() in content] == []
