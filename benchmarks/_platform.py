"""Starts and stops a platform, and the servers that it is compared with."""

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
from _started import ENGINE

ROOT = Path(__file__).resolve().parent.parent
STARTED = Path(__file__).with_name("_started.py")


@functools.cache
def interpreter_of(tree: Path) -> str:
    """
    Return the Python that runs the code of the working tree *tree*: for another one than this, that of its ``.venv``.

    Where it has none, an environment is made for as long as this program runs: its packages, and what else is here.
    """
    own = tree / ".venv" / "bin" / "python"
    if tree == ROOT:
        return sys.executable
    if own.exists():
        return str(own)
    made = Path(tempfile.mkdtemp(prefix="gpufaas-bench-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    venv.create(made, symlinks=True)
    rooms = sorted({str(each.parents[1]) for each in tree.glob("*/gpufaas*/__init__.py")})
    rest = [each for each in sys.path if each.endswith("site-packages")]  # not its .pth files, which name this tree
    (next(made.glob("lib/*/site-packages")) / "tree.pth").write_text("\n".join([*rooms, *rest, ""]))
    return str(made / "bin" / "python")


def is_code_of(tree: Path, told: Mapping[str, str]) -> str:
    """
    Return what runs the engine, ``Python`` or ``machine code``: that is taken where it was made of the packages' code.

    :param told: what `_started.code` said in a process
    :raises SystemExit: a package does not come from *tree*
    """
    engine = told.get(ENGINE, ".py")
    for name, file in told.items():
        if Path(file).resolve().parents[2:3] != (tree,) and (name != ENGINE or engine.endswith(".py")):
            raise SystemExit(f"{name} comes from {file}: what is to be measured is the code of {tree}")
    return "Python" if engine.endswith(".py") else "machine code"


def serves_with(tree: Path, option: str) -> bool:
    """Return whether `gpufaas serve` of *tree* has *option*."""
    command = [interpreter_of(tree), "-m", "gpufaas_cli", "serve", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
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
def started(tree: Path, arguments: Sequence[str], url: str, **kwargs: object) -> Iterator[subprocess.Popen[bytes]]:
    """
    Run `gpufaas` of *tree* with *arguments* until the block ends; *url* answers 200 when it begins.

    :raises SystemExit: it does not come up, or runs other code than that of *tree*
    """
    with tempfile.NamedTemporaryFile(prefix="gpufaas-bench-") as told:
        command = [interpreter_of(tree), "-P", str(STARTED), told.name, *arguments]
        with process(command, url, **kwargs) as child:  # type: ignore[arg-type]
            is_code_of(tree, json.load(told))
            yield child


@contextlib.contextmanager
def platform(
    *options: str, tree: Path = ROOT, home: Path | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """
    Serve; give URL, process and a working directory with the data: a new one that does not stay, or *home*.

    :param tree: whose platform it is
    """
    url = f"http://127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="gpufaas-bench-", ignore_cleanup_errors=True) as folder:
        here = home or Path(folder)
        command = ["serve", "--port", url.rpartition(":")[2], "--data", str(here / "data"), *options]
        with started(tree, command, f"{url}/healthz", stdout=subprocess.DEVNULL) as child:
            yield url, child, here


def gpufaas(url: str, *arguments: str, cwd: Path | None = None, tree: Path = ROOT) -> str:
    """Run the CLI of *tree* against *url*; its output, or the end of this program with what it said."""
    done = subprocess.run(
        [interpreter_of(tree), "-m", "gpufaas_cli", *arguments],
        env={**os.environ, "OPENFAAS_URL": url},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"gpufaas {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
