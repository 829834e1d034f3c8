"""
The list of ways out (`tests/ways_out`), tried by functions of each form against what is not theirs. What a way says of
itself is proven from outside: by a canary that only its goal holds, or by what has changed.
"""

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import sys
import sysconfig
import tempfile
import textwrap
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.files import as_user
from tests.integration.conftest import HTTP, TORCH, Platform, lives
from tests.integration.test_servers import DOCKERFILE, INDEX
from tests.waiting import until
from tests.ways_out.every import WAYS, Way
from tests.ways_out.ways import memory_of

from gpufaas_cli.bundles import BuildRequest, build

USER = 64123
"""Who runs the platform where it is not root."""
RESERVED_MIB, TOO_MUCH = 96, 192 << 20
PROGRAM = "python3-of"

_IMPORTS = (
    "import brought, os, sys\n"
    "sys.path.insert(0, os.path.dirname(__file__))\n"
    "from tests.ways_out.every import answer_of\n"
)
BROUGHT = """
import os

try:
    found = open({path!r}).read()
except OSError as exc:
    found = str(exc)
print("brought", os.getpid(), found, flush=True)
"""
"""A module of a package that the thief requires. It reads what is the operator's, and tells whose process ran it."""
THIEF = {
    HTTP: "def handle(event, context):\n    return {'statusCode': 200, 'body': answer_of(event.body.decode())}\n",
    TORCH: "def load(device): pass\n\ndef handle(model, event, context):\n    return answer_of(event.text)\n",
    PROGRAM: "def handle(text):\n    return answer_of(text)\n",
}
PREY = """
    # {code}
    import ctypes, json, os, time

    MEMORY = bytearray(b"MEM-" + os.urandom(16).hex().encode())
    ANSWER = bytearray(b"ANS-" + os.urandom(16).hex().encode())
    libc = ctypes.CDLL(None)

    def at(array):
        return ctypes.addressof((ctypes.c_char * len(array)).from_buffer(array))

    def leave(folder):
        path = os.path.join(folder, "prey-" + os.urandom(4).hex())
        with open(path, "w") as file:
            file.write(MEMORY.decode())
        return path

    def shown():
        libc.shmat.restype = ctypes.c_void_p
        segment = libc.shmget(0, 4096, 0o1600)
        ctypes.memmove(libc.shmat(segment, None, 0), bytes(MEMORY), 36)
        name = "/prey-" + os.urandom(4).hex()
        queue = libc.mq_open(name.encode(), os.O_CREAT | os.O_RDWR, 0o600, None)
        libc.mq_send(queue, bytes(MEMORY), 36, 0)
        leave(os.environ["GPUFAAS_SCRATCH"])
        return {{"prey": os.getpid(), "address": at(MEMORY), "answer_at": at(ANSWER), "system_v_id": segment,
                 "queue": name, "temporary": leave("/tmp"), "shared": leave("/dev/shm")}}

    def handle(event, context):
        asked = event.body.decode()
        if asked == "shown":
            return {{"statusCode": 200, "body": {{"facts": shown(), "canary": MEMORY.decode()}}}}
        if asked.startswith("clean "):
            libc.mq_unlink(asked[6:].encode())
        if asked == "slow":
            time.sleep(0.05)
        if asked == "anew":
            ANSWER[:] = b"ANS-" + os.urandom(16).hex().encode()
        return {{"statusCode": 200, "body": bytes(ANSWER)}}
"""


SERVED = """
    import os

    def handle(text):
        return f"{os.getpid()} {os.environ['OPENFAAS_URL']}"
"""


DECOY = """
    import os

    os.symlink({socket!r}, os.environ["GPUFAAS_SOCKET"])

    def handle(text):
        return text
"""


