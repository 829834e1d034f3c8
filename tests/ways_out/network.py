"""Ways out by sockets: the management routes, doors, and what others send."""

import base64
import fcntl
import http.client
import json
import os
import socket
import struct

from tests.ways_out.ways import Facts, way_out


def _gets(facts: Facts, path: str, password: str = "", method: str = "GET", body: str = "") -> str:
    """Return the answer of the gateway if it is one."""
    connection = http.client.HTTPConnection("127.0.0.1", facts["port"], timeout=20)
    token = base64.b64encode(f"admin:{password}".encode()).decode()
    connection.request(method, path, body or None, {"Authorization": f"Basic {token}"} if password else {})
    answer = connection.getresponse()
    text = answer.read(1 << 20).decode("latin-1")
    if answer.status >= 300:
        raise OSError(f"{answer.status} {text[:200]}")
    return f"{answer.status} {text}"


@way_out("lists functions, with their variables, without the password", "variable")
def functions_without_the_password(facts: Facts) -> str:
    return _gets(facts, "/system/functions?namespace=others")


@way_out("makes a secret without the password")
def secret_without_the_password(facts: Facts) -> str:
    body = json.dumps({"name": facts["mark"], "value": "x"})
    return _gets(facts, "/system/secrets", method="POST", body=body)


@way_out("reads another function's log without the password")
def log_without_the_password(facts: Facts) -> str:
    return _gets(facts, "/system/logs?name=prey&namespace=others&follow=false")


@way_out("uses the password, had it been stolen", "variable", root_only=True)
def functions_with_a_stolen_password(facts: Facts) -> str:
    return _gets(facts, "/system/functions?namespace=others", facts["stolen"])


@way_out("uses the stolen password from a socket that is closed before it is looked at", "secret_was_made",
         root_only=True)  # fmt: skip
def stolen_password_and_away(facts: Facts) -> str:
    body = json.dumps({"name": f"{facts['mark']}-away", "value": "x"})
    token = base64.b64encode(f"admin:{facts['stolen']}".encode()).decode()
    head = f"POST /system/secrets HTTP/1.1\r\nHost: x\r\nAuthorization: Basic {token}\r\nContent-Type: application/json"
    with socket.create_connection(("127.0.0.1", facts["port"])) as connection:
        connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    return f"{facts['mark']}-away"


@way_out("uses the stolen password from ::1 or another address of this machine", "variable", root_only=True)
def stolen_password_from_elsewhere(facts: Facts) -> str:
    token = base64.b64encode(f"admin:{facts['stolen']}".encode()).decode()
    with socket.create_connection(("127.0.0.1", facts["port"]), 20, ("127.9.9.9", 0)) as connection:
        head = f"GET /system/functions?namespace=others HTTP/1.0\r\nHost: x\r\nAuthorization: Basic {token}"
        connection.sendall(f"{head}\r\n\r\n".encode())
        answer = b""
        while piece := connection.recv(65_536):
            answer += piece
    return answer.decode("latin-1")


@way_out("reads the platform's metrics", root_only=True)
def metrics(facts: Facts) -> str:
    return _gets(facts, "/metrics")


@way_out("opens the management page")
def management_page(facts: Facts) -> str:
    return _gets(facts, "/ui/")


@way_out("reads the platform's state through the address that it calls others with", "variable")
def management_by_its_own_address(facts: Facts) -> str:
    path = "/" + os.environ["OPENFAAS_URL"].split("/", 3)[3].rstrip("/")
    return _gets(facts, f"{path}/system/functions?namespace=others")


@way_out("listens to what others send on the loopback", "sniffed")
def loopback(facts: Facts) -> str:
    all_protocols = 3
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(all_protocols)) as ear:
        ear.bind(("lo", all_protocols))
        ear.settimeout(5)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mouth:
            mouth.sendto(facts["mark"].encode(), ("127.0.0.1", 9))
        for _ in range(500):
            if facts["mark"].encode() in ear.recv(65_536):
                return facts["mark"]
    return ""


@way_out("has a raw socket")
def raw_socket(_: Facts) -> str:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    return "opened"


@way_out("has a socket of MPTCP, which limits of TCP ports do not hold")
def multipath_socket(_: Facts) -> str:
    socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262).close()
    return "opened"


@way_out("sees what the kernel's packet filter does")
def packet_filter(_: Facts) -> str:
    netfilter = 12
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, netfilter).close()
    return "opened"


@way_out("has a socket to the machine that this one runs on")
def socket_to_the_hypervisor(_: Facts) -> str:
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
    return "opened"


@way_out("changes the machine's network interfaces")
def network_interface(_: Facts) -> str:
    get, put = 0x8913, 0x8914
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = fcntl.ioctl(any_socket, get, struct.pack("16s24x", b"lo"))
        fcntl.ioctl(any_socket, put, flags)  # to what they are
    return "set"


@way_out("has a socket of a rare family, where the kernel's faults are")
def rare_socket(_: Facts) -> str:
    socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET).close()
    return "opened"


@way_out("connects to an abstract socket of the operator's", "abstract")
def abstract_socket(facts: Facts) -> str:
    return _reads(f"\0{facts['abstract_name']}")


@way_out("connects to a socket of the operator's, as that of a container engine", "path_socket")
def path_socket(facts: Facts) -> str:
    return _reads(facts["socket"])


@way_out("calls another function's program past the gateway, by its socket")
def socket_of_another(facts: Facts) -> str:
    folder = f"{facts['data']}/sockets"
    for root, _, names in os.walk(folder):
        for name in names:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(f"{root}/{name}")
                return name
    raise FileNotFoundError(folder)


@way_out("listens on the gateway's port beside it")
def port_of_the_gateway(facts: Facts) -> str:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", facts["port"]))
        listener.listen()
    return "listened"


def _reads(address: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(address)
        return str(connection.recv(100), "utf-8")
