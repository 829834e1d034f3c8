"""The stack file, read strictly: every complaint has file and line, and says what would be right."""

from pathlib import Path

import pytest

from gpufaas_cli.commands.new import extended
from gpufaas_cli.stack import Stack, find_stack, gateway_in, read_stack
from gpufaas_cli.stack_text import BadStack
from gpufaas_core.errors import InvalidSpec
from gpufaas_templates import find_template

HEAD = "version: 1.0\nprovider:\n  name: openfaas\n"


def read(folder: Path, text: str) -> Stack:
    (folder / "stack.yaml").write_text(text)
    return read_stack(folder / "stack.yaml", env={})


def test_all_fields_of_a_function_are_read(tmp_path: Path) -> None:
    (tmp_path / "fn").mkdir()
    stack = read(
        tmp_path,
        """\
version: 1.0
provider:
  name: openfaas
  gateway: http://gateway:8080
functions:
  fn:
    lang: python3-torch
    handler: ./fn
    image: me/fn:1
    fprocess: python3
    namespace: dev
    environment: {A: b}
    secrets: [key]
    constraints: ["gpu=true"]
    labels: {team: a}
    annotations: {gpufaas.memory: 512Mi}
    limits: {memory: 128Mi, cpu: 100m, nvidia.com/gpu: 1}
    requests: {memory: 64Mi}
    readonly_root_filesystem: true
    build_args: {EPOCHS: 3}
    build_options: [dev]
    build_secrets: {id: ./path}
    platforms: linux/amd64,linux/arm64
configuration:
  templates:
    - name: python3-torch
      source: https://host/repo#ref
  copy: [./common]
""",
    )

    fn = stack.functions["fn"]

    assert stack.gateway == "http://gateway:8080"
    assert (fn.lang, fn.image, fn.fprocess, fn.namespace) == ("python3-torch", "me/fn:1", "python3", "dev")
    assert fn.handler == tmp_path / "fn"
    assert (fn.environment, fn.secrets, fn.constraints) == ({"A": "b"}, ("key",), ("gpu=true",))
    assert (fn.labels, fn.annotations) == ({"team": "a"}, {"gpufaas.memory": "512Mi"})
    assert fn.limits == {"memory": "128Mi", "cpu": "100m", "nvidia.com/gpu": "1"}
    assert (fn.requests, fn.readonly_root_filesystem) == ({"memory": "64Mi"}, True)
    assert (fn.build_args, fn.build_options) == ({"EPOCHS": "3"}, ("dev",))
    assert (fn.build_secrets, fn.platforms) == ({"id": "./path"}, "linux/amd64,linux/arm64")
    assert [(each.name, each.source) for each in stack.templates] == [("python3-torch", "https://host/repo#ref")]
    assert stack.copy == (Path("common"),)
    assert fn.is_built


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("true", "true"),
        ("1.50", "1.50"),
        ("0x10", "0x10"),
        ("yes", "yes"),
        ("2026-01-02", "2026-01-02"),
        ("~", ""),
        ("null", ""),
        ("", ""),
        ('"null"', "null"),
        ("'~'", "~"),
        ("1_000", "1_000"),
        ("|\n        two\n        lines", "two\nlines\n"),
    ],
)
def test_scalars_keep_their_source_text(tmp_path: Path, source: str, text: str) -> None:
    stack = read(tmp_path, f"{HEAD}functions:\n  a:\n    image: x\n    environment:\n      K: {source}\n")

    assert stack.functions["a"].environment == {"K": text}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEAD}function: {{}}\n", r"stack.yaml:4: unknown key 'function' in the file: did you mean 'functions'\?"),
        (f"{HEAD}  gatway: x\n", r"stack.yaml:4: unknown key 'gatway' in provider: did you mean 'gateway'\?"),
        (
            f"{HEAD}functions:\n  a:\n    image: x\n    enviroment: {{A: b}}\n",
            r"stack.yaml:7: unknown key 'enviroment' in function a: did you mean 'environment'\?",
        ),
        (
            f"{HEAD}functions:\n  a:\n    image: x\n    zzz: 1\n",
            r":7: unknown key 'zzz' in function a; there are: lang",
        ),
        (f"{HEAD}functions:\n  a:\n    image: [x]\n", r"stack.yaml:6: a.image must be text, but is a list"),
        (f"{HEAD}functions:\n  a:\n    image: x\n    labels:\n      k: {{a: b}}\n", r":8: a.labels.k must be text"),
        (f"{HEAD}functions:\n  a:\n    image: x\n    labels: [k=v]\n", r":7: a.labels must be a map .* but is a list"),
        (f"{HEAD}functions:\n  a:\n    image: x\n    build_args: [k=v]\n", r":7: a.build_args must be a map"),
        (f"{HEAD}functions:\n  a:\n    image: x\n    secrets: key\n", r":7: a.secrets must be a list, but is the text"),
        (f"{HEAD}functions:\n  a:\n    image: x\n    skip_build: maybe\n", r":7: a.skip_build is 'maybe': .* true or"),
        (f"{HEAD}functions:\n  a:\n    image: x\n    limits: {{mem: 1}}\n", r":7: unknown key 'mem' in a.limits: did"),
        (f"{HEAD}functions:\n  a:\n    handler: ./a\n", r":6: function a has no lang: add 'lang: python3-torch'"),
        (f"{HEAD}functions:\n  a:\n    lang: python3-http\n", r":6: function a has no handler: add 'handler: ./a'"),
        (f"{HEAD}functions:\n  a:\n    lang: python3-http\n    image: x\n", r"function a has no handler"),
        (f"{HEAD}functions:\n  a: {{skip_build: true}}\n", r":5: function a has skip_build but no image"),
        (f"{HEAD}functions:\n  a:\n", r":5: function a has no lang"),
        (f"{HEAD}functions:\n  A_b: {{image: x}}\n", r":5: 'A_b' is not a function name"),
        (
            f"{HEAD}functions:\n  a: {{image: x}}\n  a: {{image: y}}\n",
            r":6: 'a' is in functions twice, first on line 5",
        ),
        (f"{HEAD}functions: [a]\n", r":4: functions must be a map"),
        (
            f"{HEAD}functions:\n  a:\n    image: x\n    environment_file: [no.yml]\n",
            r":7: environment_file no.yml is not",
        ),
        ("version: 2.0\nprovider: {name: openfaas}\n", r"stack.yaml:1: version must be 1.0"),
        ("version: 1.0\n", r"stack.yaml:1: provider is missing"),
        ("provider: {name: faas}\n", r"stack.yaml:1: provider.name is 'faas': it must be openfaas"),
        ("provider:\n  gateway: x\n", r"stack.yaml:2: provider has no name"),
        ("", r"stack.yaml: it is empty"),
        ("# only a comment\n", r"stack.yaml: it is empty"),
        ("just text\n", r"stack.yaml:1: the file must be a map"),
        ("a:\n\tb: c\n", r"stack.yaml:2: it is not YAML: found character '\\t'"),
        ("a: [b\n", r"stack.yaml:\d: it is not YAML"),
        ("a: b: c\n", r"stack.yaml:1: it is not YAML"),
        ("a: b\n---\nc: d\n", r"stack.yaml:2: it is not YAML"),
        ("ok: a\nbad: \x00\n", r"stack.yaml:2: it is not YAML: character '\\x00'"),
        ("[" * 5000, r"nested too deeply"),
        (f"{HEAD}functions: &f\n  <<: *f\n", r"merges itself"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadStack, match=message) as raised:
        read(tmp_path, text)

    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_text_or_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(BadStack, match="not text in UTF-8"):
        read_stack(tmp_path / "stack.yaml")
    with pytest.raises(BadStack, match="No such file"):
        read_stack(tmp_path / "none.yaml")
    with pytest.raises(BadStack, match="Is a directory"):
        read_stack(tmp_path)


