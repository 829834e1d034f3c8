"""What tests of the commands share: a folder of their own, and a gateway that keeps what it is sent."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpufaas_cli.main import cli
from gpufaas_cli.testing import WireLog

Run = Callable[..., Result]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: empty, and with nothing of the developer's environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("OPENFAAS_URL", "OPENFAAS_CONFIG", "CI", "OPENFAAS_STORE", "OPENFAAS_TEMPLATE_URL",
                 "OPENFAAS_TEMPLATE_STORE_URL", "http_proxy", "https_proxy", "no_proxy"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def wire(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WireLog]:
    del here
    with WireLog() as log:
        monkeypatch.setenv("OPENFAAS_URL", log.url)
        yield log


@pytest.fixture
def run(here: Path) -> Run:
    del here

    def run(*args: str, data: str | bytes = b"") -> Result:
        result = CliRunner().invoke(cli, args, input=data)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
