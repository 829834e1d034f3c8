"""Building: from a folder to a reproducible bundle, or to an error that says where and what to do."""

import hashlib
import importlib.metadata
import json
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.files import MODES_HOLD
from tests.unit.cli.conftest import HTTP, Project, Wheels, content_of, weights_of

from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.bundles import BundleStore
from gpufaas_cli import requirements
from gpufaas_cli.bundles import BuildRequest, build
from gpufaas_cli.commands.new import new_function
from gpufaas_core.bundle import Manifest
from gpufaas_core.errors import InvalidSpec, StorageFailed

MODEL = "def load(device):\n    return None\n\n\ndef handle(model, event, context):\n    return 'ok'\n"


# The bundle.


def test_a_bundle_holds_manifest_and_code(project: Project) -> None:
    project.write("fn/sub/data.txt", "data")

    built = project.build()

    content = content_of(built)
    assert list(content) == ["gpufaas.json", "function/handler.py", "function/handler_test.py",
                             "function/requirements.txt", "function/sub/data.txt"]  # fmt: skip
    assert content["function/handler.py"] == HTTP.encode()
    assert msgspec.json.decode(content["gpufaas.json"], type=Manifest) == built.manifest
    assert built.manifest == Manifest("http", "python3-http")
    assert built.digest == hashlib.sha256(built.bundle_tar.read_bytes()).hexdigest()
    assert (built.bundle_tar, built.up_to_date) == (project.root / "build/fn/bundle.tar", False)


def test_the_same_function_has_the_same_digest_wherever_and_whenever_it_is_built(tmp_path: Path) -> None:
    digests = []
    for place in ("here", "there"):
        project = Project(tmp_path / place)
        for name in ("b.txt", "a.txt") if place == "here" else ("a.txt", "b.txt"):
            os.utime(project.write(f"fn/{name}", name), (1, 1) if place == "here" else None)
        project.write("fn/__pycache__/handler.cpython-311.pyc", place)
        project.write("fn/.git/HEAD", place)
        digests.append(project.build().digest)

    assert digests[0] == digests[1]


def test_the_tar_names_no_time_and_no_owner(project: Project) -> None:
    project.write("fn/tool.sh", "#!/bin/sh").chmod(0o700)

    with tarfile.open(project.build().bundle_tar) as tar:
        for member in tar:
            assert (member.mtime, member.uid, member.gid, member.uname, member.gname) == (0, 0, 0, "", "")
            assert member.mode == (0o755 if member.name.endswith(".sh") else 0o644)


def test_weights_travel_apart_from_the_code(project: Project) -> None:
    project.write("fn/handler.py", MODEL)
    project.write("fn/deep/weights.safetensors", b"w" * 1000)
    project.write("fn/model.onnx", b"o" * 10)

    built = project.build(lang="python3-torch")

    assert built.manifest.kind == "model"
    assert [(each.path, each.bytes) for each in built.manifest.weights] == [
        ("function/deep/weights.safetensors", 1000), ("function/model.onnx", 10),
    ]  # fmt: skip
    assert [hashlib.sha256(path.read_bytes()).hexdigest() for _, path in weights_of(built)] == [
        each.sha256 for each, _ in weights_of(built)
    ]
    assert not any(name.endswith((".safetensors", ".onnx")) for name in content_of(built))


def test_what_is_built_can_be_installed_on_a_node(project: Project, tmp_path: Path) -> None:
    project.write("fn/handler.py", MODEL)
    project.write("fn/weights.safetensors", b"w" * 1000)
    built = project.build(lang="python3-torch")
    artifacts = ArtifactStore(tmp_path / "artifacts")
    for digest, path in built.files:
        with artifacts.writer(digest) as writer:
            writer.write(path.read_bytes())

    directory = BundleStore(tmp_path / "bundles", artifacts).install(built.digest)

    assert (directory / "function/handler.py").read_text() == MODEL
    assert (directory / "function/weights.safetensors").read_bytes() == b"w" * 1000