def canary(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"


class Scene:
    """A platform with two functions that have something to lose, an operator who has, too, and what a thief knows."""

    def __init__(self, home: Path, level: str, form: str, user: int = 0) -> None:
        self.home, self.form, self.user = home, form, user
        self.canaries = {
            name: canary(prefix)
            for name, prefix in {"password": "PW", "key": "KEY", "token": "TOKEN", "secret": "SECRET", "code": "CODE",
                                 "variable": "VAR", "operators_variable": "OPS", "abstract": "ABS",
                                 "path_socket": "SOCK"}.items()
        }  # fmt: skip
        self.facts: dict[str, Any] = {
            "home": f"{home}/user", "runtime": f"{home}/run", "auth": f"{home}/auth", "token": f"{home}/user/token",
            "kept": f"{home}/kept", "open_folder": f"{home}/open", "socket": f"{home}/operator.sock",
            "data": f"{home}/data", "stolen": self.canaries["password"], "abstract_name": canary("ways"),
            "mark": canary("mark"), "too_much": TOO_MUCH, "packages": sysconfig.get_paths()["purelib"],
            "disk": home.stat().st_dev,
        }  # fmt: skip
        self.reached: set[str] = set()
        """The operator's sockets to which somebody has connected."""
        self._lay_out()
        self.platform = Platform(
            home,
            "--device",
            "cpu:0=1GiB",
            "--auth",
            "on",
            "--auth-dir",
            self.facts["auth"],
            "--isolation",
            level,
        )
        self.platform.http.auth = ("admin", self.canaries["password"])
        self.platform.prefix = [
            *(as_user(home, user) if user else ()), "env", f"HOME={self.facts['home']}",
            f"XDG_RUNTIME_DIR={self.facts['runtime']}", f"OPERATORS={self.canaries['operators_variable']}",
        ]  # fmt: skip
        self.failures: dict[str, str] = {}
        """Why what failed did: the kernel's words, or the call's."""
        self._later: list[tuple[str, str]] = []

    def _lay_out(self) -> None:
        for name, text in {"user/.ssh/id_ed25519": "key", "user/token": "token", "auth/basic-auth-password": "password",
                           "kept/file": "key"}.items():  # fmt: skip
            path = self.home / name
            path.parent.mkdir(mode=0o700, parents=True) if not path.parent.exists() else None
            path.write_text(self.canaries[text])
            path.chmod(0o600)
        (self.home / "auth/basic-auth-user").write_text("admin")
        (self.home / "run").mkdir(mode=0o700)
        (self.home / "open").mkdir()
        (self.home / "open").chmod(0o1777)
        for kind, address in (("abstract", "\0" + self.facts["abstract_name"]), ("path_socket", self.facts["socket"])):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(address)
            listener.listen()
            threading.Thread(target=self._tell, args=(listener, kind), daemon=True).start()
        if self.user:
            for path in (self.home, *self.home.rglob("*")):
                os.chown(path, self.user, self.user, follow_symlinks=False)

    def _tell(self, listener: socket.socket, kind: str) -> None:
        while True:
            connection, _ = listener.accept()
            self.reached.add(kind)
            with connection, contextlib.suppress(OSError):
                connection.sendall(self.canaries[kind].encode())

    # --- functions ---

    def start(self) -> None:
        self.platform.start()
        api = self.platform.http
        assert api.post("/system/namespace/", json={"name": "others"}).status_code == 201
        secret = {"name": "canary", "value": self.canaries["secret"], "namespace": "others"}
        assert api.post("/system/secrets", json=secret).status_code == 201
        owned = {"namespace": "others", "secrets": ["canary"]}
        prey = self._deploy("prey", PREY.format(code=self.canaries["code"]), HTTP, **owned)
        variables = {"CANARY": self.canaries["variable"]}
        self._deploy("served", SERVED, PROGRAM, **owned, envVars=variables)
        thief = self._deploy("thief", _IMPORTS + THIEF[self.form], self.form)
        data = self.facts["data"]
        served, self.canaries["url"] = self.platform.call("/function/served.others").text.split()
        self.facts |= {
            "serve": self.platform.pid, "fork_server": self.platform.fork_server().pid, "served": int(served),
            "port": self.platform.port, "prey_digest": prey, "prey_bundle": f"{data}/bundles/{prey}",
            "bundle": f"{data}/bundles/{thief}", "archive": f"{data}/artifacts/sha256/{prey[:2]}/{prey}",
            "handle": handle_of(f"{data}/secrets/others/canary"),
        }  # fmt: skip
        self.meet()

    def _deploy(self, name: str, source: str, lang: str, **fields: Any) -> str:
        folder = self.home / "sources" / name
        folder.mkdir(parents=True)
        (folder / "handler.py").write_text(textwrap.dedent(source))
        (folder / "__init__.py").touch()
        if source.startswith(_IMPORTS):
            ways = Path(__file__).parents[1] / "ways_out"
            shutil.copytree(ways, folder / "tests" / "ways_out", ignore=shutil.ignore_patterns("__pycache__"))
            self._bring_a_package(folder)
        template = self.home / "template" / PROGRAM
        if not template.exists():
            (template / "function").mkdir(parents=True)
            (template / "index.py").write_text(INDEX)
            (template / "Dockerfile").write_text(DOCKERFILE)
            (template / "template.yml").write_text(f"language: {PROGRAM}\nfprocess: python index.py\n")
        request = BuildRequest(name, lang, folder, build_root=self.home / "build", template_dirs=(template.parent,))
        built = build(request)
        for digest, path in built.files:
            sent = self.platform.http.put(f"/system/artifacts/{digest}", content=path.read_bytes())
            assert sent.status_code in (200, 201), sent.text
        limits = {"gpufaas.memory": f"{RESERVED_MIB}Mi", "gpufaas.timeout": "15s"}
        spec = {"service": name, "image": name, **fields,
                "annotations": {"gpufaas.bundle": built.digest, **limits}}  # fmt: skip
        if lang == PROGRAM:
            spec["envProcess"] = "python index.py"
        answer = self.platform.http.post("/system/functions", json=spec)
        assert answer.status_code in (200, 202), answer.text
        return built.digest

    def _bring_a_package(self, folder: Path) -> None:
        """Require a package whose modules have names that Python, and the platform, import by themselves."""
        names = ("sitecustomize", "usercustomize", "gpufaas_functions/__init__", "gpufaas_gpu_manager/__init__")
        members = {f"{name}.py": "import brought\n" for name in names} | {
            "brought.py": BROUGHT.format(path=f"{self.facts['home']}/.ssh/id_ed25519"),
            "brought.pth": "import brought\n",
            "brought-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: brought\nVersion: 1\n",
            "brought-1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "brought-1.dist-info/RECORD": "",
        }
        wheel = self.home / "brought-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            for name, text in members.items():
                file.writestr(name, text)
        (folder / "requirements.txt").write_text(f"{wheel}\n")

    def meet(self) -> None:
        """Learn of the prey's process what the thief knows of it, and what it does not."""
        shown = self.platform.call("/function/prey.others", b"shown").json()
        self.facts |= shown["facts"]
        for name in ("memory", "temporary", "shared", "scratch", "system_v", "message"):
            self.canaries[name] = shown["canary"]

    # --- trying ---

    def open_ways(self) -> dict[str, str]:
        """Try all ways; return those that work, with their evidence."""
        found = {}
        for name, way in sorted(WAYS.items(), key=lambda each: each[1].proof in ENDS):
            if way.in_cluster or (way.root_only and self.user):
                continue
            evidence = self._evidence(name)
            if way.proof in LATER:
                self._later.append((name, evidence))
            elif evidence and self.proves(way, evidence):
                found[name] = evidence[:100]
        found |= self._after_removal()
        if self.form == PROGRAM and self._decoy_is_followed():
            found["socket_that_leads_elsewhere"] = "the platform connected there"
        for name, way in WAYS.items():  # shown when a test fails
            print("OPEN  " if name in found else "closed", way.tells, found.get(name) or self.failures.get(name, ""))
        return found

    def _evidence(self, name: str) -> str:
        asked = json.dumps({"way": name, "facts": self.facts}).encode()
        others = [self.platform.begin("/function/prey.others", b"slow")] if WAYS[name].proof == "went_on" else []
        answer = self.platform.call("/function/thief", asked)
        assert all(each.result().status_code == 200 for each in others), f"{name}: it ended others' calls"
        if answer.status_code != 200:  # it ended its worker
            self.failures[name] = answer.text
            return ""
        told = answer.json()
        self.failures[name] = told.get("failed", "")
        assert not re.match("NameError|AttributeError|TypeError|KeyError|Import", told.get("failed", "")), (name, told)
        return str(told["evidence"])

    def proves(self, way: Way, evidence: str) -> bool:
        """Return whether *evidence* shows that *way* reached its goal."""
        if way.proof in self.canaries:
            return self.canaries[way.proof] in evidence
        return bool(getattr(self, way.proof)(evidence))

    def claimed(self, _: str) -> bool:
        """The kernel allowed it: nothing else is to be seen."""
        return True

    went_on = claimed

    def log_filled(self, _: str) -> bool:
        """A worker may print 4 MiB at once, and then 1 MiB a second."""
        return sum(each.stat().st_size for each in Path(self.facts["data"], "logs").glob("thief*")) > 12 << 20

    def same_file(self, evidence: str) -> bool:
        device, inode, path = evidence.split(":", 2)
        found = os.stat(path)
        return (int(device), int(inode)) == (found.st_dev, found.st_ino)

    def planted(self, evidence: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(evidence)
            return True
        return False

    def package(self, evidence: str) -> bool:
        said = evidence + self.platform.log("thief") + self.platform.said()
        others = {str(self.facts[name]) for name in ("serve", "fork_server", "prey", "served")}
        return self.canaries["key"] in said or not others.isdisjoint(re.findall(r"brought (\d+)", said))

    def suid_of_root(self, evidence: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(evidence)
            return found.st_uid == 0 and bool(found.st_mode & stat.S_ISUID)
        return False

    def is_root(self, evidence: str) -> bool:
        return bool(re.search(r"^\s*0\s+0\s+4294967295\n(.*\n)*Uid:\s+0\s+0\s", evidence, re.MULTILINE))

    def command(self, evidence: str) -> bool:
        return evidence == Path(f"/proc/{self.facts['served']}/cmdline").read_text()

    def descriptors(self, evidence: str) -> bool:
        return set("012") < set(evidence.split())

    def map(self, evidence: str) -> bool:
        return Path(f"/proc/{self.facts['serve']}/maps").read_text().partition("\n")[0] in evidence

    def database(self, evidence: str) -> bool:
        return "/gpufaas.db" in evidence

    def sniffed(self, evidence: str) -> bool:
        return evidence == self.facts["mark"]

    def answer_changed(self, _: str) -> bool:
        changed = b"EVIL" in self.platform.call("/function/prey.others").content
        self.platform.call("/function/prey.others", b"anew")
        return changed

    def logged(self, evidence: str) -> bool:
        query = {"name": "prey", "namespace": "others"}
        return within_a_second(lambda: evidence in self.platform.http.get("/system/logs", params=query).text)

    def secret_was_made(self, evidence: str) -> bool:
        return within_a_second(lambda: evidence in self.platform.http.get("/system/secrets").text)

    def stopped(self, _: str) -> bool:
        prey = psutil.Process(self.facts["prey"])
        was = within_a_second(lambda: prey.status() == psutil.STATUS_STOPPED)
        prey.send_signal(signal.SIGCONT)
        return was

    def ended(self, _: str) -> bool:
        pid = self.facts["prey"]
        was = within_a_second(lambda: not psutil.pid_exists(pid) or not lives(psutil.Process(pid)))
        self.meet()
        return was

    def _after_removal(self) -> dict[str, str]:
        """Remove the thief; return the ways whose success shows then."""
        workers = {int(each.pid) for each in self.platform.workers()}
        self.platform.http.request("DELETE", "/system/functions", json={"functionName": "thief"}).raise_for_status()
        until(lambda: {each.pid for each in self.platform.workers()} < workers, "its worker has ended")
        return {name: evidence for name, evidence in self._later if evidence and self.proves(WAYS[name], evidence)}

    def _decoy_is_followed(self) -> bool:
        """Deploy a program that puts a link to a socket of the operator's where its own is looked for."""
        self.reached.clear()
        self.platform.http.timeout = 5  # it is not found to be ready
        with contextlib.suppress(httpx.TimeoutException):
            self._deploy("decoy", DECOY.format(socket=self.facts["socket"]), PROGRAM)
        return "path_socket" in self.reached

    def outlived(self, evidence: str) -> bool:
        pid = int(evidence)
        if within_a_second(lambda: not psutil.pid_exists(pid) or not lives(psutil.Process(pid)), 5):
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    def link_was_followed(self, evidence: str) -> bool:
        kept = Path(self.facts["kept"])
        within_a_second(lambda: not os.path.lexists(evidence))
        return not (kept / "file").exists() or kept.stat().st_uid != self.user

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.platform.call("/function/prey.others", b"clean " + self.facts["queue"].encode())
            Path(self.facts["temporary"]).unlink(missing_ok=True)
        self.platform.close()


LATER = ("outlived", "link_was_followed")
ENDS = ("stopped", "ended", "log_filled", *LATER)
"""What changes the scene is tried last."""


def within_a_second(claim: Any, limit_s: float = 1) -> bool:
    with contextlib.suppress(AssertionError):
        until(claim, timeout_s=limit_s)
        return True
    return False


def handle_of(path: str) -> str:
    """Return the kernel's handle of a file, in hex."""
    handle, mount = ctypes.create_string_buffer(136), ctypes.c_int()
    ctypes.memmove(handle, (128).to_bytes(4, sys.byteorder), 4)
    if ctypes.CDLL(None).name_to_handle_at(-100, path.encode(), handle, ctypes.byref(mount), 0):
        return "00" * 16
    return handle.raw.hex()


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that an ordinary user can enter; pytest's are for root only."""
    path = Path(tempfile.mkdtemp(prefix="ways-out-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def tried(home: Path, level: str, form: str, user: int = 0) -> dict[str, str]:
    scene = Scene(home, level, form, user)
    try:
        scene.start()
        return scene.open_ways()
    finally:
        scene.close()


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="the platform has uids to give only as root")
FORMS = [HTTP, *(pytest.param(each, marks=pytest.mark.long) for each in (TORCH, PROGRAM))]


@AS_ROOT
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_without_isolation_a_function_has_at_least_25_ways_out(home: Path, form: str) -> None:
    found = tried(home, "none", form)

    assert len(found) >= 25, sorted(found)


@AS_ROOT
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_as_root_no_way_out_is_open(home: Path, form: str) -> None:
    assert len(WAYS) >= 100
    assert tried(home, "best", form) == {}


@pytest.mark.long
@pytest.mark.parametrize("form", [HTTP, TORCH, PROGRAM])
def test_as_an_ordinary_user_only_command_lines_and_lists_of_descriptors_are_seen(home: Path, form: str) -> None:
    found = tried(home, "best", form, user=USER if os.geteuid() == 0 else os.geteuid())

    assert set(found) <= {name for name, way in WAYS.items() if way.seen_by_user}, found


@AS_ROOT
def test_what_starts_workers_keeps_nothing_of_one_that_the_next_would_inherit(
    make_platform: Callable[..., Platform],
) -> None:
    """A worker is a fork of it: whatever its memory holds of others, a function could read in its own."""
    platform = make_platform("--device", "cpu:0=400MiB", "--standby", "0").start()
    env = {f"MANY_{number}": canary("ENV") for number in range(20)}
    path = platform.deploy("keeper", "def handle(event, context):\n    return 'done'\n", HTTP, env=env)
    assert platform.call(path).status_code == 200
    pattern = rb"ENV-[0-9a-f]{32}"

    assert list(memory_of(platform.workers()[0].pid, pattern)), "it is there to be found"
    assert not list(memory_of(platform.fork_server().pid, pattern))
