"""``${...}`` in a stack file: the forms that the real faas-cli was seen to take."""

import re
from pathlib import Path

import pytest

from gpufaas_cli.stack import choose_gateway, read_stack
from gpufaas_cli.stack_text import BadStack
from gpufaas_cli.substitute import BadSubstitution, substitute

ENV = {"SET": "abc", "EMPTY": "", "PATHY": "a/b/c.tar.gz"}


@pytest.mark.parametrize(
    ("form", "result"),
    [
        ("${SET}", "abc"),
        ("${UNSET}", ""),
        ("${UNSET:-def}", "def"),
        ("${EMPTY:-def}", "def"),
        ("${UNSET:=def}", "def"),
        ("${UNSET=def}", "def"),
        ("${SET:-def}", "abc"),
        ("${UNSET:-${SET}}", "abc"),
        ("${UNSET:-a ${SET} ${UNSET:-b}}", "a abc b"),
        ("$SET", "$SET"),
        ("$$SET", "$SET"),
        ("$${SET}", "${SET}"),
        ("${#SET}", "3"),
        ("${SET^^}", "ABC"),
        ("${SET^}", "Abc"),
        ("${SET,,}", "abc"),
        ("${SET,}", "abc"),
        ("${SET:0:2}", "ab"),
        ("${SET:1}", "bc"),
        ("${SET/a/b}", "bbc"),
        ("${PATHY//\\//-}", "a/b/c.tar.gz"),
        ("${SET//b/}", "ac"),
        ("${SET#a}", "bc"),
        ("${SET%c}", "ab"),
        ("${PATHY##*/}", "c.tar.gz"),
        ("${PATHY#*/}", "b/c.tar.gz"),
        ("${PATHY%%.*}", "a/b/c"),
        ("${PATHY%.*}", "a/b/c.tar"),
        ("${SET:+alt}", "abc"),
        ("costs 5$", "costs 5$"),
        ("a ${SET} b ${SET}", "a abc b abc"),
    ],
)
def test_a_form_has_the_value_that_faas_cli_gives_it(form: str, result: str) -> None:
    assert substitute(form, ENV) == result


@pytest.mark.parametrize("form", ["${UNSET-def}", "${SET", "${}", "${SET:x}", "${UNSET:-${SET}", "${SET!}"])
def test_a_form_that_is_not_known_is_an_error(form: str) -> None:
    with pytest.raises(BadSubstitution):
        substitute(form, ENV)


def test_what_a_variable_holds_is_not_substituted_again() -> None:
    assert substitute("${A}", {"A": "${B}", "B": "x"}) == "${B}"


STACK = """\
# ${COMMENT} is replaced here as well
version: 1.0
provider: {name: openfaas}
functions:
  hello:
    image: ${PREFIX:-local}/hello:${TAG}
"""


def test_variables_are_replaced_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text(STACK)

    stack = read_stack(tmp_path / "stack.yaml", env={"TAG": "1.0", "COMMENT": "a\nb"})

    assert stack.functions["hello"].image == "local/hello:1.0"


