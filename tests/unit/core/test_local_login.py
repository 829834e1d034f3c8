"""The login that a gateway leaves for clients of the user who started it."""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufaas_core import local_login

URL = "http://127.0.0.1:8080"
SERVES = """
import sys
from gpufaas_core.local_login import offered
with offered(sys.argv[1], "admin", "secret"):
    print("serves", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "gpufaas"


@pytest.fixture
def gateway() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that offers its login, as another one looks for it."""
    command = [sys.executable, "-c", SERVES, URL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"serves\n"
        yield process


@pytest.mark.usefixtures("gateway")
@pytest.mark.parametrize("url", [URL, f"{URL}/", f"{URL}/some/path", "HTTP://127.0.0.1:8080"])
def test_it_is_found_by_the_url_of_the_gateway(url: str) -> None:
    assert local_login.find(url) == ("admin", "secret")


@pytest.mark.usefixtures("gateway")
@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8081", "http://127.0.0.1:port", "http://localhost:8080", "http://gateway.example:8080",
        "https://127.0.0.1:8080", "http://[::1]:8080", "x",
    ],
)  # fmt: skip
def test_no_other_gateway_gets_it(url: str) -> None:
    """A function may listen at ::1, which is localhost, too."""
    assert local_login.find(url) is None


@pytest.mark.usefixtures("gateway")
@pytest.mark.parametrize("path", ["", "/", "/some/path"])
def test_where_this_user_has_a_gateway_localhost_is_its_address_so_that_nobody_at_1_gets_the_login(path: str) -> None:
    assert local_login.direct(f"http://localhost:8080{path}") == URL + path
    for url in (
        "http://localhost:8081",
        "https://localhost:8080",
        "http://localhost.example:8080",
        "http://[::1]:8080",
    ):
        assert local_login.direct(url) == url


@pytest.mark.usefixtures("gateway")
def test_a_machine_with_the_same_home_directory_does_not_take_it_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "another")

    assert local_login.find(URL) is None


@pytest.mark.usefixtures("gateway")
def test_only_its_user_can_read_it(folder: Path) -> None:
    (file,) = folder.iterdir()

    assert folder.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600


def test_it_is_gone_when_the_gateway_ends(gateway: "subprocess.Popen[bytes]", folder: Path) -> None:
    gateway.communicate()

    assert list(folder.iterdir()) == []


def test_what_a_killed_gateway_left_is_given_to_nobody_who_took_its_port(
    gateway: "subprocess.Popen[bytes]", folder: Path
) -> None:
    gateway.send_signal(signal.SIGKILL)
    gateway.wait()

    assert len(list(folder.iterdir())) == 1
    assert local_login.find(URL) is None
    with local_login.offered(URL, "admin", "another"):
        assert local_login.find(URL) == ("admin", "another")


@pytest.mark.usefixtures("gateway")
def test_a_file_that_others_may_read_is_ignored_and_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file,) = folder.iterdir()
    file.chmod(0o644)

    assert local_login.find(URL) is None
    assert f"{file} is ignored" in caplog.text


@pytest.mark.usefixtures("gateway")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_ignored_and_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file,) = folder.iterdir()
    os.chown(file, 65534, 65534)

    assert local_login.find(URL) is None
    assert f"{file} is ignored" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_the_runtime_directory_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `su`, which leaves XDG_RUNTIME_DIR as it was."""
    os.chown(tmp_path, 65534, 65534)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    with local_login.offered(URL, "admin", "secret"):
        assert [each.name for each in tmp_path.iterdir()] == ["cache"]


def test_a_gateway_serves_where_no_file_can_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "gpufaas").write_text("in the way")

    with caplog.at_level(logging.WARNING), local_login.offered(URL, "admin", "secret"):
        assert local_login.find(URL) is None
    assert "clients on this machine have to log in" in caplog.text


def test_the_end_of_a_gateway_leaves_the_login_of_the_next_one(folder: Path) -> None:
    with local_login.offered(URL, "admin", "one"):
        following = local_login.offered(URL, "admin", "two")
        following.__enter__()

    assert local_login.find(URL) == ("admin", "two")
    following.__exit__(None, None, None)
    assert list(folder.iterdir()) == []
