"""What a Landlock domain lets a process open, connect to and signal. Each test has a process of its own."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpufaas_gpu_manager.isolation import landlock

ABI = landlock.abi()
pytestmark = pytest.mark.skipif(not ABI, reason="this kernel has no Landlock")

SYSTEM = sorted(
    {"/usr", "/lib", "/lib64", "/bin", "/etc", sys.prefix, sys.base_prefix, *(path for path in sys.path if path)}
)


def run(
    code: str, *, read: list[str] | None = None, write: tuple[str, ...] = (), ports: str = "None", abi: int = ABI
) -> str:
    program = f"""
import contextlib, errno, os, signal, socket, subprocess, sys
from gpufaas_gpu_manager.isolation import landlock
def errno_of(function, *args):
    try:
        function(*args)
    except OSError as error:
        return error.errno
    return 0
landlock.restrict({SYSTEM if read is None else read!r}, {write!r}, {ports}, {abi}, ["/dev/null", "/dev/is-not-there"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program + textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_path_that_is_not_named_is_neither_read_nor_listed_nor_written(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    assert run(f"""
        os.chdir("{tmp_path}")
        print(errno_of(open, "secret"), errno_of(os.listdir, "."), errno_of(open, "new", "w"),
              errno_of(os.truncate, "secret", 0) if {ABI} >= 3 else 13)
    """) == "13 13 13 13"  # fmt: skip
    assert (tmp_path / "secret").read_text() == "x"


def test_a_path_to_read_is_read_and_executed_and_not_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("#!/bin/sh\necho ran")
    (tmp_path / "file").chmod(0o755)
    assert run(f"""
        file = "{tmp_path}/file"
        print(open(file).read()[:2], os.listdir("{tmp_path}"), subprocess.check_output([file]).decode().strip(),
              errno_of(open, file, "a"), errno_of(os.unlink, file), errno_of(os.mkdir, "{tmp_path}/new"))
    """, read=[*SYSTEM, str(tmp_path)]) == "#! ['file'] ran 13 13 13"  # fmt: skip


def test_a_file_among_the_paths_opens_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "other").write_text("other")
    assert run(f"""
        with open("{tmp_path}/mine", "r+") as mine:
            print(mine.read(), errno_of(open, "{tmp_path}/other"))
    """, write=(f"{tmp_path}/mine",)) == "mine 13"  # fmt: skip


def test_below_a_path_to_write_all_may_be_done(tmp_path: Path) -> None:
    assert run(f"""
        os.chdir("{tmp_path}")
        os.makedirs("a/b"); open("a/file", "w").close(); os.mkfifo("fifo"); os.symlink("a", "link")
        socket.socket(socket.AF_UNIX).bind("socket")
        if {ABI} >= 2:
            os.rename("a/file", "a/b/file"); os.link("a/b/file", "linked"); os.unlink("a/b/file")
        else:
            os.unlink("a/file")
        os.rmdir("a/b"); os.rmdir("a")
        print("all")
    """, write=(str(tmp_path),)) == "all"  # fmt: skip


def test_devices_are_used_and_none_that_is_not_named() -> None:
    assert run("""
        open("/dev/null", "r+").close()
        print(errno_of(open, "/dev/zero"))
    """) == "13"  # fmt: skip


@pytest.mark.skipif(ABI < 4, reason="ports need ABI 4")
def test_tcp_connects_to_the_ports_that_are_named_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = one.getsockname()[1], two.getsockname()[1]
        asks = f"""
            asked = [errno_of(socket.create_connection, ("127.0.0.1", port)) for port in {ports}]
            socket.create_server(("127.0.0.1", 0))
            print(*asked)
        """
        assert run(asks, ports=f"[{ports[0]}]") == "0 13"
        assert run(asks, ports="[]") == "13 13"
        assert run(asks) == "0 0"
        assert run(asks, ports="[]", abi=3) == "0 0", "an older ABI knows no ports"


@pytest.mark.skipif(ABI < 6, reason="signals and abstract sockets need ABI 6")
def test_signals_and_abstract_sockets_go_to_its_own_processes_only() -> None:
    with socket.socket(socket.AF_UNIX) as outside:
        outside.bind(b"\0gpufaas-test-%d" % os.getpid())
        outside.listen()
        asks = f"""
            sleeps = subprocess.Popen(["sleep", "60"])
            sleeps.kill()
            inside = socket.socket(socket.AF_UNIX); inside.bind(b"\\0gpufaas-test-in-%d" % os.getpid()); inside.listen()
            connects = [errno_of(socket.socket(socket.AF_UNIX).connect, address)
                        for address in ({outside.getsockname()!r}, inside.getsockname())]
            print(errno_of(os.kill, os.getppid(), 0), sleeps.wait(), *connects)
        """
        assert run(asks) == "1 -9 1 0"
        assert run(asks, abi=5) == "0 -9 0 0", "an older ABI does not know them"


def test_a_program_that_it_executes_is_held_and_gets_no_rights_of_its_own(tmp_path: Path) -> None:
    assert run(f"""
        print(subprocess.run(["ls", "{tmp_path}"], capture_output=True).returncode,
              subprocess.check_output(["grep", "NoNewPrivs", "/proc/self/status"]).split()[1].decode())
    """, read=[*SYSTEM, "/proc"]) == "2 1"  # fmt: skip
