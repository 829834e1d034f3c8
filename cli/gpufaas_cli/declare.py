"""How commands are declared: examples in the docstring, options that arrive as one value, results as text or JSON."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator
from itertools import islice
from typing import Any, TypeVar

import click

from gpufaas_core.errors import GpufaasError, InvalidSpec

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_EXAMPLES = "\n\nExamples:\n"
_TAIL = {"true": "--follow", "false": "--no-follow"}  # of faas-cli: a switch, and not a number of lines


class Command(click.Command):
    """A command whose docstring ends with ``Examples:``, and a line for each. It takes flags as Go's programs do."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        text, _, examples = inspect.cleandoc(attributes.get("help") or "").partition(_EXAMPLES)
        epilog = {"epilog": f"\b\nExamples:\n{examples}"} if examples else {}
        super().__init__(*args, **{**attributes, "help": text, **epilog})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _without_go_spellings(ctx, args))


class Group(Command, click.Group):
    """A group that is a `Command`, and whose commands are some."""

    command_class = Command
    group_class = type


def command(name: str, **attributes: Any) -> Callable[[Callable[..., Any]], click.Command]:
    return click.command(name, cls=Command, **attributes)


def group(name: str, **attributes: Any) -> Callable[[Callable[..., Any]], Group]:
    return click.group(name, cls=Group, **attributes)


def _without_go_spellings(ctx: click.Context, args: list[str]) -> list[str]:
    """Return *args* as click takes them: for ``--update=false`` ``--no-update``, for ``-g=URL`` ``-g URL``."""
    known = [each for each in ctx.command.get_params(ctx) if isinstance(each, click.Option)]
    options = {name: each for each in known for name in each.opts + each.secondary_opts}
    given: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        option = options.get(name)
        if option is None or (option.is_flag and not equals):
            given += [word, *(words if word == "--" else ())]
        elif "--tail" in option.opts and value in _TAIL:
            given.append(_TAIL[value])
        elif not option.is_flag:
            given += [name, *([value] if equals else islice(words, 1))]  # which may look like a switch
        elif click.BOOL.convert(value, option, ctx) == (name in option.opts):
            given.append(option.opts[0])
        else:  # without a negative, it was not given
            given = [each for each in given if each not in option.opts] + option.secondary_opts[:1]
    return given


def options(*each: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds these options, in this order."""

    def decorate(function: F) -> F:
        for option in reversed(each):
            function = option(function)
        return function

    return decorate


def gathered(
    name: str, kind: Callable[..., Any], *each: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Return a decorator that adds the options *each*, and gives their values as one *kind*, the parameter *name*.

    :param kind: a dataclass, or a function; the names of the options are those of its fields or parameters
    """
    names = list(inspect.signature(kind).parameters)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            made = kind(**{one: given.pop(one) for one in names if one in given})
            return function(*args, **{name: made}, **given)

        return options(*each)(call)

    return decorate


def shows(
    show: Callable[[Any], object], fails: Callable[[Any], bool] = lambda _: False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Return a decorator that adds ``--json``: what the command returns is printed as JSON, else *show* prints it.

    :param fails: whether the process ends with 1 for that
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def call(*args: Any, as_json: bool, **given: Any) -> None:
            from gpufaas_cli import output

            (output.show_json if as_json else show)(found := function(*args, **given))
            if fails(found):
                raise click.exceptions.Exit(1)

        return as_json(call)

    return decorate


def option(*names: str, says: str, **more: Any) -> Callable[[F], F]:
    """Return an option with the help *says*, which shows its default, if it has one."""
    return click.option(*names, help=says, show_default=more.get("default") not in (None, "", False), **more)


def parsed(parse: Callable[[Any], T]) -> Callable[[click.Context, click.Parameter, Any], T | None]:
    """Return what reads an option's text, as its ``callback``: *parse*, whose `InvalidSpec` is wrong usage."""

    def read(_: click.Context, parameter: click.Parameter, given: Any) -> T | None:
        try:
            return None if given is None else parse(given)
        except InvalidSpec as exc:
            raise click.BadParameter(str(exc), param=parameter) from exc

    return read


def pairs(given: tuple[str, ...]) -> dict[str, str]:
    """Read a repeated KEY=VALUE. :raises InvalidSpec: one is not"""
    found: dict[str, str] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not key:
            raise InvalidSpec(f"{each!r} is not KEY=VALUE")
        found[key] = value
    return found


def repeated(
    *names: str, says: str, metavar: str = "K=V", reads: Callable[[Any], Any] | None = pairs
) -> Callable[[F], F]:
    """Return an option that may be given several times; *reads* all its values, None: they stay a tuple."""
    callback = parsed(reads) if reads else None
    return click.option(*names, multiple=True, callback=callback, metavar=metavar, help=f"{says}; repeatable.")


def _resources(
    memory_limit: str | None, cpu_limit: str | None, memory_request: str | None, cpu_request: str | None
) -> dict[str, dict[str, str]]:
    given = {"limits": (memory_limit, cpu_limit), "requests": (memory_request, cpu_request)}
    return {key: {what: text for what, text in zip(("memory", "cpu"), pair, strict=True) if text}
            for key, pair in given.items()}  # fmt: skip


def resources(read: Callable[[str], str] = str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the options of memory and CPU as ``resources``: the ``limits`` and ``requests`` of a stack file."""
    kinds = (("Memory", "SIZE", "128Mi"), ("CPU", "CORES", "100m"))
    return gathered("resources", _resources, *(
        click.option(f"--{what.lower()}-{kind}", metavar=metavar, callback=parsed(read),
                     help=f"{what} {kind}, as in {as_in}.")
        for kind in ("limit", "request")
        for what, metavar, as_in in kinds
    ))  # fmt: skip


as_json = click.option("-j", "--json", "as_json", is_flag=True, help="Print JSON, for machines.")


@contextlib.contextmanager
def needing(command: str, extras: str) -> Generator[None]:
    """:raises GpufaasError: a package cannot be imported inside; names what to install"""
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.startswith("gpufaas"):
            raise
        raise GpufaasError(
            f"'gpufaas {command}' needs {exc.name}, which is not installed: pip install 'gpufaas[{extras}]'"
        ) from exc
    except InvalidSpec as exc:
        raise click.UsageError(str(exc)) from exc
