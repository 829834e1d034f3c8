"""What a worker sees and may do in a root of its own, and within all walls. Each test has processes of its own."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from gpufaas_core.errors import InvalidSpec
from gpufaas_gpu_manager.isolation import levels, root
from gpufaas_gpu_manager.isolation.walls import Walls

WORKS = {each.name: each for each in levels.tried()[1]}
UID = 1_912_345_678
as_root = pytest.mark.skipif(not WORKS["uid of each function"].works, reason=WORKS["uid of each function"].why)


@pytest.fixture(params=["mount", "user"])
def kind(request: pytest.FixtureRequest) -> str:
    try:
        assert run("found = 1", request.param) == 1
    except AssertionError as why:
        pytest.skip(str(why).strip().splitlines()[-1])
    return str(request.param)


def run(code: str, kind: str, *, own: str = "", binds: tuple[str, ...] = (), more: str = "") -> Any:
    """Return what *code* leaves as `found`, in a process that has entered."""
    program = f"""
import contextlib, getpass, json, os, resource, socket, subprocess, sys, tempfile
from gpufaas_gpu_manager.isolation import entry, root
from gpufaas_gpu_manager.isolation.walls import Own, Walls
def fault(function, *args):
    try:
        function(*args)
    except OSError as error:
        return type(error).__name__ if error.errno != 30 else "read-only"
    return ""
