"""Commands and flags that the CLI had once answer with what does it now."""

import pytest
from click.testing import Result
from tests.unit.cli.conftest import Run

from gpufaas_cli import removed


def told(result: Result) -> str:
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize(
    ("asked", "name", "instead"),
    [
        ("generate", "generate", "faas-cli generate"),
        ("generate resize -n dev --tag sha", "generate", "faas-cli generate"),
        ("store", "store", "faas-cli store list"),
        ("store list -p arm64 --json", "store", "faas-cli store list"),
        ("store describe nodeinfo", "store describe", "faas-cli store describe NAME"),
        ("store inspect nodeinfo", "store inspect", "faas-cli store describe NAME"),
        ("store deploy figlet --name banner -l a=b", "store deploy", "faas-cli store deploy NAME -g GATEWAY"),
        ("template store", "template store", "faas-cli template store list"),
        ("template store list --recommended", "template store", "faas-cli template store list"),
        ("templates store describe go", "template store describe", "faas-cli template store describe NAME"),
        ("template store pull go@1.0", "template store pull", "faas-cli template store pull NAME"),
        ("plan hardware problem.json --explain", "plan hardware", "gpufaas solve hardware FILE"),
        ("plan size problem.json", "plan size", "gpufaas solve size FILE"),
        ("plan compute --policy usher - -j", "plan compute", "gpufaas solve compute FILE"),
        ("secret generate -o payload.txt --length 64", "secret generate", "faas-cli secret generate"),
        ("secret keygen", "secret keygen", "faas-cli secret keygen"),
        ("secrets seal key.pub --from-literal a=b", "secret seal", "faas-cli secret seal"),
        ("secret unseal key --help", "secret unseal", "faas-cli secret unseal"),
    ],
)
def test_a_removed_command_is_wrong_usage_and_names_the_command_to_use(
    run: Run, asked: str, name: str, instead: str
) -> None:
    assert told(run(*asked.split())).startswith(f"gpufaas: 'gpufaas {name}' was removed: use '{instead}")


@pytest.mark.parametrize(
    ("asked", "flag", "instead"),
    [
        ("publish --remote-builder http://x:8080 --payload-secret p", "--remote-builder", "faas-cli publish"),
        ("up --publish --payload-secret=p", "--payload-secret", "faas-cli publish"),
        ("publish --builder-public-key k", "--builder-public-key", "faas-cli publish"),
        ("serve --builder-secret p", "--builder-secret", "docker buildx build --push"),
        ("gateway --builder-secret=p --builder-push", "--builder-secret", "docker buildx build --push"),
        ("serve --builder-push", "--builder-push", "docker buildx build --push"),
    ],
)
def test_a_removed_flag_is_wrong_usage_and_names_what_to_use(run: Run, asked: str, flag: str, instead: str) -> None:
    line = told(run(*asked.split()))

    assert line.startswith(f"gpufaas: {flag} was removed: ")
    assert f"'{instead}" in line


@pytest.mark.parametrize("asked", ["publish", "up --publish"])
def test_a_remote_builder_in_the_environment_is_not_passed_over(
    run: Run, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv("OPENFAAS_REMOTE_BUILDER", "http://x:8080")

    assert "OPENFAAS_REMOTE_BUILDER is set, and no longer read here: unset it, or use" in told(run(*asked.split()))


def test_what_was_removed_is_in_no_help(run: Run) -> None:
    shown = "".join(
        run(*words.split(), "--help").stdout
        for words in ("", "secret", "template", "publish", "up", "serve", "gateway")
    )

    assert [each for each in removed.FLAGS if each in shown] == []
    assert [each for each in ("generate", "store", "keygen", "unseal") if f"\n  {each} " in shown] == []


def test_other_unknown_flags_are_answered_as_before(run: Run) -> None:
    assert told(run("publish", "--remote")).startswith("gpufaas: no such option '--remote'")