def test_keys_that_begin_with_x_are_the_users_own(tmp_path: Path) -> None:
    stack = read(
        tmp_path,
        "x-owner: [me, {a: b}]\nprovider: {name: openfaas, x-a: b}\nconfiguration: {x-b: {}}\n"
        "functions:\n  x-base: &base\n    image: x\n    whatever: 1\n  a: {image: y, x-note: [1]}\n",
    )

    assert list(stack.functions) == ["a"]


def test_aliases_and_merges_that_stand_for_too_much_are_refused(tmp_path: Path) -> None:
    """Nine lines stood for 400 million values: reading them took all the memory there is."""
    bomb = ["x-0: &x0 {a: b}"]
    bomb += [f"x-{n}: &x{n} {{<<: [{', '.join([f'*x{n - 1}'] * 9)}]}}" for n in range(1, 10)]
    bomb += ["functions:", "  f: {lang: python3-http, environment: {<<: *x9}}"]
    (tmp_path / "stack.yaml").write_text(HEAD + "\n".join(bomb))

    with pytest.raises(BadStack, match=r"aliases \(\*\) and merges \(<<\) stand for more than 1,000,000 values"):
        read_stack(tmp_path / "stack.yaml")

    template = tmp_path / "template" / "evil"
    template.mkdir(parents=True)
    (template / "template.yml").write_text("\n".join(bomb))
    with pytest.raises(InvalidSpec, match="stand for more than"):
        find_template("evil", [tmp_path / "template"])


