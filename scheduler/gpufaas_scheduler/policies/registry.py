"""
What a `PolicySpec` can name: our policies, which are compositions; what fills each role; and what is installed beside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import getdoc
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from msgspec import Struct, defstruct
from msgspec.structs import FieldInfo, fields

from gpufaas_cache_manager.replacement import REPLACEMENTS
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.json_errors import allowed
from gpufaas_scheduler.policies.batching import Waiting
from gpufaas_scheduler.policies.composite import Composite
from gpufaas_scheduler.policies.in_time import InTime
from gpufaas_scheduler.policies.least_wait import NAME, LeastMissed, Relief
from gpufaas_scheduler.policies.load_balance import Anywhere, Arrival
from gpufaas_scheduler.policies.locality import O3, Locality
from gpufaas_scheduler.policies.planned import Planned
from gpufaas_scheduler.policies.prefetch import NextMisses
from gpufaas_scheduler.policies.spec import Chosen, NoOptions, PolicySpec, description, read_options
from gpufaas_scheduler.policy_contract import SchedulingPolicy
from gpufaas_scheduler.roles import (
    ADMISSION,
    BATCHING,
    ORDER,
    PLACEMENT,
    PREFETCH,
    REPLACEMENT,
    SCALING,
    Order,
    Particular,
    Placement,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS: Final = "gpufaas.policies"
"""The group of whole policies; that of what fills a role has its name behind a dot."""

DEFAULT_POLICY: Final = "least-wait"
"""The default of `serve`, of the simulator, and of journals that name no policy."""

POLICY: Final = "policy"
"""Instead of a role: a whole policy."""

Factory: TypeAlias = Callable[..., Any]
"""It takes its ``Options``, if it has some."""


class Preset(Struct, frozen=True):
    """A policy that is a composition. Its options are those of what fills its roles, without those set here."""

    says: str
    roles: dict[str, Chosen]


POLICIES: Final[Mapping[str, Preset | Factory]] = {
    "lb": Preset(
        "An idle device takes the first call that it has room for.",
        {ORDER: Chosen("arrival"), PLACEMENT: Chosen("anywhere")},
    ),
    "lalb": Preset(
        "A call goes where its model is, when that is sooner than a load; in order of arrival.",
        {ORDER: Chosen("o3", {"o3_limit": 0}), PLACEMENT: Chosen("locality")},
    ),
    "lalb-o3": Preset(
        "As lalb, but calls whose model a device holds overtake others, within a limit.",
        {ORDER: Chosen("o3"), PLACEMENT: Chosen("locality")},
    ),
    NAME: Preset(
        "The call and the place that shorten all waiting most, with replicas.",
        {
            ORDER: Chosen(NAME),
            PLACEMENT: Chosen(NAME),
            REPLACEMENT: Chosen("lru", {"park": True}),
            PREFETCH: Chosen("next-misses"),
        },
    ),
}


def nothing() -> None:
    """Nothing."""


FILLS: Final[Mapping[str, Mapping[str, Factory]]] = {
    ADMISSION: {"none": nothing, "in-time": InTime},
    ORDER: {"arrival": Arrival, "o3": O3, NAME: Relief},
    PLACEMENT: {"anywhere": Anywhere, "locality": Locality, NAME: LeastMissed},
    BATCHING: {"none": nothing, "waiting": Waiting},
    REPLACEMENT: REPLACEMENTS,
    SCALING: {"none": nothing, "planned": Planned},
    PREFETCH: {"none": nothing, "next-misses": NextMisses},
}
"""By the name of the role: what may fill it."""

_DEFAULTS: Final = {
    ADMISSION: Chosen("in-time"), BATCHING: Chosen("waiting"), REPLACEMENT: Chosen("lru"),
    SCALING: Chosen("planned"), PREFETCH: Chosen("none"),
}  # fmt: skip
"""What fills a role that neither the spec nor its policy names."""

_MEMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    POLICY: ("name", "plan"), ORDER: ("plan",), PLACEMENT: ("place",), REPLACEMENT: ("order",),
    ADMISSION: ("admit",), BATCHING: ("extend",), SCALING: ("watches", "plan"), PREFETCH: ("plan",),
}  # fmt: skip
"""What installed code must have."""


def make_policy(spec: PolicySpec | str) -> Composite:
    """
    Return the policy that *spec* says.

    :raises InvalidSpec: it names something that is not there, an option or a value that is not allowed, or roles that
        cannot be combined; or something installed cannot be made
    """
    spec = PolicySpec.parse(spec) if isinstance(spec, str) else spec
    return _compose(str(spec), _resolve(spec)[0])


def policy_spec(text: str) -> PolicySpec:
    """
    Read a spec from its text, and check all that it names; the values of options have their types.

    :raises InvalidSpec: as `make_policy`
    """
    spec = PolicySpec.parse(text)
    parts, options = _resolve(spec)
    _compose(text, parts)
    roles = {
        role: Chosen(each.name, {name: getattr(parts[role].options, name) for name in each.options})
        for role, each in spec.roles.items()
    }
    return PolicySpec(spec.name, {name: getattr(options, name) for name in spec.options}, roles)


def _compose(name: str, parts: Mapping[str, Filled]) -> Composite:
    def composite(order: Order | SchedulingPolicy, placement: Placement | None) -> Composite:
        more = {role: parts[role].make() for role in (ADMISSION, BATCHING, SCALING, PREFETCH)}
        return Composite(name, order, placement, parts[REPLACEMENT].make(), **more)

    if POLICY in parts:
        return composite(parts[POLICY].make(), None)
    order, placement = parts[ORDER].make(), parts[PLACEMENT]
    if isinstance(order, Particular) and placement.name not in order.placements:
        raise InvalidSpec(
            f"order {parts[ORDER].name} goes with placement {' or '.join(order.placements)} only, not with "
            f"{placement.name}"
        )
    return composite(order, placement.make())


# --- from a spec to what fills the roles ------------------------------------------------------------------------------


class Filled(Struct):
    """What fills a role, or is a whole policy, with its options."""

    role: str
    name: str
    factory: Factory
    origin: str
    """The module that it is from; empty: it is ours."""
    options: Struct

    def make(self) -> Any:
        """:raises InvalidSpec: it is installed code, and raises or lacks something"""
        try:
            made = self.factory() if isinstance(self.options, NoOptions) else self.factory(self.options)
            missing = [each for each in _MEMBERS[self.role] if self.factory is not nothing and not hasattr(made, each)]
        except Exception as exc:
            if self.origin:
                raise _broken(self.role, self.name, self.origin, exc) from exc
            raise
        if missing:
            raise InvalidSpec(f"{self.role} {self.name!r} ({self.origin}) has no {', '.join(missing)}")
        return made


def _resolve(spec: PolicySpec) -> tuple[dict[str, Filled], Struct]:
    """Return what fills each role, or the whole policy for order and placement; and the options of the policy."""
    for role in spec.roles:
        if role not in FILLS:
            raise InvalidSpec(f"policy {str(spec)!r}: there is no role {role!r}: choose one of {', '.join(FILLS)}")
    policy, origin = _find(POLICY, spec.name) if spec.name else (Preset("", {}), "")
    chosen = {**_DEFAULTS, **spec.roles}
    parts: dict[str, Filled] = {}
    if isinstance(policy, Preset):
        kept = {role: each for role, each in policy.roles.items() if role not in spec.roles}
        options = read_options(spec.name, _options_of_all(kept), spec.options)
        for role, each in kept.items():
            mine = {name: getattr(options, name) for name in spec.options if name in _options_left(role, each)}
            chosen[role] = Chosen(each.name, {**each.options, **mine})
        for role in (ORDER, PLACEMENT):
            if role not in chosen:
                raise InvalidSpec(f"policy {str(spec)!r} has no {role}: add {role}=NAME, or begin with a policy")
    else:
        for role in (ORDER, PLACEMENT):
            if role in spec.roles:
                raise InvalidSpec(f"{spec.name} is order and placement in one, so {role} cannot be combined with it")
        options = read_options(spec.name, options_of(policy), spec.options)
        parts[POLICY] = Filled(POLICY, spec.name, policy, origin, options)
    for role, each in chosen.items():
        factory, origin = _find(role, each.name)
        parts[role] = Filled(
            role, each.name, factory, origin, read_options(each.name, options_of(factory), each.options)
        )
    return parts, options


def _find(role: str, name: str) -> tuple[Any, str]:
    """Return what has that name, ours or installed, and the module that it is from if it is installed."""
    ours = POLICIES if role == POLICY else FILLS[role]
    if name in ours:
        return ours[name], ""
    plugins = _plugins(role)
    if name not in plugins:
        raise InvalidSpec(f"no {role} is called {name!r}: choose one of {', '.join([*ours, *plugins])}")
    origin = plugins[name].value
    try:
        return plugins[name].load(), origin
    except Exception as exc:
        raise _broken(role, name, origin, exc) from exc


def _plugins(role: str) -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # takes 15 ms, only needed for what is not ours

    found = entry_points(group=ENTRY_POINTS if role == POLICY else f"{ENTRY_POINTS}.{role}")
    return {each.name: each for each in sorted(found, key=lambda each: each.name)}


def _broken(role: str, name: str, origin: str, exc: Exception) -> InvalidSpec:
    """Foreign code may raise anything; the message names its origin."""
    return InvalidSpec(f"{role} {name!r} ({origin}) cannot be made: {type(exc).__name__}: {exc}")


# --- options ----------------------------------------------------------------------------------------------------------


def options_of(factory: Factory) -> type[Struct]:
    """Return the type of the options that *factory* takes."""
    kind: type[Struct] = getattr(factory, "Options", NoOptions)
    return kind


def _options_left(role: str, chosen: Chosen) -> dict[str, FieldInfo]:
    """Return the options of what fills a role of a preset that the preset has not set."""
    known = fields(options_of(_find(role, chosen.name)[0]))
    return {each.name: each for each in known if each.name not in chosen.options}


def _options_of_all(roles: Mapping[str, Chosen]) -> type[Struct]:
    """Return the options of a preset: those of all its roles, in one struct."""
    found = {name: each for role, chosen in roles.items() for name, each in _options_left(role, chosen).items()}
    return defstruct("Options", [(name, each.type, each.default) for name, each in found.items()])


# --- what there is ----------------------------------------------------------------------------------------------------


class Described(Struct, frozen=True):
    """A policy, or what fills a role, for people."""

    role: str
    """The role that it plays; empty: it is a whole policy."""
    name: str
    says: str
    options: tuple[tuple[str, str, str, str], ...]
    """Name, what is allowed, the default, and what it means."""


def described() -> list[Described]:
    """
    Return all that a spec can name.

    :raises InvalidSpec: something installed cannot be loaded
    """
    names = [(POLICY, name) for name in (*POLICIES, *_plugins(POLICY))]
    names += [(role, name) for role, ours in FILLS.items() for name in (*ours, *_plugins(role))]
    return [_describe(role, name, _find(role, name)[0]) for role, name in names]


def _describe(role: str, name: str, what: Preset | Factory) -> Described:
    if isinstance(what, Preset):
        says, kind = what.says, _options_of_all(what.roles)
    else:
        says, kind = (getdoc(what) or "").partition("\n")[0], options_of(what)
    options = tuple((each.name, allowed(each.type), str(each.default), description(each.type)) for each in fields(kind))
    return Described("" if role == POLICY else role, name, says, options)
