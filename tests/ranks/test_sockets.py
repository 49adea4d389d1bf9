import os
import socket
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch.errors import UserError
from megabatch.ranks import store as store_module
from megabatch.ranks import world
from megabatch.ranks.backends import Backend, join_gloo
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.lifecycle import run_as_rank
from megabatch.ranks.machine import (
    ALL_INTERFACES,
    address_towards,
    interface_of,
    listen_address,
    listen_on,
    on_interface,
)
from megabatch.ranks.store import RankStore, await_address, find_interface, open_store, require_same_launch
from megabatch.ranks.world import connect
from tests.support.listeners import list_process_listeners

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc/net lists sockets")


def test_ranks_on_a_single_host_listen_on_loopback_and_ignore_gloo_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    before = list_process_listeners()
    with connect(RankInfo(0, 1, 0, 1), "cpu") as world:
        world.all_reduce(torch.ones(3))
        opened = list_process_listeners() - before
        assert opened and all(listener.is_private for listener in opened)
        assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "none-such" and "NCCL_SOCKET_IFNAME" not in os.environ


def test_between_hosts_interface_variables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    with on_interface(is_single_node=True):
        assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0" and os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    with on_interface(is_single_node=False, gloo_default="eth0"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with on_interface(is_single_node=False, gloo_default="eth0"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_the_interface_of_an_address_is_found() -> None:
    assert (address_towards("127.0.0.1"), interface_of("127.0.0.1")) == ("127.0.0.1", "lo")
    assert interface_of("203.0.113.9") is None and interface_of("2001:db8::9") is None
    if Path("/proc/net/if_inet6").read_text().count("00000000000000000000000000000001"):
        assert interface_of("::1") == "lo"


@pytest.mark.parametrize("there", ["127.0.1.1", ""], ids=["as on Debian", "unresolved"])
def test_gloo_uses_the_interface_towards_rank_0_and_on_its_host_the_one_towards_another_rank(
    there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The name of rank 0's host is `there` on that host, and 10.1.2.7 on the other.
    def resolve(host: str) -> str:
        if not here.address:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return str(here.address)

    here, store = threading.local(), dist.HashStore()  # type: ignore[attr-defined]
    routes = {"10.1.2.7": "10.1.2.8", "10.1.2.8": "10.1.2.7", "127.0.1.1": "127.0.0.1", "127.0.0.1": "127.0.0.1"}
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setattr(store_module, "resolve", resolve)
    monkeypatch.setattr(store_module, "address_towards", routes.get)
    monkeypatch.setattr(store_module, "interface_of", lambda address: f"interface of {address}")
    found = dict[int, str | None]()

    def find(rank: int, address: str) -> None:
        here.address = address
        found[rank] = find_interface(store, RankInfo(rank, 2, 0, 1))

    threads = [threading.Thread(target=find, args=each) for each in enumerate([there, "10.1.2.7"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: "interface of 10.1.2.7", 1: "interface of 10.1.2.8"}
    here.address = "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # no other host can connect to it
    assert find_interface(dist.HashStore(), RankInfo(0, 2, 0, 1)) is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("device", "backend", "uses_gloo"),
    [("cpu", "gloo", True), ("cuda", "nccl", False), ("cuda", "cpu:gloo,cuda:nccl", True)],  # the last: selftest
)
def test_an_interface_is_chosen_for_every_backend_with_gloo(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str, uses_gloo: bool
) -> None:
    class Connecting(Exception): ...

    def connect_nothing(*_: Any) -> None:
        raise Connecting(os.environ.get("GLOO_SOCKET_IFNAME"))

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(world, "find_interface", lambda store, info: "eth7")
    monkeypatch.setattr(world, "set_rank_device", lambda info, device_type: torch.device(device_type, 0))
    monkeypatch.setattr(world, "require_separate_devices", lambda *_: None)
    monkeypatch.setattr(world, "run_interruptibly", connect_nothing)
    info, used = RankInfo(0, 2, 0, 1), Backend(backend, join_gloo)
    store = RankStore(info, dist.HashStore())  # type: ignore[attr-defined]
    with pytest.raises(Connecting) as connecting, connect(info, device, store, backend=used):
        pass
    assert connecting.value.args == ("eth7" if uses_gloo else None,)


def test_a_name_of_rank_0_that_does_not_resolve_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(host: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(store_module, "resolve", resolve)
    monkeypatch.setattr(store_module, "RESOLVE_S", 0.0)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UserError, match=r"'node7', does not resolve .*; set MASTER_ADDR"):
        await_address("node7")
    capsys.readouterr()
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setattr(os, "_exit", sys.exit)
    for local_rank in (0, 1):
        with pytest.raises(SystemExit, match="2"):
            run_as_rank(RankInfo(8 + local_rank, 16, local_rank, 8), lambda store: 0)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "MASTER_ADDR" in line)
    assert line.startswith(f"megabatch: rank 8 on {os.uname().nodename}: the host of rank 0, 'node7', does not resolve")
    names = iter([socket.gaierror(socket.EAI_AGAIN, "Try again"), "10.1.2.7"])

    def resolve_later(host: str) -> str:
        found = next(names)
        if isinstance(found, OSError):
            raise found
        return str(found)

    monkeypatch.setattr(store_module, "resolve", resolve_later)
    monkeypatch.setattr(store_module, "LONGEST_PAUSE_S", 0.0)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # there names appear when pods run
    assert await_address("job-0.job") == "10.1.2.7"
    assert "'job-0.job', does not resolve" in capsys.readouterr().err


def test_a_port_of_another_launch_is_reported_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store, first = dist.HashStore(), "Slurm's step 5.0"  # type: ignore[attr-defined]
    require_same_launch(store, RankInfo(0, 2), first)
    require_same_launch(store, RankInfo(1, 2), first)
    with pytest.raises(UserError, match=r"step 5.1, .*port of .*step 5.0; set MASTER_PORT"):
        require_same_launch(store, RankInfo(1, 2), "Slurm's step 5.1")
    with closing(listen_on("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UserError, match=rf"port {port} of .* is in use.*; set MASTER_PORT to a free port"):
            open_store(RankInfo(0, 2, 0, 2))


@pytest.mark.parametrize("address", ["127.0.0.1", "unknown-node"])
def test_store_of_a_single_host_is_on_loopback(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(listen_on("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    before, stores = list_process_listeners(), dict[int, Any]()
    threads = [
        threading.Thread(target=lambda rank=rank: stores.update({rank: open_store(RankInfo(rank, 2, rank, 2))}))  # type: ignore[misc]
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stores[1].set("a", "b")
    assert stores[0].get("a") == b"b"
    assert {(listener.address, listener.port) for listener in list_process_listeners() - before} == {
        ("127.0.0.1", port)
    }


def test_rank_0_listens_on_the_address_of_its_host_name_if_others_can_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"node7": ["fd00::7", "10.1.2.7"], "six": ["fd00::6"], "debian": ["127.0.1.1"]}

    def resolve(host: str, *_: object, **__: object) -> list[Any]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert [listen_address(host) for host in (*known, "other")] == [
        "10.1.2.7",
        "fd00::6",
        ALL_INTERFACES,
        ALL_INTERFACES,
    ]


def test_an_address_that_is_forwarded_here_means_all_interfaces() -> None:
    with closing(listen_on("203.0.113.9", 0)) as listener:  # as of a Kubernetes service
        assert listener.getsockname()[0] == "0.0.0.0"
