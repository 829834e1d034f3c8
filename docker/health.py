"""
Ends with 0 if the service in this container is alive: its status port answers.

    python /opt/gpufaas/health.py [/readyz]

The port is GPUFAAS_STATUS_PORT, else that which the role has by default.
"""

import http.client
import os
import sys

DEFAULTS = {"scheduler": 7071, "node": 7081, "gateway": 7091}


def main() -> None:
    port = int(os.environ.get("GPUFAAS_STATUS_PORT") or DEFAULTS[os.environ["GPUFAAS_ROLE"]])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.5)
    try:
        connection.request("GET", sys.argv[1] if len(sys.argv) > 1 else "/healthz")
        answer = connection.getresponse()
        if answer.status != 200:
            sys.exit(f"status {answer.status}: {answer.read(500).decode(errors='replace')}")
    except OSError as exc:
        sys.exit(f"port {port}: {exc}")


if __name__ == "__main__":
    main()
