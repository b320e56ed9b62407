"""This machine, as ranks tell one another of it: its identity, a free port, the interface that has an address."""

import fcntl
import os
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def machine_id() -> str:
    """The same where process numbers mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def free_port(ip: str) -> int:
    """One that no process listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
        probe.bind((ip, 0))
        port: int = probe.getsockname()[1]
    return port


def address_towards(host: str) -> str:
    """This machine's IPv4 address as `host` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        address: str = probe.getsockname()[0]
    return address


def interface_of(ip: str) -> str | None:
    """The name of the interface with that IPv4 address, if this machine has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(found[20:24]) == ip:
                return name
    return None