def test_extra_paths_are_put_beside_the_handler_under_their_own_path(project: Project) -> None:
    project.write("shared/nets/a.py", "A = 1")
    project.write("one.txt", "1")

    content = content_of(project.build(copy=[Path("shared/nets"), Path("./one.txt")]))

    assert content["function/shared/nets/a.py"] == b"A = 1"
    assert content["function/one.txt"] == b"1"


@pytest.mark.parametrize("path", ["..", ".", "/etc", "fn/../.."])
def test_extra_paths_outside_are_refused(project: Project, path: str) -> None:
    project.refuse("must lie inside", copy=[Path(path)])


def test_a_handler_folder_may_be_the_working_directory(project: Project) -> None:
    """``build`` and ``template`` in it are skipped, as OpenFaaS does; files like build.txt are not."""
    project.write("handler.py", HTTP)
    project.write("build.txt", "mine")
    project.write("template/unused/x", "")

    content = content_of(project.build(handler=Path(".")))
    again = project.build(handler=Path("."))

    assert "function/build.txt" in content
    assert not any(name.startswith(("function/build/", "function/template/")) for name in content)
    assert again.up_to_date


def test_a_build_folder_inside_the_handler_folder_is_refused(project: Project) -> None:
    project.refuse("lies inside the handler folder", build_root=project.root / "fn/out")


# Nothing is done twice.


def test_the_same_inputs_are_up_to_date(project: Project) -> None:
    first = project.build()
    project.said.clear()
    before = first.bundle_tar.stat()

    again = project.build()

    assert again.up_to_date
    assert (again.digest, again.manifest, weights_of(again)) == (first.digest, first.manifest, weights_of(first))
    assert again.bundle_tar.stat() == before
    assert project.said == []


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.write("fn/handler.py", HTTP + "# changed\n"),
        lambda p: p.write("fn/new.txt", ""),
        lambda p: p.write("fn/requirements.txt", "numpy"),
        lambda p: (p.root / "fn/handler.py").chmod(0o755),
        lambda p: (p.root / "build/fn/bundle.tar").unlink(),
        lambda p: (p.root / "build/fn/bundle.tar").write_bytes(b""),
        lambda p: p.write("fn/weights.safetensors", b"v"),
        lambda p: (p.root / "build/fn/.gpufaas-build.json").write_text("{"),
        lambda p: p.write("shared/a.py", "changed"),
    ],
)
def test_a_change_is_built(project: Project, change: Callable[[Project], object]) -> None:
    project.write("fn/weights.safetensors", b"w")
    project.write("shared/a.py", "")
    project.build(copy=[Path("shared")])

    change(project)

    assert not project.build(copy=[Path("shared")]).up_to_date
    assert project.build(copy=[Path("shared")]).up_to_date


def test_a_changed_build_arg_or_template_is_built(project: Project) -> None:
    project.build()
    assert not project.build(build_args={"A": "1"}).up_to_date

    project.write("template/python3-http/template.yml", "language: mine\ngpufaas: {kind: http}")
    project.write("template/python3-http/function/handler.py", HTTP)
    assert not project.build(build_args={"A": "1"}).up_to_date


def test_a_build_that_failed_is_not_up_to_date(project: Project) -> None:
    script = project.write("fn/build.py", "raise SystemExit(3)")
    project.refuse("status 3")
    project.refuse("status 3")

    script.write_text("")
    assert not project.build().up_to_date


def test_a_removed_file_is_gone_from_the_next_bundle(project: Project) -> None:
    extra = project.write("fn/extra.txt", "")
    project.build()
    extra.unlink()

    assert "function/extra.txt" not in content_of(project.build())


# build.py.


