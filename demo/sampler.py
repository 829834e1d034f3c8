"""
How much memory the workers of each device hold, seen from outside: /proc is read, and nothing asked of the platform.

    python -m demo.sampler ZYGOTE_PID

Twenty times a second, for every child of the zygote: its private dirty pages, and every file page that it has mapped
(weights count in full, and so do the library pages that it touched), added up by the device that its process name
begins with. On SIGTERM the peaks are printed as JSON: ``{"cpu:0": {"peak": bytes, "workers": most at once}, ...}``.
"""

import json
import signal
import sys
import time

INTERVAL_S = 0.05


def main() -> None:
    zygote = int(sys.argv[1])
    peaks: dict[str, dict[str, int]] = {}
    samples = 0
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    while not stopping:
        began = time.monotonic()
        sums: dict[str, list[int]] = {}
        for pid in children(zygote):
            try:
                device, size = device_of(pid), size_of(pid)
            except (OSError, ValueError):
                continue  # it ended while we looked
            if device:
                sums.setdefault(device, []).append(size)
        for device, sizes in sums.items():
            seen = peaks.setdefault(device, {"peak": 0, "workers": 0})
            seen["peak"] = max(seen["peak"], sum(sizes))
            seen["workers"] = max(seen["workers"], len(sizes))
        samples += 1
        time.sleep(max(0.0, INTERVAL_S - (time.monotonic() - began)))
    print(json.dumps({"samples": samples, "devices": peaks}), flush=True)


def children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(each) for each in file.read().split()]
    except OSError:
        return []


def device_of(pid: int) -> str:
    """Return the device of a worker, ``cpu:0``; empty for a process that has not named itself yet."""
    with open(f"/proc/{pid}/comm") as file:
        name = file.read().strip().partition(" ")[0]
    return name if ":" in name else ""


def size_of(pid: int) -> int:
    """Return the bytes that a worker holds of its own."""
    kilobytes = 0
    for path, wanted in (("smaps_rollup", ("Private_Dirty:",)), ("status", ("RssFile:",))):
        with open(f"/proc/{pid}/{path}") as file:
            kilobytes += sum(int(line.split()[1]) for line in file if line.startswith(wanted))
    return kilobytes * 1024


if __name__ == "__main__":
    main()
