"""Starts and stops a platform, and the servers that it is compared with."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
GPUFAAS = (sys.executable, "-m", "gpufaas_cli")


def command_of(tree: Path) -> tuple[str, ...]:
    """Return how `gpufaas` of the working tree *tree* is run: this one's Python, or that in its ``.venv``."""
    return GPUFAAS if tree == ROOT else (str(tree / ".venv" / "bin" / "python"), "-m", "gpufaas_cli")


def serves_with(tree: Path, option: str) -> bool:
    """Return whether `gpufaas serve` of *tree* has *option*."""
    shown = subprocess.run([*command_of(tree), "serve", "--help"], capture_output=True, text=True, check=True).stdout
    return f" {option} " in " ".join(shown.split())


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def process(
    command: Sequence[str], url: str, timeout_s: float = 60.0, **kwargs: object
) -> Iterator[subprocess.Popen[bytes]]:
    """Run *command* until the block ends; *url* answers 200 when it begins."""
    child = subprocess.Popen(command, **kwargs)  # type: ignore[call-overload]
    try:
        until = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url, timeout=5).status_code == 200:
                    break
            if child.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{' '.join(command)} did not come up (status {child.poll()})")
            time.sleep(0.02)
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def platform(*options: str, tree: Path = ROOT) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """Serve from a fresh data directory; give URL, process and a working directory. *tree*: whose platform it is."""
    home = Path(tempfile.mkdtemp(prefix="gpufaas-bench-"))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [*command_of(tree), "serve", "--port", str(port), "--data", str(home / "data"), *options]
    try:
        with process(command, f"{url}/healthz", stdout=subprocess.DEVNULL) as child:
            yield url, child, home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def gpufaas(url: str, *arguments: str, cwd: Path | None = None, tree: Path = ROOT) -> str:
    """Run the CLI of *tree* against *url*; its output, or the end of this program with what it said."""
    done = subprocess.run(
        [*command_of(tree), *arguments],
        env={**os.environ, "OPENFAAS_URL": url},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"gpufaas {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