def test_anchors_and_merges_work_and_own_keys_win(tmp_path: Path) -> None:
    stack = read(
        tmp_path,
        f"x-base: &base\n  image: base\n  labels: {{a: b}}\n{HEAD}functions:\n"
        "  one:\n    <<: *base\n  two:\n    <<: [*base]\n    image: own\n",
    )

    assert stack.functions["one"].image == "base"
    assert stack.functions["two"].image == "own"
    assert stack.functions["two"].labels == {"a": "b"}


def test_environment_files_win_over_inline_and_later_ones_over_earlier(tmp_path: Path) -> None:
    (tmp_path / "one.yml").write_text("environment:\n  A: one\n  B: one\n  ON: yes\n")
    (tmp_path / "two.yml").write_text("environment: {B: two}\n")

    stack = read(
        tmp_path,
        f"{HEAD}functions:\n  a:\n    image: x\n    environment: {{A: inline, C: inline}}\n"
        "    environment_file: [one.yml, two.yml]\n",
    )

    assert stack.functions["a"].environment == {"A": "one", "B": "two", "C": "inline", "ON": "yes"}


def test_a_wrong_environment_file_is_named_itself(tmp_path: Path) -> None:
    (tmp_path / "env.yml").write_text("environment:\n  A: [b]\n")

    with pytest.raises(BadStack, match=r"env.yml:2: environment.A must be text"):
        read(tmp_path, f"{HEAD}functions:\n  a:\n    image: x\n    environment_file: [env.yml]\n")


def test_stack_yaml_is_found_before_stack_yml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_stack() is None
    with pytest.raises(BadStack, match="gpufaas new"):
        read_stack()

    (tmp_path / "stack.yml").write_text(f"{HEAD}functions: {{old: {{image: x}}}}\n")
    assert list(read_stack().functions) == ["old"]

    (tmp_path / "stack.yaml").write_text(f"{HEAD}functions: {{new: {{image: x}}}}\n")
    assert list(read_stack().functions) == ["new"]


def test_paths_are_beside_the_stack_file_or_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub" / "fn").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)

    stack = read(
        Path("sub"),
        f"{HEAD}functions:\n  a: {{lang: l, handler: ./fn}}\n  b: {{lang: l, handler: ./here}}\n"
        "configuration: {copy: [here]}\n",
    )

    assert stack.functions["a"].handler == Path("sub/fn")
    assert stack.functions["b"].handler == Path("here")
    assert stack.root == Path()


