"""What tests of the commands share: a folder of their own, and a gateway that keeps what it is sent."""

import base64
import hashlib
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.unit.cli.wire_log import WireLog

from gpufaas_cli.bundles import BuildRequest, Built, build
from gpufaas_cli.main import cli
from gpufaas_core.bundle import WeightsFile
from gpufaas_core.errors import InvalidSpec

Run = Callable[..., Result]
Wheels = Callable[..., None]

HTTP = "def handle(event, context):\n    return 'ok'\n"


class Project:
    """A working directory with one function in it, and ways to change it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[str] = []
        self.write("fn/handler.py", HTTP)

    def write(self, path: str, content: str | bytes) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    def build(self, name: str = "fn", lang: str = "python3-http", **changes: Any) -> Built:
        changes = {"handler": Path("fn"), "build_root": self.root / "build", "root": self.root, **changes}
        changes.setdefault("template_dirs", (self.root / "template",))
        return build(BuildRequest(name, lang, **changes), self.said.append)

    def refuse(self, match: str, **changes: Any) -> str:
        with pytest.raises(InvalidSpec, match=match) as caught:
            self.build(**changes)
        return str(caught.value)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def weights_of(built: Built) -> list[tuple[WeightsFile, Path]]:
    """Return each file of weights, and where it is now."""
    paths = dict(built.files)
    return [(each, paths[each.sha256]) for each in built.manifest.weights]


def content_of(built: Built) -> dict[str, bytes]:
    """Return the files of the bundle and of its parts, by their names on a node."""
    paths = dict(built.files)
    content = _content_of(built.bundle_tar)
    for part in built.manifest.parts:
        inside = "site/" if part.name == "site" else ""
        content |= {f"{inside}{name}": data for name, data in _content_of(paths[part.sha256]).items()}
    return content


def _content_of(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: empty, and with nothing of the developer's environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("OPENFAAS_URL", "OPENFAAS_CONFIG", "CI", "OPENFAAS_REMOTE_BUILDER", "OPENFAAS_TEMPLATE_URL",
                 "OPENFAAS_TEMPLATE_STORE_URL", "http_proxy", "https_proxy", "no_proxy"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def wire(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WireLog]:
    del here
    with WireLog() as log:
        monkeypatch.setenv("OPENFAAS_URL", log.url)
        yield log


def invoke(*args: str, data: str | bytes = b"") -> Result:
    result = CliRunner().invoke(cli, args, input=data)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def run(here: Path) -> Run:
    del here
    return invoke


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheels:
    """Adds wheels, made by hand, to the only place where uv looks: no index is asked."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    settings = tmp_path / "settings.toml"
    settings.write_text(f'no-index = true\nfind-links = ["{folder}"]\n')
    monkeypatch.setenv("UV_CONFIG_FILE", str(settings))

    def add(
        name: str, version: str = "1.0", requires: tuple[str, ...] = (), tag: str = "py3-none-any", python: str = ">=3"
    ) -> None:
        info = f"{name}-{version}.dist-info"
        files = {
            f"{name}/__init__.py": f"VERSION = {version!r}\n",
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            f"Requires-Python: {python}\n" + "".join(f"Requires-Dist: {each}\n" for each in requires),
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
            f"{info}/entry_points.txt": f"[console_scripts]\n{name}-run = {name}:main\n",
        }
        record = "".join(f"{path},sha256={_hash(text)},{len(text)}\n" for path, text in files.items())
        with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
            for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
                wheel.writestr(path, text)

    return add


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
