"""The packaged templates are found by name, and their skeletons answer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpufaas_core.errors import InvalidSpec
from gpufaas_templates import find_template, list_templates


def test_the_packaged_templates_are_listed_by_name() -> None:
    kinds = {each.name: each.kind for each in list_templates()}

    assert kinds == {"python3-http": "http", "python3-torch": "model", "python3-torch-image": None}
    assert list(kinds) == sorted(kinds)
    assert all(each.description and each.welcome_message and each.language for each in list_templates())


def test_a_folder_of_the_user_goes_before_the_packaged_ones(tmp_path: Path) -> None:
    (tmp_path / "python3-http").mkdir()
    (tmp_path / "python3-http" / "template.yml").write_text("language: mine\ngpufaas: {kind: http}\n")
    (tmp_path / "not-a-template").mkdir()

    found = {each.name: each for each in list_templates((tmp_path, tmp_path / "missing"))}

    assert set(found) == {"python3-http", "python3-torch", "python3-torch-image"}
    assert found["python3-http"].language == "mine"
    assert find_template("python3-http", (tmp_path,)) == found["python3-http"]


OF_DOCKERFILE = """
FROM ghcr.io/openfaas/of-watchdog:0.10.7 AS watchdog
FROM python:3.12
ENV PATH=$PATH:/home/app/.local/bin
ENV PYTHONPATH=$PYTHONPATH:/home/app/python
ENV fprocess="python index.py"
ENV cgi_headers="true" \\
    mode="http"
ENV upstream_url="http://127.0.0.1:5000"
ENV RAW_BODY false
"""


def test_openfaas_templates_for_python_that_start_a_server_run_as_one(tmp_path: Path) -> None:
    """As in their image: the program that their watchdog starts, beside their files, on the port that it has fixed."""
    folder = tmp_path / "python3-flask"
    (folder / "function").mkdir(parents=True)
    (folder / "template.yml").write_text("language: python3-flask\nfprocess: python index.py\n")
    (folder / "index.py").touch()
    (folder / "function" / "handler.py").touch()
    (folder / "Dockerfile").write_text(OF_DOCKERFILE)

    found = find_template("python3-flask", (tmp_path,))

    assert (found.kind, found.command, found.workdir, found.port) == ("server", ("python", "index.py"), ".", 5000)
    assert found.env == {"cgi_headers": "true", "RAW_BODY": "false"}


def test_a_template_of_ones_own_says_what_its_server_is(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "template.yml").write_text("gpufaas: {kind: server, command: python main.py}\n")

    found = find_template("mine", (tmp_path,))

    assert (found.kind, found.command, found.workdir, found.port) == ("server", ("python", "main.py"), "function", 0)


def test_openfaas_own_python_templates_are_taken_as_they_are(tmp_path: Path) -> None:
    """They have no section of ours: handle(event, context) makes them kind http."""
    folder = tmp_path / "python3-http-debian"
    (folder / "function").mkdir(parents=True)
    (folder / "template.yml").write_text("language: python3-http-debian\nfprocess: python index.py\n")
    (folder / "function" / "handler.py").write_text("def handle(event, context): ...\n")

    assert find_template("python3-http-debian", (tmp_path,)).kind == "http"


def test_a_template_may_say_that_it_only_makes_images_and_which_packages_of_ours_are_in_them(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "function").mkdir(parents=True)
    (folder / "function" / "handler.py").touch()  # which alone would make it a function of kind http
    (folder / "template.yml").write_text("gpufaas: {kind: image, packages: [gpufaas_core]}\n")

    found = find_template("mine", (tmp_path,))

    assert (found.kind, found.packages) == (None, ("gpufaas_core",))


def test_packages_that_are_not_ours_are_not_looked_for(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "template.yml").write_text("gpufaas: {kind: image, packages: [os]}\n")

    with pytest.raises(InvalidSpec, match=r"gpufaas.packages are names of packages of gpufaas, and not os"):
        find_template("mine", (tmp_path,))


@pytest.mark.parametrize("named", ["../elsewhere", "mine/function", "..", "/"])
def test_a_skeleton_that_is_no_template_beside_it_is_refused(tmp_path: Path, named: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "template.yml").write_text(f"gpufaas: {{kind: image, skeleton: {named}}}\n")

    with pytest.raises(InvalidSpec, match=r"mine/template\.yml: gpufaas\.skeleton is the name of a template beside it"):
        find_template("mine", (tmp_path,))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        InvalidSpec, match=r"mean python3-torch\? known are python3-http, python3-torch, python3-torch-"
    ):
        find_template("python-torch")


@pytest.mark.slow
def test_the_skeletons_own_tests_pass_also_in_one_run(tmp_path: Path) -> None:
    """As of a folder with several functions."""
    pytest.importorskip("torch")
    skeletons = {each.skeleton for each in list_templates()}
    files = [str(each / "handler_test.py") for each in skeletons]
    options = ["-B", "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), "--noconftest"]

    done = subprocess.run(
        [sys.executable, *options, "-p", "no:cacheprovider", "--import-mode=importlib", *files],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert f"{len(skeletons)} passed" in done.stdout, done.stdout
    assert done.returncode == 0