VALUES = [
    "a #b", "# a", "a: b", "a:", "x, y", "'quoted'", '"quoted"', 'half "', "it's", "two\nlines\n", "*alias",
    "&anchor a", "- item", "{a: 1}", "[a]", '{"json": [1, "#"]}', "!tag", "%percent", "@at", "`tick", "| bar", "> fold",
    "~", "null", "true", "0x10", " spaces ", "\ttab", "back\\slash", "${SET}", "$$", "---", "<<", "\x1b[0m", "é",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_a_value_stays_whole_whatever_yaml_would_read_in_it(tmp_path: Path, value: str) -> None:
    (tmp_path / "stack.yaml").write_text(
        "provider: {name: openfaas}\nfunctions:\n  f:\n    image: x\n    secrets:\n    - ${V}\n    environment:\n"
        "      PLAIN: ${V}\n      PART: a ${V} b\n      QUOTED: \"${V}\"\n      SINGLE: '${V}'\n"
        "      BLOCK: |-\n        ${V}\n      OTHER: ${UNSET:-${V}}\n      NAMED: x[${V}]{${V}}\n"
        "    labels: {flow: ${V}, more: 1}\n    annotations: {flow: ${V}}\n    constraints: ['${V}']\n"
    )

    found = read_stack(tmp_path / "stack.yaml", env={"V": value}).functions["f"]

    assert found.secrets == (value,)
    assert found.environment == {"PART": f"a {value} b", "NAMED": f"x[{value}]{{{value}}}"} | dict.fromkeys(
        ("PLAIN", "QUOTED", "SINGLE", "BLOCK", "OTHER"), value
    )
    assert (found.labels, found.annotations) == ({"flow": value, "more": "1"}, {"flow": value})
    assert found.constraints == (value,)


TYPED = """\
version: ${VERSION}
provider: {name: openfaas, gateway: "${GATEWAY}"}
functions:
  ${NAME}:
    image: x
    skip_build: ${SKIP}
    readonly_root_filesystem: ${UNSET}
    fprocess: python ${UNSET}
    namespace: ${UNSET}
    limits: {memory: "${MEMORY}", nvidia.com/gpu: ${GPUS}}
    environment: ${MAP}
    annotations: ${BLOCK}
    labels: ${UNSET}
    secrets: ${LIST}
    constraints: [ ${FLOW} ]
    build_args: {${PAIRS}}
    build_options:
      ${ITEMS}
    build_secrets: ${TOP}
"""


def test_switches_numbers_maps_and_lists_may_come_from_variables(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text(TYPED)
    env = {
        "VERSION": "1.0", "GATEWAY": "http://g:1", "NAME": "f", "SKIP": "true", "MEMORY": "1Gi", "GPUS": "1",
        "MAP": "{A: b, C: 'd # e'}", "BLOCK": "\n      a: b\n      c: d", "LIST": "[a, b]", "FLOW": "a=1, b=2",
        "PAIRS": "a: b, c: d", "ITEMS": "- a\n      - b", "TOP": "a: b\nc: d",
    }  # fmt: skip

    stack = read_stack(tmp_path / "stack.yaml", env=env)

    fn = stack.functions["f"]
    assert (stack.gateway, fn.skip_build, fn.readonly_root_filesystem) == ("http://g:1", True, False)
    assert (fn.fprocess, fn.namespace, fn.limits) == ("python", None, {"memory": "1Gi", "nvidia.com/gpu": "1"})
    assert (fn.environment, fn.annotations) == ({"A": "b", "C": "d # e"}, {"a": "b", "c": "d"})
    assert (fn.labels, fn.secrets, fn.constraints) == ({}, ("a", "b"), ("a=1", "b=2"))
    assert (fn.build_args, fn.build_options) == ({"a": "b", "c": "d"}, ("a", "b"))
    assert fn.build_secrets == {"a": "b", "c": "d"}


LINES = STACK + "    ${MORE}\n    ${UNSET}\n    environment:\n      KEY: ${KEY}\n"


def test_a_variable_may_stand_for_lines_and_the_values_of_others_stay_whole(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text(LINES)

    env = {"TAG": "1", "MORE": "fprocess: cat\n    namespace: dev", "KEY": "a #b"}
    found = read_stack(tmp_path / "stack.yaml", env=env)

    assert (found.functions["hello"].fprocess, found.functions["hello"].namespace) == ("cat", "dev")
    assert found.functions["hello"].environment == {"KEY": "a #b"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a", "stack.yaml:6: f.environment must be a map of KEY: VALUE, but is the text 'a'"),
        ("'a' b", "stack.yaml:6: it is not YAML"),
        ("{a: b", "stack.yaml:6: it is not YAML"),
        ("{a: [b]}", "stack.yaml:6: f.environment.a must be text, but is a list"),
    ],
)
def test_a_variable_that_gives_no_map_is_named_by_its_line(tmp_path: Path, value: str, message: str) -> None:
    (tmp_path / "stack.yaml").write_text(
        "provider:\n  name: openfaas\nfunctions:\n  f:\n    image: x\n    environment: ${MAP}\n"
    )

    with pytest.raises(BadStack, match=re.escape(message)):
        read_stack(tmp_path / "stack.yaml", env={"MAP": value})


def test_what_a_message_shows_is_the_value_of_a_variable(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text(
        "provider:\n  name: openfaas\nfunctions:\n  f:\n    image: x\n    secrets: a-${V}\n"
    )

    with pytest.raises(BadStack, match=r"stack.yaml:6: f.secrets must be a list, but is the text 'a-b'"):
        read_stack(tmp_path / "stack.yaml", env={"V": "b"})


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text(STACK)

    stack = read_stack(tmp_path / "stack.yaml", env={}, envsubst=False)

    assert stack.functions["hello"].image == "${PREFIX:-local}/hello:${TAG}"


def test_a_bad_form_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text("version: 1.0\nprovider:\n  name: ${X-y}\n")

    with pytest.raises(BadStack, match=r"stack.yaml:3: cannot substitute: missing closing brace"):
        read_stack(tmp_path / "stack.yaml")


@pytest.mark.parametrize(
    ("flag", "in_file", "env", "chosen"),
    [
        (None, None, {}, "http://127.0.0.1:8080"),
        (None, None, {"OPENFAAS_URL": "http://env:1/"}, "http://env:1"),
        (None, "http://file:1", {"OPENFAAS_URL": "http://env:1"}, "http://file:1"),
        (None, "http://127.0.0.1:8080/", {"OPENFAAS_URL": "http://env:1"}, "http://env:1"),
        ("flag:9", "http://file:1", {"OPENFAAS_URL": "http://env:1"}, "http://flag:9"),
        ("http://127.0.0.1:8080", "http://file:1", {}, "http://127.0.0.1:8080"),
        ("HTTPS://Me:Secret@Host/Some/Path//", None, {}, "https://Me:Secret@host/Some/Path"),
    ],
)
def test_the_gateway_is_the_flag_then_the_file_then_the_environment(
    flag: str | None, in_file: str | None, env: dict[str, str], chosen: str
) -> None:
    assert choose_gateway(flag, in_file, env) == chosen
