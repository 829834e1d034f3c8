"""
The JSON of management routes: their parameters, bodies and answers.

Bodies are pydantic models, which FastAPI checks and describes: lenient where real clients are loose (unknown fields are
ignored, null is absent), strict in types (a number is not a string). Answers are msgspec structs.
"""

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from fastapi import Depends, Path, Query, Request
from msgspec import Meta, Struct
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import PlannedCopy
from gpufaas_core.units import Bytes, Seconds, parse_bytes
from gpufaas_gateway.names import check_digest
from gpufaas_gateway.spec import FailedRevision

_Struct = TypeVar("_Struct", bound=Struct)

_ERRORS_SHOWN: Final = 5
_Required = Annotated[str, Field(min_length=1)]
_Limit = Annotated[int, Field(ge=0, le=2**31 - 1)]


def _in_bytes(size: object) -> object:
    """Return a size such as ``8Gi`` in bytes."""
    try:
        return parse_bytes(size) if isinstance(size, str) else size
    except InvalidSpec as exc:
        raise ValueError(str(exc)) from None


_Size = Annotated[
    int,
    BeforeValidator(_in_bytes),
    Field(ge=0, le=2**63 - 1),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}], "description": "bytes, or 8Gi"}),
]
_Resources = Annotated[
    dict[str, str | None],
    AfterValidator(lambda given: {name: value for name, value in given.items() if value is not None}),
]

# --- parameters ---


def _moment(text: object) -> object:
    """Return an RFC 3339 time with its zone, within the years that every zone can show."""
    if not isinstance(text, str) or not text:
        return None
    # A '+' that a client forgot to encode arrives as a space.
    moment = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: write for example 2026-11-20T22:50:53Z")
    if not 1970 <= moment.year < 9999:
        # Go's zero time is of the year 1, and beyond both ends a change of zone overflows.
        return moment.replace(year=1970 if moment.year < 1970 else 9998, month=1, day=1)
    return moment


def _digest(digest: str) -> str:
    check_digest(digest, "path")
    return digest


_OrEmpty: Final = BeforeValidator(lambda text: text or None)
InPath = Annotated[str, Path(description="NAME or NAME.NAMESPACE")]
InNamespace = Annotated[str | None, Query(alias="namespace", description="openfaas-fn unless given")]
Digest = Annotated[
    str,
    Path(description="sha256 of the content", json_schema_extra={"pattern": "^[0-9a-f]{64}$"}),
    AfterValidator(_digest),
]


def _who(request: Request) -> str:
    """Return the user who has logged in, else the name of the client."""
    names = str(request.scope.get("user") or request.headers.get("User-Agent", "")).split()
    return names[0][:64] if names else ""


By = Annotated[str, Depends(_who)]
"""Who asks. No parameter of the route."""
Yes = Annotated[bool | None, _OrEmpty]
Number = Annotated[int | None, _OrEmpty]
Moment = Annotated[datetime | None, BeforeValidator(_moment)]

# --- bodies ---


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", alias_generator=to_camel)

    def to(self, kind: type[_Struct]) -> _Struct:
        """Return the fields of the struct *kind*."""
        return msgspec.convert(self, kind, from_attributes=True)


class FunctionDeployment(_Body):
    service: _Required
    image: _Required
    namespace: str | None = None
    env_process: str | None = None
    env_vars: dict[str, str] | None = None
    constraints: list[str] | None = None
    secrets: list[str] | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    limits: _Resources | None = None
    requests: _Resources | None = None
    read_only_root_filesystem: bool | None = None


class DeleteFunctionRequest(_Body):
    function_name: _Required
    namespace: str | None = None


class FunctionNamespace(_Body):
    name: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class NamespaceQuota(_Body):
    """
    Limits of a namespace; absent or null: no limit. The other fields of `QuotaStatus` are allowed and ignored.

    Unknown fields are refused: with a typing error in its name, a limit would not apply.
    """

    model_config = ConfigDict(extra="forbid")

    namespace: str | None = None
    max_functions: _Limit | None = None
    max_memory: _Size | None = None
    max_in_flight: _Limit | None = None
    max_waiting: _Limit | None = None
    used: Any = None


