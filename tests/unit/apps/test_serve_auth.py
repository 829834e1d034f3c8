"""What `gpufaas serve` makes of its options: when it asks for a password, and its queues."""

from pathlib import Path
from typing import Literal

import pytest
from click.testing import CliRunner

from gpufaas_apps import serve
from gpufaas_apps.data_directory import credentials_of
from gpufaas_apps.options import ServeOptions
from gpufaas_cli.main import cli


@pytest.mark.parametrize(
    ("auth", "host", "asks"),
    [
        ("auto", "127.0.0.1", True),  # which functions reach as well
        ("auto", "0.0.0.0", True),
        ("on", "127.0.0.1", True),
        ("off", "127.0.0.1", False),
        ("off", "0.0.0.0", False),
    ],
)
def test_it_asks_for_a_password_unless_it_is_told_not_to(
    tmp_path: Path, auth: Literal["on", "off", "auto"], host: str, asks: bool
) -> None:
    credentials = credentials_of(ServeOptions(host=host, auth=auth, data=tmp_path))

    assert (credentials is not None) == asks
    assert (tmp_path / "auth").exists() == asks


def test_queues_are_given_by_name_with_their_bounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[ServeOptions] = []
    monkeypatch.setattr(serve, "run", seen.append)
    given = ["--async-queue", "faas-request=32", "--async-queue", "reports.v1=4:1000"]

    result = CliRunner().invoke(cli, ["serve", "--data", str(tmp_path), *given])

    assert result.exit_code == 0
    assert seen[0].async_queues == {"faas-request": (32, 1_000_000), "reports.v1": (4, 1000)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["reports"], "not NAME=CONCURRENCY[:LIMIT]"),
        (["reports=0"], "not NAME=CONCURRENCY[:LIMIT]"),
        (["reports=4:0"], "not NAME=CONCURRENCY[:LIMIT]"),
        (["reports=many"], "not NAME=CONCURRENCY[:LIMIT]"),
        (["two words=4"], "not NAME=CONCURRENCY[:LIMIT]"),
        (["reports=4", "reports=5"], "reports is given twice"),
    ],
)
def test_a_queue_that_is_none_is_wrong_usage(given: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["serve", *(part for each in given for part in ("--async-queue", each))])

    assert result.exit_code == 2
    assert message in result.output


def test_a_directory_that_is_named_is_never_written(tmp_path: Path) -> None:
    """A user who names a directory has a password there, or has mistyped: a new password would lock the user out."""
    (tmp_path / "basic-auth-user").write_text("boss\n")
    (tmp_path / "basic-auth-password").write_text("secret\n")

    credentials = credentials_of(ServeOptions(auth="on", auth_dir=tmp_path, data=tmp_path / "data"))

    assert credentials is not None
    assert (credentials.user, credentials.password) == ("boss", "secret")
    assert not (tmp_path / "data").exists()