def test_build_py_makes_weights_in_the_function_folder(project: Project) -> None:
    script = """
import os, pathlib
print("training", os.environ["ROUNDS"], flush=True)
assert pathlib.Path.cwd().name == "function"
pathlib.Path("weights.safetensors").write_bytes(b"made")
"""
    project.write("fn/build.py", script)

    built = project.build(build_args={"ROUNDS": "7"})

    assert [each.path for each in built.manifest.weights] == ["function/weights.safetensors"]
    assert "training 7" in project.said
    assert not (project.root / "fn/weights.safetensors").exists()


def test_a_build_py_that_fails_is_an_error_with_the_tail_of_its_output(project: Project) -> None:
    project.write("fn/build.py", "for n in range(100): print('line', n)\nraise ValueError('no images found')")

    message = project.refuse(r"fn/build.py ended with status 1: ValueError: no images found")

    assert "line 99" in message
    assert "line 50" not in message


# The handler.


def test_a_missing_folder_is_named(project: Project) -> None:
    project.refuse(rf"handler folder {project.root}/none of function fn does not exist", handler=Path("none"))


def test_a_file_as_folder_is_named(project: Project) -> None:
    project.refuse("is not a folder", handler=Path("fn/handler.py"))


def test_a_missing_handler_is_named_even_though_the_template_has_one(project: Project) -> None:
    (project.root / "fn/handler.py").unlink()

    project.refuse(rf"{project.root}/fn has no handler.py")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def handle(event, context):\n    return (\n", r"handler.py:2: '\(' was never closed: return \("),
        ("x = 1\n  y = 2\n", r"handler.py:2: unexpected indent"),
        ("return 1\n", r"handler.py:1: 'return' outside function"),
        ("x = 1\0", r"handler.py.* null bytes"),
        ("# coding: nonsense\n", r"handler.py.*nonsense"),
    ],
)
def test_bad_syntax_is_named_with_its_line(project: Project, source: str, says: str) -> None:
    project.write("fn/handler.py", source)

    project.refuse(says)


@pytest.mark.parametrize(
    ("lang", "source", "says"),
    [
        ("python3-http", "", r"defines no handle\(event, context\), which python3-http calls"),
        (
            "python3-torch",
            "async def load(device): ...\n" + MODEL,
            "handler.py:1: load is async, and python3-torch calls only",
        ),
        ("python3-http", "class A:\n    def handle(self, event): ...\n", "defines no handle"),
        ("python3-torch", HTTP, r"defines no load\(device\)"),
        ("python3-torch", "def load(device): ...\n" + HTTP, r"handler.py:2: .*handle\(model, event, context\)"),
        ("python3-torch", MODEL + "\ndef warm_up(): ...\n", r"calls warm_up\(model\), which this warm_up does not"),
        ("python3-http", MODEL, r"calls handle\(event, context\), which this handle does not take"),
        ("python3-http", "def handle(event, context, *, key): ...", "does not take"),
    ],
)
def test_a_function_that_is_missing_for_sure_is_named(project: Project, lang: str, source: str, says: str) -> None:
    project.write("fn/handler.py", source)

    project.refuse(says, lang=lang)


@pytest.mark.parametrize(
    "source",
    [
        "from other import handle\n",
        "from other import *\n",
        "import handle\n",
        "handle = lambda event, context: 1\n",
        "handle: object = make()\n",
        "try:\n    import x\nexcept ImportError:\n    def handle(event, context): ...\n",
        "globals()['handle'] = print\n",
        "def __getattr__(name): ...\n",
        "def handle(*args): ...\n",
        "def handle(event, context, more=1): ...\n",
        "@wrap\ndef handle(one): ...\n",
        "class Handler: ...\nhandle = Handler()\n",
    ],
)
def test_what_only_running_can_tell_is_left_to_deploy(project: Project, source: str) -> None:
    project.write("fn/handler.py", source)

    project.build()


def test_an_unknown_template_names_the_known_ones(project: Project) -> None:
    project.refuse("unknown template 'python3-htp': did you mean python3-http.*python3-torch", lang="python3-htp")


