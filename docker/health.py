"""
Ends with 0 if the service in this container is alive: its status port answers.

    python -IS /opt/gpufaas/health.py [/readyz]

The port is GPUFAAS_STATUS_PORT, else that which the role has by default. It runs every few seconds in every container,
so it imports next to nothing.
"""

import os
import socket
import sys

DEFAULTS = {"scheduler": 7071, "node": 7081, "gateway": 7091}


def main() -> None:
    port = int(os.environ.get("GPUFAAS_STATUS_PORT") or DEFAULTS[os.environ["GPUFAAS_ROLE"]])
    path = sys.argv[1] if len(sys.argv) > 1 else "/healthz"
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=4.0) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = b""
            while piece := connection.recv(4096):
                answer += piece
    except OSError as exc:
        sys.exit(f"port {port}: {exc}")
    status = answer.split(b" ", 2)[1:2]
    if status != [b"200"]:
        sys.exit(answer[-500:].decode(errors="replace") or f"port {port} says nothing")


if __name__ == "__main__":
    main()
