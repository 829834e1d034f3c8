"""Functions that are programs with a port of their own: OpenFaaS's templates without their containers."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.conftest import until

from gpufaas_cli.bundles import BuildRequest, build

INDEX = """
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from function import handler

class Calls(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = handler.handle(self.rfile.read(int(self.headers.get("content-length", 0))).decode()).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        if "CLOSES" in os.environ:
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)

print("mine is", os.environ["MINE"], flush=True)
ThreadingHTTPServer(("0.0.0.0", 5000), Calls).serve_forever()
"""
DOCKERFILE = """
FROM python:3.12
ENV fprocess="python index.py" mode="http" upstream_url="http://127.0.0.1:5000" MINE="of the template"
"""


@pytest.fixture
def deploy(platform: Any, tmp_path: Path) -> Callable[..., Any]:
    template = tmp_path / "template" / "python3-of"
    (template / "function").mkdir(parents=True)
    (template / "index.py").write_text(INDEX)
    (template / "Dockerfile").write_text(DOCKERFILE)
    (template / "template.yml").write_text("language: python3-of\nfprocess: python index.py\n")

    def deploy(name: str, handler: str, **spec: Any) -> Any:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "handler.py").write_text(handler)
        (folder / "__init__.py").touch()
        built = build(
            BuildRequest(name, "python3-of", folder, build_root=tmp_path / "build", template_dirs=(template.parent,))
        )
        platform.upload(built)
        spec["annotations"] = {"gpufaas.bundle": built.digest, "gpufaas.memory": "64Mi"}
        asked = {"service": name, "image": name, "envProcess": "python index.py", **spec}
        return platform.http.post("/system/functions", json=asked)

    return deploy


def test_two_of_a_template_with_a_fixed_port_run_side_by_side(platform: Any, deploy: Any) -> None:
    deploy("upper", "def handle(req):\n    return req.upper()\n").raise_for_status()
    deploy("turned", "def handle(req):\n    return req[::-1]\n", envVars={"MINE": "turned"}).raise_for_status()

    for _ in range(2):
        assert platform.call("/function/upper", b"abc").text == "ABC"
        assert platform.call("/function/turned", b"abc").text == "cba"

    until(lambda: "mine is of the template" in platform.log("upper"))
    until(lambda: "mine is turned" in platform.log("turned"))


def test_one_whose_handler_does_not_import_is_refused_when_it_is_deployed(platform: Any, deploy: Any) -> None:
    answer = deploy("broken", "import nothing_of_this_name\n")

    assert answer.status_code == 400
    assert "broken does not start" in answer.text
    assert "nothing_of_this_name" in answer.text
    assert platform.http.get("/system/function/broken").status_code == 404


def test_a_call_that_finds_its_worker_dead_is_placed_again(platform: Any, deploy: Any) -> None:
    """
    Nothing of it was taken, so its caller need not hear of it. The fork server is stopped: it would tell too soon. No
    connection is kept: what one that is dead has taken might not be sent twice.
    """
    handler = "import os\n\ndef handle(req):\n    return str(os.getpid())\n"
    deploy("mortal", handler, envVars={"CLOSES": "1"}).raise_for_status()
    pid = int(platform.call("/function/mortal", b"").text)
    worker = psutil.Process(pid)
    fork_server = worker.parent()
    assert fork_server is not None

    fork_server.suspend()
    until(lambda: fork_server.status() == psutil.STATUS_STOPPED)
    worker.kill()
    # The first thread may be dead while others still hold the socket that is connected to.
    tasks = Path(f"/proc/{pid}/task")
    until(lambda: worker.status() == psutil.STATUS_ZOMBIE and len(list(tasks.iterdir())) == 1)
    with ThreadPoolExecutor() as threads:
        called = threads.submit(platform.call, "/function/mortal", b"")
        until(lambda: platform.status()["running"])
        fork_server.resume()
        answer = called.result()

    assert (answer.status_code, answer.headers["x-gpufaas-start"]) == (200, "disk"), answer.text
    assert int(answer.text) != pid
    until(platform.is_idle)


SCRATCH = """
import os

def handle(text):
    folder = os.environ["GPUFAAS_SCRATCH"]
    before = os.listdir(folder)
    open(os.path.join(folder, "mine"), "w").close()
    return f"{os.getpid()} {folder} {len(before)}"
"""


def test_what_a_server_writes_to_its_scratch_directory_is_gone_with_it(
    platform: Any, deploy: Callable[..., Any]
) -> None:
    assert deploy("writes", SCRATCH).status_code == 202
    pid, folder, files = platform.call("/function/writes").text.split()
    assert files == "0"

    psutil.Process(int(pid)).kill()

    until(lambda: not Path(folder).exists(), "it is gone with its process")
    until(lambda: (again := platform.call("/function/writes").text.split())[0] != pid and again[2] == "0")


def test_one_that_ends_when_it_starts_is_not_ready_after_its_first_load_and_says_how_it_ended(
    platform: Any, deploy: Any, open_path: Path
) -> None:
    broken = open_path / "broken"
    source = f"import os\nif os.path.exists({str(broken)!r}): os._exit(3)\ndef handle(req):\n    return 'here'\n"
    deploy("ends", source).raise_for_status()

    def shown() -> tuple[int, str]:
        found = platform.http.get("/system/function/ends").json()
        return found["availableReplicas"], found["gpufaas"].get("reason") or ""

    assert shown() == (1, "")
    broken.touch()
    assert platform.call("/function/ends").status_code == 502
    available, why = shown()
    assert available == 0
    assert "exit status 3" in why
    broken.unlink()
    assert platform.call("/function/ends").text == "here"
    assert shown() == (1, "")
