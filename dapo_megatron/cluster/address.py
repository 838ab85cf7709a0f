"""The address on which rank 0 accepts connections from engine servers."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from ipaddress import ip_address

import psutil

from dapo_megatron.cluster.join import is_one_machine
from dapo_megatron.types import ConfigError

LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
_HOW = f"set {INTERFACE} to the network interface of the cluster (such as ib0 or eth0)"

ENGINES = "DAPO_MEGATRON_ENGINES"
"""Environment variable with the address of rank 0 for engines on other machines, as HOST:PORT."""


def pool_endpoint(world_size: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return the endpoint on which rank 0 waits for engines: that of ENGINES if it is set, else any
    free port. Raises ConfigError if it is not an address of this machine."""
    host, colon, port = environ.get(ENGINES, "").rpartition(":")
    if not colon:
        return f"tcp://{cluster_address(world_size, environ)}:0"
    if not port.isdigit():
        raise ConfigError(f"{ENGINES}: {environ[ENGINES]!r} is not HOST:PORT")
    return f"tcp://{_local_address(host, ENGINES)}:{port}"


def engines_endpoint(environ: Mapping[str, str] = os.environ) -> str:
    """Return the endpoint to which engines connect, from ENGINES. Raises ConfigError without it."""
    if ENGINES not in environ:
        raise ConfigError(f"--connect: missing, and {ENGINES} (HOST:PORT of rank 0) is not set")
    return f"tcp://{environ[ENGINES]}"


def cluster_address(world_size: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return the IP address of this machine that the other ranks can reach.

    It is loopback if all ranks are on one machine, else the address of the interface in
    GLOO_SOCKET_IFNAME, else the one of MASTER_ADDR. Raises ConfigError if this machine has none.
    """
    if is_one_machine(world_size, environ):
        return LOOPBACK
    # gloo accepts several interfaces, separated by commas.
    if interface := environ.get(INTERFACE, "").partition(",")[0]:
        return _address_of_interface(interface)
    return _local_address(environ.get("MASTER_ADDR", ""), "MASTER_ADDR")


def address_towards(endpoint: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the IP address of this machine on the network of the cluster: of the interface in
    GLOO_SOCKET_IFNAME, else the one from which it reaches `endpoint`. Raises ConfigError."""
    if interface := environ.get(INTERFACE, "").partition(",")[0]:
        return _address_of_interface(interface)
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def _address_of_interface(interface: str) -> str:
    addresses = psutil.net_if_addrs().get(interface)
    if addresses is None:
        raise ConfigError(f"{INTERFACE}: this machine has no network interface {interface}; {_HOW}")
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in addresses:
            # A link-local address means nothing to a machine of another link.
            if address.family == family and not ip_address(address.address).is_link_local:
                return str(address.address)
    raise ConfigError(f"{INTERFACE}: the network interface {interface} has no IP address; {_HOW}")


def _local_address(name: str, variable: str) -> str:
    try:
        answers = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM) if name else []
    except OSError as error:
        raise ConfigError(f"{variable}: {name}: {error.strerror}; {_HOW}") from None
    for family, _, _, _, (address, *_) in answers:
        if _is_usable(str(address), name) and _is_local(family, str(address)):
            return str(address)
    raise ConfigError(
        f"{variable}: {name or 'not set'}: not an address of rank 0's machine that other "
        f"machines can reach; {_HOW}"
    )


def _is_usable(address: str, name: str) -> bool:
    ip = ip_address(address)
    if ip.is_unspecified or ip.is_link_local:
        return False
    # /etc/hosts may map a machine's own name to loopback. Other machines cannot connect to that.
    return not ip.is_loopback or name in ("localhost", address)


def _is_local(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
