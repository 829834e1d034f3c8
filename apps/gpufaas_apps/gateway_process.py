"""One of several gateway processes on a port: `gpufaas_apps.gateway_processes` starts it, and sends its options."""

import os
import pickle
import signal
import sys

from gpufaas_apps import gateway
from gpufaas_apps.options import GatewayOptions
from gpufaas_core.errors import GpufaasError
from gpufaas_gpu_manager.confine import end_with_parent


def main() -> int:
    options, parent = pickle.load(sys.stdin.buffer)
    assert isinstance(options, GatewayOptions)
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return 1  # it ended before it would have been noticed
    try:
        gateway.run(options)
    except GpufaasError as exc:
        print(f"gpufaas: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
