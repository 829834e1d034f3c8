"""``${...}`` in a stack file: the forms that the real faas-cli was seen to take."""

from pathlib import Path

import pytest

from gpufaas_cli.stack import BadStack, choose_gateway, read_stack
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


def test_the_whole_text_is_substituted_before_yaml_reads_it(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text(STACK)

    stack = read_stack(tmp_path / "stack.yaml", env={"TAG": "1.0\n    fprocess: cat", "COMMENT": "x"})

    assert stack.functions["hello"].image == "local/hello:1.0"
    assert stack.functions["hello"].fprocess == "cat"


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