def test_the_gateway_is_found_however_wrong_the_rest_is(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text("provider: {gateway: 'http://x:1'}\nnonsense: [\n]\n")
    assert gateway_in(tmp_path / "stack.yaml") == "http://x:1"

    (tmp_path / "stack.yaml").write_text("resolver: lts-22\n")  # Haskell's stack has a stack.yaml, too
    assert gateway_in(tmp_path / "stack.yaml") is None


class TestSelection:
    @pytest.fixture
    def stack(self, tmp_path: Path) -> Stack:
        names = ("cnn-a", "cnn-b", "echo")
        return read(tmp_path, f"{HEAD}functions:\n" + "".join(f"  {name}: {{image: x}}\n" for name in names))

    def test_all_without_any(self, stack: Stack) -> None:
        assert [each.name for each in stack.select()] == ["cnn-a", "cnn-b", "echo"]

    def test_by_name_glob_or_regex(self, stack: Stack) -> None:
        assert [each.name for each in stack.select(["echo", "cnn-a", "echo"])] == ["echo", "cnn-a"]
        assert [each.name for each in stack.select(glob="cnn-*")] == ["cnn-a", "cnn-b"]
        assert [each.name for each in stack.select(regex="b$|^e")] == ["cnn-b", "echo"]

    @pytest.mark.parametrize(
        ("names", "glob", "regex", "message"),
        [
            (["ecko"], None, None, "no function 'ecko': did you mean 'echo'"),
            ([], "x*", None, r"no function matches 'x\*'; there are cnn-a, cnn-b, echo"),
            ([], None, "(", "not a regular expression"),
            ([], "a", "b", "give one of these"),
            (["echo"], "a", None, "give one of these"),
        ],
    )
    def test_nothing_found_is_an_error(
        self, stack: Stack, names: list[str], glob: str | None, regex: str | None, message: str
    ) -> None:
        with pytest.raises(BadStack, match=message):
            stack.select(names, glob, regex)

    def test_a_file_without_functions_says_how_to_add_one(self, tmp_path: Path) -> None:
        with pytest.raises(BadStack, match="gpufaas new"):
            read(tmp_path, HEAD).select()


class TestExtending:
    ENTRY = "lang: python3-http\n"

    def extend(self, folder: Path, text: str) -> str:
        (folder / "stack.yaml").write_bytes(text.encode())
        return extended(folder / "stack.yaml", "b", {"lang": "python3-http", "handler": "./b", "image": "b:latest"})

    def test_text_and_comments_stay(self, tmp_path: Path) -> None:
        text = (
            "# mine\nversion: 1.0\nprovider:\n  name: openfaas\nfunctions:\n    a:   # first\n"
            "        image: ${X}/a  # a's\n\n# about what follows\nconfiguration:\n  copy: [x]\n"
        )

        assert self.extend(tmp_path, text) == text.replace(
            "# a's\n",
            "# a's\n    b:\n        lang: python3-http\n        handler: ./b\n        image: b:latest\n",
        )

    @pytest.mark.parametrize(
        "text",
        [
            HEAD,
            HEAD.rstrip(),
            f"{HEAD}functions:\n",
            f"{HEAD}functions: {{}}\n",
            f"{HEAD}functions: {{}}  # none yet\nconfiguration: {{}}\n",
            f"{HEAD}functions: null",
            f"{HEAD}functions:\n  a: {{image: x}}",
            f"{HEAD}functions:\n  a:\n    image: x\n    environment:\n      K: |\n        a\n\n        b\n\nx-c: 1\n",
            f"x-a: &a\n  image: x\n{HEAD}functions:\n  a: *a\nx-b: 2\n",
            f"{HEAD}functions:\n  a:\n    image: x\n    secrets:\n    - k\n    - l # last\n# end\n",
            f"{HEAD}functions:\n  a:\n    image: x\n".replace("\n", "\r\n"),
            "",
        ],
    )
    def test_any_way_to_write_it_gains_one_function(self, tmp_path: Path, text: str) -> None:
        before = set(read(tmp_path, text).functions) if text else set()

        result = self.extend(tmp_path, text)

        stack = read(tmp_path, result)
        assert set(stack.functions) == before | {"b"}
        assert stack.functions["b"].lang == "python3-http"
        for line in text.splitlines():
            assert line.split("{}")[0].split("null")[0].strip() in result

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (f"{HEAD}functions:\n  b: {{image: x}}\n", r"stack.yaml:5: there is a function b already"),
            (
                f"{HEAD}functions: {{a: {{image: x}}}}\n",
                r"stack.yaml:4: cannot extend .* by hand: b: {lang: python3-http",
            ),
            ("- a\n", r"not a stack file"),
            ("a: [\n", r"not YAML"),
        ],
    )
    def test_what_would_be_spoilt_is_left_to_its_author(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(BadStack, match=message):
            self.extend(tmp_path, text)