class Secret(_Body):
    name: _Required
    namespace: str | None = None
    value: str | None = Field(default=None, repr=False)
    raw_value: str | None = Field(default=None, repr=False)

    def bytes_of_value(self) -> bytes:
        """
        Return ``value`` unless it is empty, else ``rawValue``. faas-cli sends both for a file, ``value`` trimmed.

        :raises InvalidSpec: both are empty, or ``rawValue`` is not base64
        """
        if self.value:
            return self.value.encode()
        if not self.raw_value:
            raise InvalidSpec("value is missing: send text as value, or base64 as rawValue")
        try:
            return base64.b64decode(self.raw_value, validate=True)
        except ValueError:  # of base64, or of letters beyond ASCII
            raise InvalidSpec("rawValue: it is not base64 in the standard alphabet, with padding") from None


class ScaleServiceRequest(_Body):
    service_name: str | None = None
    replicas: _Limit
    namespace: str | None = None


class RollbackRequest(_Body):
    revision: str | None = None


class AlertLabels(BaseModel):
    function_name: str | None = None


class Alert(_Body):
    status: str | None = None
    labels: AlertLabels = AlertLabels()


class AlertMessage(_Body):
    """What AlertManager posts."""

    status: str | None = None
    alerts: list[Alert] = []


def explain_errors(errors: Sequence[Any]) -> str:
    """Return pydantic's errors in one line, by field. Values are left out: they may be secrets."""
    shown = [_explain(tuple(each["loc"])[1:], each["type"], each["msg"]) for each in errors[:_ERRORS_SHOWN]]
    if any(each["type"] == "extra_forbidden" for each in errors):
        known = (each.alias or name for name, each in NamespaceQuota.model_fields.items())
        shown.append(f"known are {', '.join(known)}")
    if len(errors) > _ERRORS_SHOWN:
        shown.append(f"and {len(errors) - _ERRORS_SHOWN} more")
    return "; ".join(shown)


def _explain(where: tuple[int | str, ...], kind: str, message: str) -> str:
    field = ".".join(map(str, where)) or "the body"
    match kind:
        case "missing" | "string_too_short":
            return f"{field} is missing"
        case "model_attributes_type" | "dict_type":
            return f"{field}: input should be an object"
        case "list_type":
            return f"{field}: input should be a valid array"
        case "extra_forbidden":
            return f"{field} is not a field that is known here"
        case "value_error":
            return f"{field}: {message.removeprefix('Value error, ')}"
        case _:
            return f"{field}: {message[:1].lower()}{message[1:]}"


# --- answers ---

_Count = Annotated[int, Meta(ge=0)]
_Time = Annotated[datetime, Meta(tz=True)]
State = Literal["unavailable", "failed", "resident", "loading", "idle"]


class _Answer(Struct, rename="camel", omit_defaults=True):
    """An answer whose None fields are left out."""


class Usage(_Answer):
    cpu: Annotated[float, Meta(description="millicores")]
    total_memory_bytes: _Count


class ProfileShown(Struct):
    load_s: Seconds
    service_s: Seconds
    occupation: Annotated[Bytes, Meta(description="bytes")]
    measured: bool
    estimated: tuple[str, ...]


class PlacementShown(Struct):
    asked: list[str]
    devices: list[str]


