"""The address on which rank 0 accepts connections follows from the environment."""

from __future__ import annotations

import socket

import pytest
from psutil._ntuples import snicaddr

from dapo_megatron.cluster import address
from dapo_megatron.cluster.address import cluster_address, engines_endpoint
from dapo_megatron.types import ConfigError

TWO_MACHINES = {"LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "4", "GLOO_SOCKET_IFNAME": "ib0"}, "127.0.0.1"),
        (TWO_MACHINES | {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "h1"}, "127.0.0.1"),
        (TWO_MACHINES | {"GLOO_SOCKET_IFNAME": "lo,ib0"}, "127.0.0.1"),
        (TWO_MACHINES | {"MASTER_ADDR": "127.0.0.1"}, "127.0.0.1"),
        (TWO_MACHINES | {"MASTER_ADDR": "localhost"}, "127.0.0.1|::1"),
    ],
)
def test_the_address_follows_from_the_environment(environ: dict[str, str], expected: str) -> None:
    assert cluster_address(4, environ) in expected.split("|")


def interface(*entries: tuple[int, str]) -> list[snicaddr]:
    return [snicaddr(family, text, None, None, None) for family, text in entries]


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ([(17, "02:fc:00:00:00:01"), (10, "fd00::2"), (2, "10.0.0.2")], "10.0.0.2"),
        ([(10, "fe80::fc:ff:fe00:1%ib0"), (10, "fd00::2")], "fd00::2"),
    ],
)
def test_an_interface_gives_its_address_preferably_of_ipv4(
    addresses: list[tuple[int, str]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address.psutil, "net_if_addrs", lambda: {"ib0": interface(*addresses)})
    assert cluster_address(4, TWO_MACHINES | {"GLOO_SOCKET_IFNAME": "ib0"}) == expected


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        ({}, "MASTER_ADDR: not set: "),
        ({"MASTER_ADDR": "0.0.0.0"}, "MASTER_ADDR: 0.0.0.0: not an address"),
        ({"MASTER_ADDR": "::"}, "MASTER_ADDR: ::: not an address"),
        ({"MASTER_ADDR": "198.51.100.7"}, "MASTER_ADDR: 198.51.100.7: not an address"),
        ({"MASTER_ADDR": "h1"}, "MASTER_ADDR: h1: not an address"),
        ({"GLOO_SOCKET_IFNAME": "none9"}, "GLOO_SOCKET_IFNAME: .* no network interface none9"),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "GLOO_SOCKET_IFNAME: .* ib0 has no IP address"),
    ],
)
def test_without_an_address_for_other_machines_the_error_names_the_variable(
    environ: dict[str, str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo
    # As on machines whose /etc/hosts maps their own name to loopback.
    monkeypatch.setattr(
        address.socket,
        "getaddrinfo",
        lambda name, *a, **k: resolve("127.0.1.1" if name == "h1" else name, *a, **k),
    )
    only_link_local = interface((10, "fe80::fc:ff:fe00:1%ib0"))
    monkeypatch.setattr(address.psutil, "net_if_addrs", lambda: {"ib0": only_link_local})
    with pytest.raises(ConfigError, match=f"^{error}.*GLOO_SOCKET_IFNAME"):
        cluster_address(4, TWO_MACHINES | environ)


def test_an_engine_connects_to_the_address_in_the_environment() -> None:
    assert engines_endpoint({"DAPO_MEGATRON_ENGINES": "node1:20003"}) == "tcp://node1:20003"
    with pytest.raises(ConfigError, match="--connect: missing, and DAPO_MEGATRON_ENGINES"):
        engines_endpoint({})
