"""
How much memory the workers of each device hold, seen from outside: /proc is read, and nothing asked of the platform.

    python -m demo.sampler FORK_SERVER_PID

Twenty times a second, for each child of the fork server: its private dirty pages, each file page that it has mapped
(weights count in full, and so do the library pages that it touched), added up by the device that its process name
begins with. On SIGTERM the peaks are printed as JSON: ``{"cpu:0": {"peak": bytes, "workers": most at once}, ...}``.
"""

import contextlib
import json
import signal
import sys
import time
from pathlib import Path

INTERVAL_S = 0.05


def main() -> None:
    server = int(sys.argv[1])
    peaks: dict[str, dict[str, int]] = {}
    samples = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            began = time.monotonic()
            for device, sizes in sizes_now(server).items():
                seen = peaks.setdefault(device, {"peak": 0, "workers": 0})
                seen["peak"] = max(seen["peak"], sum(sizes))
                seen["workers"] = max(seen["workers"], len(sizes))
            samples += 1
            time.sleep(max(0.0, INTERVAL_S - (time.monotonic() - began)))
    print(json.dumps({"samples": samples, "devices": peaks}), flush=True)


def sizes_now(server: int) -> dict[str, list[int]]:
    """Return by device what each of its workers holds; what ends while we look is left out."""
    sizes: dict[str, list[int]] = {}
    with contextlib.suppress(OSError):
        for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split():
            with contextlib.suppress(OSError, ValueError):
                if device := device_of(pid):
                    sizes.setdefault(device, []).append(size_of(pid))
    return sizes


def device_of(pid: str) -> str:
    """Return the device of a worker, ``cpu:0``; empty for a process that has not named itself yet."""
    name = Path(f"/proc/{pid}/comm").read_text().strip().partition(" ")[0]
    return name if ":" in name else ""


def size_of(pid: str) -> int:
    """Return the bytes that a worker holds of its own."""
    kilobytes = 0
    for path, wanted in (("smaps_rollup", "Private_Dirty:"), ("status", "RssFile:")):
        lines = Path(f"/proc/{pid}/{path}").read_text().splitlines()
        kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith(wanted))
    return kilobytes * 1024


if __name__ == "__main__":
    main()
