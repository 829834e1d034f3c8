"""Templates from git: a local bare repository stands for GitHub."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Run

from gpufaas_cli import repository
from gpufaas_core.errors import InvalidSpec
from gpufaas_templates import find_template

DOCKERFILE = "FROM scratch\nCOPY function /f\n"
TEMPLATE = """\
language: go
fprocess: ./handler
welcome_message: Hello.
build_options:
  - name: dev
    packages: [make, gcc]
"""


class Upstream:
    """A bare repository, and a working copy that pushes to it."""

    def __init__(self, root: Path) -> None:
        self.bare, self._copy = root / "upstream.git", root / "upstream"
        self._git("init", "--quiet", "--bare", "--initial-branch=main", str(self.bare), cwd=root)
        self._git("clone", "--quiet", str(self.bare), str(self._copy), cwd=root)
        self._git("checkout", "--quiet", "-B", "main")

    @property
    def url(self) -> str:
        return f"file://{self.bare}"

    def commit(self, files: dict[str, str], tag: str | None = None) -> str:
        for name, content in files.items():
            path = self._copy / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return self.push(tag)

    def link(self, name: str, target: str) -> None:
        (self._copy / name).symlink_to(target)
        self.push()

    def push(self, tag: str | None = None) -> str:
        self._git("add", "--all")
        self._git("-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "-m", "c")
        if tag:
            self._git("tag", tag)
        self._git("push", "--quiet", "--tags", "origin", "main")
        return self._git("rev-parse", "HEAD").strip()

    def _git(self, *arguments: str, cwd: Path | None = None) -> str:
        env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        done = subprocess.run(
            ["git", *arguments], cwd=cwd or self._copy, env=env, check=True, capture_output=True, text=True
        )
        return done.stdout


@pytest.fixture
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    made = Upstream(tmp_path_factory.mktemp("git"))
    made.commit(
        {
            "README.md": "x",
            "template/go/template.yml": TEMPLATE,
            "template/go/Dockerfile": DOCKERFILE,
            "template/go/function/handler.go": "v1",
            "template/node/template.yml": "language: node\n",
            "template/node/function/handler.js": "",
        },
        tag="1.0",
    )
    return made


def test_every_template_of_a_repository_is_copied_and_says_where_from(run: Run, upstream: Upstream, here: Path) -> None:
    result = run("template", "pull", upstream.url)

    assert result.exit_code == 0, result.output
    assert result.stdout == f"Wrote 2 template(s) : [go node] from {upstream.url}\n"
    assert (here / "template/go/function/handler.go").read_text() == "v1"
    assert sorted(path.name for path in (here / "template").iterdir()) == ["go", "node"]
    meta = json.loads((here / "template/go/meta.json").read_text())
    assert meta["repository"] == upstream.url
    assert len(meta["sha"]) == 40
    assert "ref_name" not in meta
    assert meta["written_at"].endswith("Z")
    assert find_template("go", [here / "template"]).language == "go"


@pytest.mark.parametrize("form", ["path", "relative", "url"])
def test_a_path_is_a_url_as_well(run: Run, upstream: Upstream, here: Path, form: str) -> None:
    places = {"path": str(upstream.bare), "relative": os.path.relpath(upstream.bare, here), "url": upstream.url}

    assert run("template", "pull", places[form]).exit_code == 0
    assert (here / "template/node").is_dir()


def test_a_ref_is_a_tag_a_branch_or_a_commit_and_names_the_copy(run: Run, upstream: Upstream, here: Path) -> None:
    first = json.loads(_pull_meta(run, upstream.url, here / "template/go/meta.json"))["sha"]
    upstream.commit({"template/go/function/handler.go": "v2"})

    for ref in ("1.0", "main", f"sha-{first[:10]}"):
        assert run("template", "pull", f"{upstream.url}#{ref}").exit_code == 0

    content = {path.parent.parent.name: path.read_text() for path in here.glob("template/go*/function/handler.go")}
    assert content == {"go": "v1", "go@1.0": "v1", "go@main": "v2", f"go@sha-{first[:10]}": "v1"}
    assert json.loads((here / "template/go@1.0/meta.json").read_text())["ref_name"] == "1.0"


def _pull_meta(run: Run, url: str, file: Path) -> str:
    assert run("template", "pull", url).exit_code == 0
    return file.read_text()


def test_a_copy_is_only_replaced_when_that_is_meant(run: Run, upstream: Upstream, here: Path) -> None:
    run("template", "pull", upstream.url)
    (here / "template/go/mine.txt").write_text("mine")

    kept = run("template", "pull", upstream.url, "--no-overwrite")
    assert kept.exit_code == 1
    assert "2 templates of that name already, and stay: go node" in kept.stderr
    assert (here / "template/go/mine.txt").exists()

    assert run("template", "pull", upstream.url).exit_code == 0
    assert not (here / "template/go/mine.txt").exists()


def test_the_repository_is_openfaass_own_or_that_of_the_environment(
    run: Run, upstream: Upstream, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert repository.default_repository() == "https://github.com/openfaas/templates.git"
    monkeypatch.setenv("OPENFAAS_TEMPLATE_URL", upstream.url)

    assert run("template", "pull").exit_code == 0
    assert (here / "template/go").is_dir()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./nowhere", "cannot pull ./nowhere: fatal: repository './nowhere' does not exist"),
        ("URL#none", r"cannot pull URL#none: fatal: Remote branch none not found"),
        ("URL#sha-0000000000", "cannot pull"),
        ("URL#--upload-pack=x", "is not a branch, tag or sha-COMMIT"),
        ("--upload-pack=touch x", "is not a repository"),
        ("ext::touch x", "cannot pull"),
        ("", "is not a repository"),
    ],
)
def test_what_cannot_be_pulled_is_told_in_gits_words(upstream: Upstream, here: Path, source: str, message: str) -> None:
    with pytest.raises(InvalidSpec) as raised:
        repository.pull(source.replace("URL", upstream.url), here / "template")

    assert message.replace("URL", upstream.url) in str(raised.value)
    assert not (here / "template").exists()
    assert not (here / "x").exists()


def test_a_repository_without_templates_is_said_to_be_one(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = Upstream(tmp_path_factory.mktemp("empty"))
    empty.commit({"README.md": "x"})

    result = run("template", "pull", empty.url)

    assert result.exit_code == 1
    assert "has no templates" in result.stderr


def test_a_link_that_leads_out_of_a_template_is_refused(run: Run, upstream: Upstream, here: Path) -> None:
    """It would bring a file of this machine into the build, and so to everyone who runs it."""
    upstream.link("template/go/function/passwd", "/etc/passwd")

    result = run("template", "pull", upstream.url)

    assert result.exit_code == 1
    assert "leads out of it, to /etc/passwd" in result.stderr
    assert not (here / "template/go").exists()


def test_a_password_in_a_url_is_not_kept_or_shown() -> None:
    assert repository._shown("https://me:secret@host/repo.git", "1.0") == "https://host/repo.git#1.0"


# --- templates that a stack file names ---


def write_stack(here: Path, configuration: str, lang: str = "go") -> None:
    (here / "fn").mkdir()
    (here / "fn/handler.go").write_text("mine")
    (here / "stack.yaml").write_text(
        f"provider: {{name: openfaas}}\nfunctions:\n  fn: {{lang: {lang}, handler: ./fn, image: me/fn:1}}\n"
        f"configuration:\n  templates:\n{configuration}"
    )


def test_pull_stack_pulls_what_the_stack_file_names(run: Run, upstream: Upstream, here: Path) -> None:
    write_stack(
        here, f"    - {{name: go, source: '{upstream.url}#1.0'}}\n    - {{name: node, source: '{upstream.url}'}}\n"
    )

    assert run("template", "pull", "stack").exit_code == 0
    assert sorted(path.name for path in (here / "template").iterdir()) == ["go@1.0", "node"]


@pytest.mark.parametrize(
    ("lang", "entry", "folder"),
    [
        ("go", "{name: go, source: 'URL'}", "go"),
        ("go", "{name: go, source: 'URL#1.0'}", "go@1.0"),
        ("go@1.0", "{name: go, source: 'URL'}", "go@1.0"),
        ("go@1.0", "{name: go@1.0, source: 'URL'}", "go@1.0"),
    ],
)
def test_a_build_fetches_a_template_that_the_stack_file_names(
    run: Run, upstream: Upstream, here: Path, lang: str, entry: str, folder: str
) -> None:
    write_stack(here, f"    - {entry.replace('URL', upstream.url)}\n", lang)

    first = run("build", "--shrinkwrap")
    moved = upstream.bare.rename(upstream.bare.with_suffix(".moved"))
    second = run("build", "--shrinkwrap")

    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert moved.is_dir()  # the second build needed it no more
    assert (here / "template" / folder / "Dockerfile").is_file()
    assert (here / "build/fn/Dockerfile").read_text() == DOCKERFILE
    assert (here / "build/fn/function/handler.go").read_text() == "mine"


def test_a_build_can_be_told_to_fetch_nothing(run: Run, upstream: Upstream, here: Path) -> None:
    write_stack(here, f"    - {{name: go, source: '{upstream.url}'}}\n")

    result = run("build", "--shrinkwrap", "--disable-stack-pull")

    assert result.exit_code == 1
    assert "unknown template 'go'" in result.stderr


def test_a_mistyped_template_is_looked_up_nowhere(run: Run, here: Path) -> None:
    write_stack(here, "    - {name: other, source: 'https://nowhere.invalid/x'}\n", "python3-htp")

    result = run("build")

    assert result.exit_code == 1
    assert "did you mean python3-http?" in result.stderr


def test_an_entry_without_a_source_is_refused_and_names_the_command_that_pulls_it(
    run: Run, upstream: Upstream, here: Path
) -> None:
    write_stack(here, f"    - {{name: node, source: '{upstream.url}'}}\n    - {{name: go@1.0}}\n", "go@1.0")

    pulled, built = run("template", "pull", "stack"), run("build", "--shrinkwrap")

    told = "stack.yaml: template go@1.0 has no source: pull it with 'faas-cli template store pull go@1.0', or add"
    assert (pulled.exit_code, built.exit_code) == (2, 1)
    assert told in pulled.stderr
    assert told in built.stderr
    assert not (here / "template").exists(), "nothing was pulled in part"


def test_an_entry_without_a_source_is_no_matter_where_the_template_is(run: Run, upstream: Upstream, here: Path) -> None:
    write_stack(here, "    - {name: go}\n")
    assert run("template", "pull", upstream.url).exit_code == 0

    assert run("build", "--shrinkwrap").exit_code == 0


def test_a_store_that_the_environment_names_is_not_passed_over(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENFAAS_TEMPLATE_STORE_URL", "https://nowhere.invalid/templates.json")
    write_stack(here, "    []\n")

    result = run("build")

    assert result.exit_code == 1
    assert "OPENFAAS_TEMPLATE_STORE_URL is read by 'faas-cli template store pull go' only" in result.stderr
