"""Exposure of a run on one host: to its network, to other users and to readers of its folder.

All tests share one run, in a network namespace if one can be created.  Its environment contains secrets and names a
cluster's network interface.
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
from tests.support.listeners import Listener, list_namespace_listeners

NOBODY = 65_534
SECRETS = {name: secrets.token_hex(16) for name in ("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "SOMETHING_OF_MINE")}
TRAIN = [sys.executable, "-m", "megabatch", "train", "smoke", "train.epochs=2", "comm.timeline=true", "--ranks", "2"]
# Reads "address port" lines and prints whether a connection succeeds.
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
    answers: dict[int, str]  # result of connecting from another host, by port
    skip_reason: str  # why there is no other host, or ""


def watch(run: "subprocess.Popen[str]", here: Host, there: Host) -> tuple[set[Listener], dict[int, str]]:
    found, answers = set[Listener](), dict[int, str]()
    with there.start([sys.executable, "-c", KNOCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as knock:
        assert knock.stdin and knock.stdout
        while run.poll() is None:
            found |= list_namespace_listeners(run.pid)
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
    place.chmod(0o755)  # instead of pytest's 0700
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


def test_ports_listen_only_on_loopback_and_refuse_another_host(seen: Seen) -> None:
    if seen.skip_reason:
        pytest.skip(f"needs root and iproute2: {seen.skip_reason}")
    assert len(seen.listeners) >= 2  # one of Gloo per rank; the launcher does not listen
    assert [listener for listener in seen.listeners if not listener.is_private] == []
    assert {*seen.answers.values()} == {"Connection refused"}


def test_files_of_a_run_are_private_to_its_user(seen: Seen) -> None:
    paths = [seen.folder, *seen.folder.rglob("*")]
    assert {"model.safetensors", "state.json", "train.log", "rank-1.json"} <= {path.name for path in paths}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir() and not path.is_symlink()} == {0o700}
    assert [
        (path.name, oct(path.stat().st_mode)) for path in paths if path.is_file() and path.stat().st_mode & 0o177
    ] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: runs code as another user")
def test_other_users_cannot_list_read_or_join_a_run(seen: Seen) -> None:
    for command, path in (("ls", ""), ("cat", "model.safetensors"), ("touch", "x")):
        words = [command, str(seen.folder / path)]
        done = subprocess.run(words, capture_output=True, text=True, user=NOBODY, group=NOBODY, extra_groups=[])
        assert "Permission denied" in done.stderr


def test_secrets_in_the_environment_are_neither_written_nor_printed(seen: Seen) -> None:
    contents = {path.name: path.read_bytes() for path in seen.folder.rglob("*") if path.is_file()}
    assert len(contents) > 8 and b'"variables"' in contents["env.json"]
    contents["out"] = seen.output.encode()
    for secret in SECRETS.values():
        assert [name for name, content in contents.items() if secret.encode() in content] == []