def test_a_template_for_images_only_is_refused(project: Project) -> None:
    project.write("template/node20/template.yml", "language: node20\nfprocess: node index.js")

    project.refuse("node20 makes container images only", lang="node20")


@pytest.mark.parametrize("text", ["{", "- a", "gpufaas: model", "gpufaas: {kind: magic}"])
def test_a_malformed_template_is_named(project: Project, text: str) -> None:
    project.write("template/mine/template.yml", text)

    project.refuse(r"template/mine/template\.yml", lang="mine")


def test_a_template_may_name_its_handler_folder(project: Project) -> None:
    project.write("template/mine/template.yml", "handler_folder: src\ngpufaas: {kind: http}")
    project.write("template/mine/src/helper.py", "H = 1")
    project.write("fn/model.safetensors", b"w")

    built = project.build(lang="mine")

    assert {"function/helper.py", "function/handler.py"} <= content_of(built).keys()
    assert weights_of(built)[0][0].path == "function/model.safetensors"
    assert weights_of(built)[0][1].read_bytes() == b"w"


@pytest.mark.parametrize("name", ["", "Upper", "a_b", "-a", "a-", "a" * 64, "../x", "a/b", "a.b", "ä"])
def test_a_name_that_cannot_be_deployed_is_refused(project: Project, name: str) -> None:
    project.refuse("cannot be the name of a function", name=name)


def test_a_dangling_link_is_named(project: Project) -> None:
    (project.root / "fn/link").symlink_to("nowhere")

    project.refuse(r"fn/link is a link to nowhere")


@pytest.mark.parametrize("target", [".", "..", "../.."])
def test_a_link_to_a_folder_that_contains_it_is_named_once(project: Project, target: str) -> None:
    """It was followed until the kernel refused, and named 40 times in one path, as a link to nothing."""
    (project.root / "fn/sub").mkdir()
    (project.root / "fn/sub/link").symlink_to(target)

    said = project.refuse(r"fn/sub/link is a link to .*, which contains it: correct or remove it")

    assert said.count("link/") == 0


def test_a_circle_of_links_through_two_folders_is_named(project: Project) -> None:
    for one, other in (("fn/a", "fn/b"), ("fn/b", "fn/a")):
        (project.root / one).mkdir()
        (project.root / one / "other").symlink_to(project.root / other)

    project.refuse(r"fn/a/other/other is a link to .*/fn/a, which contains it")


def test_a_folder_that_is_linked_is_built_as_often_as_it_is_linked(project: Project) -> None:
    project.write("lib/part.py", "x = 1")
    for link in ("one", "two"):
        (project.root / "fn" / link).symlink_to("../lib")

    assert {"function/one/part.py", "function/two/part.py"} <= content_of(project.build()).keys()


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK])
@pytest.mark.parametrize("place", ["fn/sub/odd", "fn/requirements.txt", "extra/odd", "odd"])
def test_what_is_neither_a_file_nor_a_folder_is_named_and_not_read(project: Project, kind: int, place: str) -> None:
    """To read a fifo would take until somebody writes to it."""
    file = project.root / place
    file.parent.mkdir(exist_ok=True)
    os.mknod(file, kind | 0o600)

    project.refuse(rf"{place} is neither a file nor a folder", copy=() if "fn" in place else (Path(place).parts[0],))


def test_a_folder_that_cannot_be_read_is_named_and_not_left_out(project: Project) -> None:
    folder = project.root / "fn/sub"
    folder.mkdir(mode=0)
    code = "import pathlib, sys; from gpufaas_cli.source_files import walk; print(*walk(pathlib.Path(sys.argv[1])))"

    found = subprocess.run(
        [*MODES_HOLD, sys.executable, "-c", code, folder.parent], capture_output=True, text=True, check=False
    )
    folder.chmod(0o700)

    assert f"InvalidSpec: {folder} cannot be read (Permission denied): correct or remove it" in found.stderr