class FunctionDetail(_Answer, kw_only=True):
    """What only this platform knows of a function. From `kind` on: of one that can be called."""

    state: State
    age: Annotated[
        Seconds | None, Meta(description="how old state and devices are, in seconds, if no scheduler leads")
    ] = None
    reason: str | None = None
    since: _Time | None = None
    failures: int | None = None
    retry_in: Annotated[Seconds | None, Meta(description="seconds")] = None
    ready: _Count
    loading: _Count
    revision: Annotated[str, Meta(description="of the deployment that takes the calls")]
    pending: Annotated[str | None, Meta(description="the revision that takes the calls once it is loaded")] = None
    before: Annotated[str | None, Meta(description="takes the calls again if this one cannot be loaded")] = None
    failed: Annotated[FailedRevision | None, Meta(description="the last deployment, if that did not load")] = None
    bundle: str
    devices: list[str]
    copies: Annotated[dict[str, int], Meta(description="by device")]
    parked: Annotated[list[str] | None, Meta(description="devices where a start wakes a parked copy")] = None
    kept_out: Annotated[str | None, Meta(description="why no device has room for it, so that calls are refused")] = None
    lacks: Annotated[str | None, Meta(description="why it has fewer copies than it should have")] = None
    hits: _Count
    misses: _Count
    unavailable: str | None = None
    kind: str | None = None
    slots: int | None = None
    compute: Annotated[int | None, Meta(description="per cent of a device; 0: it needs none")] = None
    sharing: str | None = None
    latency_goal: Annotated[Seconds | None, Meta(description="seconds")] = None
    batch_max: Annotated[int | None, Meta(description="calls that may run together")] = None
    batch_wait: Annotated[Seconds | None, Meta(description="seconds that a call may wait for others")] = None
    batch_adaptive: bool | None = None
    batch_mean: Annotated[float | None, Meta(description="calls in a batch so far, at this gateway")] = None
    memory: Annotated[Bytes | None, Meta(description="of the first reservation, in bytes")] = None
    memory_reason: str | None = None
    memory_advice: Annotated[str | None, Meta(description="what to declare instead, by what was measured")] = None
    timeout: Annotated[Seconds | None, Meta(description="seconds, of the whole or until it runs")] = None
    run_timeout: Annotated[Seconds | None, Meta(description="seconds that a call may run (exec_timeout)")] = None
    profiles: Annotated[dict[str, ProfileShown] | None, Meta(description="by kind of device")] = None
    memory_enforcement: list[str] | None = None
    isolation: Annotated[list[str] | None, Meta(description="what holds its processes, as LEVEL: WORDS")] = None
    compute_enforcement: list[str] | None = None
    not_enforced: Annotated[str | None, Meta(description="what its devices cannot enforce of its share")] = None
    placement: PlacementShown | None = None
    owner: Annotated[str | None, Meta(description="who decides about its copies: plan, labels or calls")] = None
    owner_why: str | None = None
    plan: Annotated[list[PlannedCopy] | None, Meta(description="its replicas in the plan in force")] = None


class FunctionStatus(_Answer, kw_only=True):
    """A function (§4.2): the fields of its deployment exactly as sent, and its state."""

    name: str
    image: str
    namespace: str
    env_process: str | None = None
    env_vars: dict[str, str] | None = None
    constraints: tuple[str, ...] | None = None
    secrets: tuple[str, ...] | None = None
    limits: dict[str, str] | None = None
    requests: dict[str, str] | None = None
    read_only_root_filesystem: bool | None = None
    labels: dict[str, str]
    annotations: dict[str, str]
    created_at: _Time
    replicas: _Count
    available_replicas: _Count
    gpufaas: FunctionDetail
    invocation_count: Annotated[int | None, Meta(description="in lists only")] = None
    usage: Usage | None = None


class QuotaUsed(_Answer):
    functions: _Count
    memory: Annotated[Bytes, Meta(ge=0, description="bytes")]
    in_flight: Annotated[int | None, Meta(description="at this gateway; where calls have a limit")] = None
    waiting: Annotated[int | None, Meta(description="at this gateway; where calls have a limit")] = None


class QuotaStatus(_Answer, kw_only=True):
    """The limits of a namespace, as `NamespaceQuota` takes them, and what it uses."""

    namespace: str
    max_functions: int | None = None
    max_memory: Annotated[Bytes | None, Meta(description="bytes")] = None
    max_in_flight: int | None = None
    max_waiting: int | None = None
    used: QuotaUsed


class SecretName(_Answer):
    name: str
    namespace: str


class Version(Struct):
    """faas-cli crashes when a field is missing."""

    commit_message: str
    sha: str
    release: str


class Provider(Struct):
    provider: str
    orchestration: str
    version: Version


class Pruned(Struct):
    artifacts: _Count
    size: Annotated[Bytes, Meta(description="bytes")]


class GatewayInfo(Struct):
    provider: Provider
    version: Version
    arch: str


def timestamp(unix_s: float) -> datetime:
    """Return a time with a zone: Go clients fail to read a list with a time that has none."""
    return datetime.fromtimestamp(unix_s, UTC)
