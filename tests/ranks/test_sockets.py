import os
import socket
import sys
import threading
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch.ranks.discover import RankInfo
from megabatch.ranks.machine import EVERYWHERE, address_of, listening_on, on_loopback
from megabatch.ranks.store import open_store
from megabatch.ranks.world import connect
from tests.support.listeners import own_listeners

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc/net lists sockets")


def test_a_rank_whose_peers_are_all_here_listens_on_loopback_whatever_a_cluster_has_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    before = own_listeners()
    with connect(RankInfo(0, 1, 0, 1), "cpu", dist.HashStore()) as world:  # type: ignore[attr-defined]
        world.all_reduce(torch.ones(3))
        opened = own_listeners() - before
        assert opened and all(listener.is_private for listener in opened)
        assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "none-such" and "NCCL_SOCKET_IFNAME" not in os.environ


def test_between_hosts_the_interface_is_whoever_set_it_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    with on_loopback(is_alone=True):
        assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0" and os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    with on_loopback(is_alone=False):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"


@pytest.mark.parametrize("address", ["127.0.0.1", "node-that-nobody-knows"])
def test_the_store_that_rank_0_opens_for_ranks_of_its_host_is_on_loopback(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(listening_on("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    before, stores = own_listeners(), dict[int, Any]()
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
    assert {(listener.address, listener.port) for listener in own_listeners() - before} == {("127.0.0.1", port)}


def test_rank_0_listens_where_its_hosts_name_leads_if_that_is_an_address_that_others_can_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"node7": ["fd00::7", "10.1.2.7"], "six": ["fd00::6"], "debian": ["127.0.1.1"]}

    def resolve(host: str, *_: object, **__: object) -> list[Any]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert [address_of(host) for host in (*known, "other")] == ["10.1.2.7", "fd00::6", EVERYWHERE, EVERYWHERE]


def test_an_address_that_leads_here_and_is_not_of_this_host_leaves_all_interfaces() -> None:
    with closing(listening_on("203.0.113.9", 0)) as listener:  # as that of a service that forwards to it
        assert listener.getsockname()[0] == "0.0.0.0"