def test_a_build_folder_that_cannot_be_written_is_an_error_of_its_own(project: Project) -> None:
    project.write("build", "a file")

    with pytest.raises(StorageFailed, match=r"cannot build in .*build"):
        project.build()


def test_a_file_that_goes_while_it_is_built_is_an_error_of_that_function(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufaas_cli.bundles.hash_file", lambda path: (path.unlink(), path.read_bytes()))

    with pytest.raises(StorageFailed, match=r"cannot build in .*handler.py: No such file"):
        project.build()


def test_weights_whose_name_no_manifest_can_have_are_refused(project: Project) -> None:
    project.write("fn/w\udcff.safetensors", b"weights")

    project.refuse(r"'function/w.udcff.safetensors' of fn is not UTF-8: rename the file")


# Pickled weights.


@pytest.mark.parametrize("name", ["m.pt", "m.pth", "pytorch_model.bin", "m.ckpt", "m.pkl", "m.pickle", "m.joblib"])
def test_pickles_are_refused_unless_the_author_accepts_them(project: Project, name: str) -> None:
    project.write(f"fn/{name}", b"\x80\x04data")

    project.refuse(rf'{name} of function fn is a pickle, which runs any code .*gpufaas.allow-pickle: "true"')

    built = project.build(annotations={"gpufaas.allow-pickle": "true"})
    assert built.manifest.allow_pickle
    assert [each.path for each in built.manifest.weights] == [f"function/{name}"]


def test_pickles_that_build_py_made_are_refused_too(project: Project) -> None:
    project.write("fn/build.py", "open('m.pt', 'wb').write(b'x')")

    project.refuse("m.pt of function fn is a pickle")


def test_a_bin_file_that_is_no_pickle_is_data(project: Project) -> None:
    project.write("fn/table.bin", b"just bytes")

    built = project.build()

    assert content_of(built)["function/table.bin"] == b"just bytes"
    assert built.manifest.weights == ()


# Requirements. Wheels are made by hand, so that no index is asked.


def test_what_is_provided_is_not_installed_again(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it resolved."""
    monkeypatch.setattr(requirements, "resolve", None)
    text = "# what is here\nnumpy>=1\nPyYAML  # comment\nhttpx ; python_version > '3'\nno==1; sys_platform == 'beos'\n"
    project.write("fn/requirements.txt", text)

    built = project.build()

    assert built.manifest.requirements == ()
    assert not any(name.startswith("site/") for name in content_of(built))


def test_only_what_is_missing_goes_into_the_bundle(project: Project, wheels: Wheels) -> None:
    wheels("gpufaas_test_a", requires=("gpufaas_test_b>=1", "numpy", "msgspec"))
    wheels("gpufaas_test_b", "1.5")
    project.write("fn/requirements.txt", "gpufaas-test-a==1.0\nnumpy\n")
    project.write("fn/build.py", "import gpufaas_test_b; print(gpufaas_test_b.VERSION)")

    built = project.build()

    site = {name for name in content_of(built) if name.startswith("site/")}
    assert built.manifest.requirements == ("gpufaas-test-a==1.0", "gpufaas-test-b==1.5")
    assert {"site/gpufaas_test_a/__init__.py", "site/gpufaas_test_b/__init__.py"} <= site
    assert not any("numpy" in name or "msgspec" in name or "/bin/" in name or ".pyc" in name for name in site)
    assert "1.5" in project.said
    assert project.build().up_to_date


def test_a_bundle_with_requirements_is_reproducible(project: Project, wheels: Wheels) -> None:
    wheels("gpufaas_test_a")
    project.write("fn/requirements.txt", "gpufaas-test-a")

    first = project.build().digest
    (project.root / "build/fn/bundle.tar").unlink()

    assert project.build().digest == first


def test_options_of_the_file_are_followed(project: Project, wheels: Wheels) -> None:
    """A folder of wheels beside the requirements; it is looked for from the file's own place."""
    wheels("gpufaas_test_a")
    (project.root / "wheels").rename(project.root / "fn/wheelhouse")
    (project.root / "wheels").mkdir()
    project.write("fn/requirements.txt", "--no-index\n--find-links wheelhouse\ngpufaas-test-a\n")

    assert project.build().manifest.requirements == ("gpufaas-test-a==1.0",)


@pytest.mark.parametrize("name", ["numpy", "msgspec"])
def test_a_pin_against_a_provided_version_is_refused_with_both(project: Project, name: str) -> None:
    project.write("fn/requirements.txt", f"\n{name}==0.0.1\n")

    have = importlib.metadata.version(name)
    project.refuse(
        rf"fn/requirements\.txt:2: {name}==0\.0\.1 conflicts with {name} {have}, which this Python environment "
        ".* provides"
    )


def test_a_pin_without_the_local_part_of_torchs_version_is_met(project: Project) -> None:
    """torch is 2.13.0+cpu here: ``torch==2.13.0`` means that."""
    torch = importlib.metadata.version("torch").partition("+")[0]
    project.write("fn/requirements.txt", f"torch=={torch}\n")

    assert project.build().manifest.requirements == ()


def test_a_requirement_that_needs_another_version_of_what_is_provided_is_refused_with_both(
    project: Project, wheels: Wheels
) -> None:
    wheels("gpufaas_test_a", requires=("numpy<1",))
    project.write("fn/requirements.txt", "gpufaas-test-a")

    message = project.refuse("cannot be met beside what this Python environment .* provides")

    assert "numpy<1" in message
    assert importlib.metadata.version("numpy") in message


@pytest.mark.usefixtures("wheels")
def test_a_requirement_that_is_nowhere_is_named(project: Project) -> None:
    project.write("fn/requirements.txt", "gpufaas-no-such-thing==1")

    project.refuse("gpufaas-no-such-thing.*index")


@pytest.mark.parametrize("line", ["numpy=1", "!!", "two words", "a==b==c"])
def test_what_is_no_requirement_is_named_with_its_line(project: Project, line: str) -> None:
    project.write("fn/requirements.txt", f"# first\n{line}\n")

    project.refuse(r"fn/requirements\.txt:2: .*is not a requirement")


def test_requirements_that_are_no_text_are_named(project: Project) -> None:
    project.write("fn/requirements.txt", b"\xff\xfe\x00")

    project.refuse(r"requirements\.txt is not UTF-8")


def test_the_requirements_of_the_template_are_not_the_functions(project: Project) -> None:
    project.write("template/mine/template.yml", "gpufaas: {kind: http}")
    project.write("template/mine/function/requirements.txt", "gpufaas-no-such-thing")

    assert project.build(lang="mine").manifest.requirements == ()


# New functions.


@pytest.mark.parametrize("lang", ["python3-http", "python3-torch"])
def test_a_new_function_builds_as_it_is(tmp_path: Path, lang: str) -> None:
    written = new_function("mine", lang, tmp_path, ())

    assert [path.name for path in written] == ["handler.py", "handler_test.py", "requirements.txt", "sample.json"]
    built = build(BuildRequest("mine", lang, Path("mine"), root=tmp_path, build_root=tmp_path / "build"))
    assert json.loads(content_of(built)["gpufaas.json"])["template"] == lang


def test_a_new_function_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()

    with pytest.raises(InvalidSpec, match=f"{tmp_path}/mine exists already"):
        new_function("mine", "python3-http", tmp_path)

    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize("name", ["build", "template", "No", "../x"])
def test_a_new_function_needs_a_name_that_works(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidSpec):
        new_function(name, "python3-http", tmp_path)

    assert list(tmp_path.iterdir()) == []
