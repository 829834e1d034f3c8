"""
What a `PolicySpec` can name: our policies, those of the entry points ``gpufaas.policies``, and what fills a role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import getdoc
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct
from msgspec.structs import fields

from gpufaas_cache_manager.replacement import REPLACEMENTS, Lru, Replacement
from gpufaas_core.errors import InvalidSpec
from gpufaas_scheduler.contract import SchedulingPolicy
from gpufaas_scheduler.policies.least_wait import LeastWait
from gpufaas_scheduler.policies.load_balance import LoadBalance
from gpufaas_scheduler.policies.locality import Lalb, LalbO3
from gpufaas_scheduler.policies.spec import (
    Chosen,
    NoOptions,
    PolicySpec,
    allowed,
    description,
    read_options,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS: Final = "gpufaas.policies"

DEFAULT_POLICY: Final = "least-wait"
"""The default of `serve`, of the simulator, and of journals that name no policy."""

POLICIES: Final[Mapping[str, Callable[..., SchedulingPolicy]]] = {
    each.name: each for each in (LoadBalance, Lalb, LalbO3, LeastWait)
}
"""Name to factory. It takes its ``Options``, if it has some."""

ROLES: Final[Mapping[str, tuple[str, Mapping[str, Callable[..., Any]]]]] = {
    "replacement": (Lru.name, REPLACEMENTS),
}
"""By the name of the role: its default, and what may fill it."""


def make_policy(spec: PolicySpec | str) -> SchedulingPolicy:
    """
    Return the policy that *spec* names.

    :raises InvalidSpec: it names something that is not there, or an option or value that is not allowed; or an
        installed policy cannot be made
    """
    if isinstance(spec, str):
        spec = PolicySpec.parse(spec)
    replacement_of(spec)
    factory, origin = _policy(spec.name)
    given = read_options(spec.name, options_of(factory), spec.options)
    policy: SchedulingPolicy
    if not origin:
        policy = _made(factory, given)
        return policy
    try:
        policy = _made(factory, given)
        missing = [each for each in ("name", "pass_limit", "plan") if not hasattr(policy, each)]
    except Exception as exc:
        # Foreign code may raise anything; the message names its origin.
        raise InvalidSpec(f"policy {spec.name!r} ({origin}) cannot be made: {type(exc).__name__}: {exc}") from exc
    if missing:
        raise InvalidSpec(f"policy {spec.name!r} ({origin}) has no {', '.join(missing)}: see SchedulingPolicy")
    return policy


def replacement_of(spec: PolicySpec) -> Replacement:
    """
    Return the order of victims that *spec* names.

    :raises InvalidSpec: there is no such order, or the spec fills another role
    """
    for role in spec.roles:
        if role not in ROLES:
            raise InvalidSpec(f"policy {str(spec)!r}: there is no role {role!r}: choose one of {', '.join(ROLES)}")
    default, fill = ROLES["replacement"]
    chosen = spec.roles.get("replacement", Chosen(default))
    if chosen.name not in fill:
        raise InvalidSpec(f"no replacement is called {chosen.name!r}: choose one of {', '.join(fill)}")
    factory = fill[chosen.name]
    made: Replacement = _made(factory, read_options(chosen.name, options_of(factory), chosen.options))
    return made


def policy_spec(text: str) -> PolicySpec:
    """
    Read a spec from its text, and check all that it names; the values of options have their types.

    :raises InvalidSpec: as `make_policy`
    """
    spec = PolicySpec.parse(text)
    make_policy(spec)
    factory, _ = _policy(spec.name)
    given = read_options(spec.name, options_of(factory), spec.options)
    return PolicySpec(spec.name, {name: getattr(given, name) for name in spec.options}, spec.roles)


def options_of(factory: Callable[..., Any]) -> type[Struct]:
    """Return the type of the options that *factory* takes."""
    kind: type[Struct] = getattr(factory, "Options", NoOptions)
    return kind


def _made(factory: Callable[..., Any], options: Struct) -> Any:
    return factory() if isinstance(options, NoOptions) else factory(options)


def _policy(name: str) -> tuple[Callable[..., SchedulingPolicy], str]:
    """Return the factory of a policy, and the module that it is from if it is not ours."""
    if name in POLICIES:
        return POLICIES[name], ""
    plugins = _plugins()
    if name not in plugins:
        raise InvalidSpec(f"no policy is called {name!r}: choose one of {', '.join([*POLICIES, *plugins])}")
    value = plugins[name].value
    try:
        return plugins[name].load(), value
    except Exception as exc:
        # Foreign code may raise anything; the message names its origin.
        raise InvalidSpec(f"policy {name!r} ({value}) cannot be made: {type(exc).__name__}: {exc}") from exc


def _plugins() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # takes 15 ms, only needed for a foreign policy

    return {each.name: each for each in sorted(entry_points(group=ENTRY_POINTS), key=lambda each: each.name)}


# --- what there is ----------------------------------------------------------------------------------------------------


class Described(Struct, frozen=True):
    """A policy, or what fills a role, for people."""

    role: str
    """Empty for a policy."""
    name: str
    says: str
    options: tuple[tuple[str, str, str, str], ...]
    """Name, what is allowed, the default, and what it means."""


def described() -> list[Described]:
    """
    Return all that a spec can name.

    :raises InvalidSpec: an installed policy cannot be loaded
    """
    found = [_describe("", name, _policy(name)[0]) for name in (*POLICIES, *_plugins())]
    return found + [_describe(role, name, each) for role, (_, fill) in ROLES.items() for name, each in fill.items()]


def _describe(role: str, name: str, factory: Callable[..., Any]) -> Described:
    says = (getdoc(factory) or "").partition("\n")[0]
    options = tuple(
        (each.name, allowed(each.type), str(each.default), description(each.type))
        for each in fields(options_of(factory))
    )
    return Described(role, name, says, options)
