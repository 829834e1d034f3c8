"""
Fetching an artifact from another node: a peer's process serves it over loopback, another fetches, hashes and syncs it.

Against `cp` and `sync` of the same file, and `cp` and `sha256sum` of it, which is the work that a fetch has to do; A B
A B, medians, and ratios in one run. Memory is what the fetching process grew by at most.

    .venv/bin/python benchmarks/fetch.py [--size 1000] [--rounds 3] [--directory DIR]
"""

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from _platform import free_port

from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.bundles import BundleStore
from gpufaas_cache_manager.fetcher import Fetcher
from gpufaas_cache_manager.peers import PeerClient

SERVE = """
import sys, uvicorn
from pathlib import Path
from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.peers import PeerArtifacts
app = PeerArtifacts(ArtifactStore(Path(sys.argv[1])), "token")
uvicorn.run(app, port=int(sys.argv[2]), loop="uvloop", lifespan="off", access_log=False, log_level="error")
"""


async def fetch(root: Path, url: str, digest: str) -> tuple[float, int]:
    """Return the seconds that it took, and the bytes that this process grew by."""
    artifacts = ArtifactStore(root / "artifacts")

    async def holders(_: str) -> list[str]:
        return [url]

    fetcher = Fetcher(artifacts, BundleStore(root / "bundles", artifacts), holders, PeerClient("token"))
    process = psutil.Process()
    before = most = process.memory_info().rss

    def look(_done: int, _size: int) -> None:
        nonlocal most
        most = max(most, process.memory_info().rss)

    began = time.perf_counter()
    await fetcher.ensure(digest, progress=look)
    seconds = time.perf_counter() - began
    await fetcher.close()
    return seconds, most - before


def timed(*commands: list[str]) -> float:
    began = time.perf_counter()
    for command in commands:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1000, help="MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", help="where both sides keep their files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        root, size = Path(folder), options.size * 1_000_000
        source, block = ArtifactStore(root / "source"), os.urandom(1_000_000)
        hasher = hashlib.sha256()
        for _ in range(options.size):
            hasher.update(block)
        digest = hasher.hexdigest()
        with source.writer(digest) as writer:
            for _ in range(options.size):
                writer.write(block)
        path, copy = source.path(digest), root / "copy"
        port = free_port()
        peer = subprocess.Popen([sys.executable, "-c", SERVE, str(root / "source"), str(port)])
        times: dict[str, list[float]] = {"fetch": [], "cp": [], "cp and sha256": []}
        grown: list[int] = []
        try:
            time.sleep(3)  # it is listening by then; if not, the first fetch asks again
            for _ in range(options.rounds):
                seconds, growth = asyncio.run(fetch(root / "node", f"http://127.0.0.1:{port}", digest))
                times["fetch"].append(seconds)
                grown.append(growth)
                shutil.rmtree(root / "node")
                times["cp"].append(timed(["cp", str(path), str(copy)], ["sync", str(copy)]))
                copy.unlink()
                both = [["cp", str(path), str(copy)], ["sync", str(copy)], ["sha256sum", str(copy)]]
                times["cp and sha256"].append(timed(*both))
                copy.unlink()
        finally:
            peer.kill()
            peer.wait()
    speed = {name: size / 1e6 / statistics.median(each) for name, each in times.items()}
    ratios = {
        f"fetch / {name}": statistics.median(b / a for a, b in zip(times["fetch"], times[name], strict=True))
        for name in ("cp", "cp and sha256")
    }
    print(json.dumps({
        "MB": options.size, "MB/s": {name: round(each) for name, each in speed.items()},
        "ratio": {name: round(each, 2) for name, each in ratios.items()}, "grown_MB": round(max(grown) / 1e6, 1),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