walls = Walls(root={kind!r}, binds={binds!r} {more})
root.begin(walls)
entry.enter(walls, Own(room=2**26, uid={UID if kind == "mount" else 0}, {own}))
{textwrap.dedent(code)}
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def machine(tmp_path: Path, kind: str) -> Path:
    """A data directory with a bundle, another's, a directory to write to, and a link to weights elsewhere."""
    for name in ("data/bundles/own", "data/bundles/other", "data/compiled/own", "elsewhere", "opened", "shown"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    if kind == "mount":
        os.chown(tmp_path / "data/compiled/own", UID, UID)
        os.chown(tmp_path / "opened", UID, UID)
    return tmp_path


def own_of(machine: Path) -> str:
    at = machine / "data"
    return f"read=('{at}/bundles/own', '{machine}/linked'), write=('{at}/compiled/own',), scratch='{at}/scratch/7'"


def test_a_worker_sees_what_is_its_own_at_its_path_and_nothing_beside_it(kind: str, machine: Path) -> None:
    found = run(f"""
        at = "{machine}"
        found = [sorted(os.listdir(each)) for each in (at, f"{{at}}/data", f"{{at}}/data/bundles")]
        found += [open(f"{{at}}/data/bundles/own/file").read(), open(f"{{at}}/linked/file").read()]
    """, kind, own=own_of(machine))  # fmt: skip
    assert found == [
        ["data", "elsewhere", "linked"], ["bundles", "compiled", "scratch"], ["own"], "data/bundles/own", "elsewhere",
    ]  # fmt: skip


def test_it_writes_to_its_own_directories_and_to_those_that_are_opened_only(kind: str, machine: Path) -> None:
    binds = (f"{machine}/opened:rw", f"{machine}/shown")
    found = run(f"""
        at = "{machine}"
        places = [f"{{at}}/data/compiled/own", f"{{at}}/data/scratch/7", "/tmp", "/dev/shm", "/home/function",
                  f"{{at}}/opened", f"{{at}}/shown", f"{{at}}/data/bundles/own", sys.prefix, "/usr", "/proc/self/comm"]
        found = [fault(open, each if "comm" in each else f"{{each}}/new", "w") for each in places]
    """, kind, own=own_of(machine), binds=binds)  # fmt: skip
    assert found == [""] * 6 + ["read-only"] * 5
    assert {each.name for each in (machine / "opened").iterdir()} == {"file", "new"}


def test_python_lies_read_only_in_a_directory_that_is_opened(kind: str) -> None:
    """The operator may open a directory in which a virtual environment lies."""
    above = str(Path(sys.prefix).resolve().parent)
    found = run('found = fault(open, f"{sys.prefix}/new", "w")', kind, binds=(f"{above}:rw",))
    assert found == "read-only"


def test_all_that_it_writes_in_its_root_holds_so_much_as_its_room(kind: str) -> None:
    found = run("""
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**25, 2**26))
        found = []
        for name in ("/tmp/a", "/dev/shm/b", "/home/function/c"):
            with contextlib.suppress(OSError), open(name, "wb") as file:
                for _ in range(25):
                    file.write(bytes(2**20))
            found.append(os.stat(name).st_size)
    """, kind)  # fmt: skip
    assert sum(found) <= 2**26 < 3 * 25 * 2**20


def test_names_of_users_and_hosts_python_and_devices_are_there(kind: str) -> None:
    found = run("""
        for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
            os.environ.pop(name, None)
        said = subprocess.run([sys.executable, "-c", "import email; print(1)"], capture_output=True, text=True)
        found = [getpass.getuser(), os.path.expanduser("~function"), said.stdout,
                 bool(socket.getaddrinfo("localhost", 80)), len(open("/dev/urandom", "rb").read(8)),
                 sorted(os.listdir("/dev")), os.path.exists("/etc/shadow")]
    """, kind)  # fmt: skip
    nodes = ["fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "urandom", "zero"]
    assert found == ["function", "/home/function", "1\n", True, 8, nodes, False]


def test_secrets_are_at_the_path_of_openfaas_too(kind: str, machine: Path) -> None:
    secrets = f"{machine}/data/bundles/own"
    found = run('found = os.listdir("/var/openfaas/secrets")', kind, own=f"read=('{secrets}',), secrets='{secrets}'")
    assert found == ["file"]


@as_root
def test_it_has_its_uid_and_no_capability_and_ends_with_its_parent() -> None:
    found = run("""
        import ctypes
        number, dumpable = ctypes.c_int(), ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
        ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
        status = dict(each.split(":", 1) for each in open("/proc/self/status").read().splitlines())
        found = [os.getresuid(), os.getresgid(), os.getgroups(), number.value, dumpable,
                 int(status["CapEff"], 16) | int(status["CapPrm"], 16), int(status["NoNewPrivs"]),
                 resource.getrlimit(resource.RLIMIT_CORE), fault(os.setuid, 0),
                 [each for each in os.listdir("/proc") if each.isdigit() and int(each) != os.getpid()]]
    """, "mount", more=", uids=True")  # fmt: skip
    ids = [UID] * 3
    assert found == [ids, ids, [], 9, 1, 0, 1, [0, 0], "PermissionError", []]


def test_the_kernel_kills_it_with_its_parent_which_it_forgets_when_credentials_change(kind: str) -> None:
    found = run("""
        import ctypes
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(number))
        found = number.value
    """, kind)  # fmt: skip
    assert found == signal.SIGKILL


def test_it_may_open_fewer_files_than_the_platform_whose_user_it_shares(kind: str) -> None:
    """Else it could fill sockets with as many files as that user may send: the platform could start no process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = run("found = resource.getrlimit(resource.RLIMIT_NOFILE)", kind)
    assert found == [soft // 2] * 2


def test_within_all_walls_the_machine_is_out_of_reach(kind: str) -> None:
    if not WORKS["Landlock"].works or not WORKS["seccomp"].works:
        pytest.skip("this kernel has not all of them")
    found = run(
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        denied = [libc.unshare(0x20000), libc.mount(b"x", b"/tmp", b"tmpfs", 0, None), libc.umount2(b"/usr", 2)]
        found = [fault(os.kill, os.getppid(), 0), denied, fault(open, f"/proc/{os.getppid()}/environ"),
                 fault(os.chroot, "/tmp"), fault(open, "/tmp/x", "w")]
    """,
        kind,
        more=", landlock=6, seccomp=True",
    )
    environ = "FileNotFoundError" if kind == "mount" else "PermissionError"
    assert found == ["PermissionError", [-1, -1, -1], environ, "PermissionError", ""]


@pytest.mark.skipif(not WORKS["Landlock"].works, reason=WORKS["Landlock"].why)
def test_where_no_root_is_to_be_had_landlock_names_the_same_paths(tmp_path: Path) -> None:
    for name in ("own", "other", "compiled"):
        (tmp_path / name).mkdir()
    found = run(f"""
        import wave
        at = "{tmp_path}"
        found = [fault(os.listdir, f"{{at}}/own"), fault(open, f"{{at}}/own/new", "w"),
                 fault(os.listdir, f"{{at}}/other"), fault(open, f"{{at}}/compiled/new", "w"),
                 fault(open, "/dev/null", "w"), fault(open, "/etc/passwd")]
    """, "", own=f"read=('{tmp_path}/own',), write=('{tmp_path}/compiled',)", more=", landlock=6")  # fmt: skip
    assert found == ["", "PermissionError", "PermissionError", "", "", "PermissionError"]


def test_python_in_a_directory_with_files_of_others_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "platform").mkdir()
    root.check(str(tmp_path / "platform"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with pytest.raises(InvalidSpec, match=rf"needs {tmp_path}, where .* \(--data\) have files: move them"):
        root.check(str(tmp_path / "platform"))


def test_strict_names_what_is_missing_and_best_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    none = tuple(levels.Mechanism(each.name, False, "it is off here", needed=each.needed) for each in WORKS.values())
    monkeypatch.setattr(levels, "tried", lambda: (Walls(), none))
    with pytest.raises(InvalidSpec, match=r"lacks .*Landlock \(it is off here\).*or start with --isolation best"):
        levels.walls("strict")
    assert levels.walls("best") == Walls()


def test_a_mechanism_whose_trial_hangs_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "_PATIENCE_S", 0.05)

    assert "did not answer in 0.05 s" in levels._attempt(lambda: time.sleep(60))
