"""
A client whose Python had more packages than the platform built bundles that failed there: what it had itself, it took
for provided. And one that had less was told to install torch before it could name numpy.
"""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.integration.conftest import Platform
from tests.integration.test_servers import DOCKERFILE, INDEX
from tests.waiting import until

import gpufaas_cli

STACK = """
version: 1.0
provider: {name: openfaas}
functions:
  fn: {lang: python3-http, handler: ./fn, image: fn}
"""
LEARN = "import learn\n\ndef handle(event, context):\n    return learn.WHERE\n"
SAID = """
import os
import learn
LAST = ""
def said():
    return f"{learn.WHERE}, {open(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'table')).read()}{LAST}"
"""
NUMPY = "import numpy\n\ndef handle(event, context):\n    return numpy.__version__\n"
LARGE = ("torch", "functorch", "numpy", "safetensors", "nvidia")

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def client(tmp_path: Path, platform: Platform) -> Cli:
    """Runs the CLI beside a stack file, with no package index but the folder ``wheels``."""
    (tmp_path / "fn").mkdir()
    (tmp_path / "wheels").mkdir()
    (tmp_path / "uv.toml").write_text(f'no-index = true\nfind-links = ["{tmp_path / "wheels"}"]\n')
    (tmp_path / "stack.yaml").write_text(STACK)

    def run(*arguments: str, python: tuple[str, ...] = (), path: str) -> "subprocess.CompletedProcess[str]":
        environment = {
            **os.environ, "PYTHONPATH": path, "HOME": str(tmp_path),
            "UV_CONFIG_FILE": str(tmp_path / "uv.toml"),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),  # has the login
        }  # fmt: skip
        return subprocess.run(
            [sys.executable, *python, "-m", "gpufaas_cli", *arguments, "-g", platform.url],
            check=False, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120,
        )  # fmt: skip

    return run


def files_of_learn(where: str) -> Mapping[str, str]:
    """A package ``learn``, which knows *where* it is from."""
    files = {
        "learn/__init__.py": f"WHERE = {where!r}\n",
        "learn-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: learn\nVersion: 1.0\n",
        "learn-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    return {**files, "learn-1.0.dist-info/RECORD": "".join(f"{name},,\n" for name in files)}


@pytest.fixture
def learned(tmp_path: Path) -> str:
    """The function needs ``learn``, which the client has and the platform has not. Return the client's path."""
    (tmp_path / "fn/handler.py").write_text(LEARN)
    (tmp_path / "fn/requirements.txt").write_text("learn>=1\n")
    for name, text in files_of_learn("the client").items():
        file = tmp_path / "installed" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    with zipfile.ZipFile(tmp_path / "wheels/learn-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files_of_learn("the bundle").items():
            wheel.writestr(name, text)
    return str(tmp_path / "installed")


def test_what_only_the_client_has_comes_with_the_bundle(platform: Platform, client: Cli, learned: str) -> None:
    done = client("up", path=learned)

    assert done.returncode == 0, done.stderr
    assert platform.call("/function/fn").text == "the bundle"


def test_functions_share_their_packages_and_an_edit_sends_its_code_only(
    platform: Platform, client: Cli, learned: str, tmp_path: Path
) -> None:
    """In a fork, in a program, and in their checks: each sees the packages and its table."""
    program = "  program: {lang: python3-of, handler: ./program, image: program, annotations: {gpufaas.memory: 64Mi}}\n"
    (tmp_path / "stack.yaml").write_text(STACK + program)
    template = tmp_path / "template/python3-of"
    for folder, files in {
        template: {
            "index.py": INDEX,
            "Dockerfile": DOCKERFILE,
            "template.yml": "language: x\nfprocess: python index.py",
        },
        tmp_path / "program": {"handler.py": f"{SAID}\ndef handle(req): return said()\n", "__init__.py": ""},
        tmp_path / "fn": {"handler.py": f"{SAID}\ndef handle(event, context): return said()\n"},
    }.items():
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        if folder != template:
            (folder / "requirements.txt").write_text("learn>=1\n")
            (folder / "build.py").write_text("import learn; open('table', 'a').write(learn.WHERE + ' made')\n")
    done = client("up", path=learned)
    assert done.returncode == 0, done.stderr
    (tmp_path / "wheels/learn-1.0-py3-none-any.whl").unlink()

    for number in range(2):
        wanted = f"the bundle, the bundle made{'!' * number}"
        for name in ("fn", "program"):
            # An older revision serves until the new one is loaded.
            until(lambda: platform.call(f"/function/{name}").text == wanted)  # noqa: B023 - called at once
        with (tmp_path / "fn/handler.py").open("a") as handler, (tmp_path / "program/handler.py").open("a") as other:
            handler.write("LAST = '!'\n")
            other.write("LAST = '!'\n")
        done = client("up", path=learned)
        assert done.returncode == 0, done.stderr
        assert "running build.py" not in done.stderr

    parts = [each.parent for each in (platform.data / "parts").glob("*/learn/__init__.py")]
    assert len(parts) == 1


def test_a_bundle_that_was_built_for_the_client_is_refused_and_says_what_is_missing(
    platform: Platform, client: Cli, learned: str
) -> None:
    done = client("up", "--offline", path=learned)

    assert done.returncode == 1
    assert "the bundle of fn does not fit node local: Python " in done.stderr
    assert "it needs learn>=1, and there is none" in done.stderr
    assert platform.call("/function/fn").status_code == 404


def test_a_client_without_torch_and_numpy_builds_for_a_platform_that_has_them(
    platform: Platform, client: Cli, tmp_path: Path
) -> None:
    (tmp_path / "fn/handler.py").write_text(NUMPY)
    (tmp_path / "fn/requirements.txt").write_text("numpy>=2\ntorch\n")
    slim = tmp_path / "slim"
    slim.mkdir()
    for each in (each for folder in sys.path if folder.endswith("site-packages") for each in Path(folder).iterdir()):
        if not each.name.startswith(LARGE) and each.suffix != ".pth" and not (slim / each.name).exists():
            (slim / each.name).symlink_to(each)
    ours = Path(gpufaas_cli.__file__).parents[2].glob("*/gpufaas*/__init__.py")
    path = os.pathsep.join([str(slim), *(str(each.parents[1]) for each in ours)])
    without = ("-S",)  # no site-packages but the slim ones

    has_numpy = subprocess.run(
        [sys.executable, *without, "-c", "import numpy"], check=False, env={"PYTHONPATH": path}, capture_output=True
    )
    done = client("up", python=without, path=path)

    assert b"No module named 'numpy'" in has_numpy.stderr
    assert done.returncode == 0, done.stderr
    assert platform.call("/function/fn").text.startswith("2.")
    assert "needs" not in done.stderr


@pytest.mark.long
def test_a_version_that_the_platform_has_not_is_named_before_anything_is_sent(
    platform: Platform, client: Cli, tmp_path: Path
) -> None:
    (tmp_path / "fn/handler.py").write_text(NUMPY)
    (tmp_path / "fn/requirements.txt").write_text("torch==1.13\n")

    done = client("up", path="")

    assert done.returncode == 1
    assert "requirements.txt:1: torch==1.13 conflicts with torch 2." in done.stderr
    assert f"which the platform at {platform.url} provides (node local: Python " in done.stderr
