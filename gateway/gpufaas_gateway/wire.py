"""
OpenFaaS's JSON on the wire (openfaas.md §4), in and out. The only module of the gateway that knows pydantic.

Lenient where real clients are loose: unknown fields are ignored, and null is absent. Strict in types: a number is not
a string. Errors name the field.
"""

import base64
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic.json_schema import models_json_schema

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import parse_bytes
from gpufaas_gateway.spec import FunctionRecord, FunctionSpec, Namespace, Quota

_Model = TypeVar("_Model", bound=BaseModel)

_ERRORS_SHOWN: Final = 5
_Required = Annotated[str, Field(min_length=1)]
_Limit = Annotated[int, Field(ge=0, le=2**31 - 1)]


def _in_bytes(size: object) -> object:
    """``8Gi`` is a number of bytes too."""
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


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", alias_generator=to_camel)


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
    limits: dict[str, str | None] | None = None
    requests: dict[str, str | None] | None = None
    read_only_root_filesystem: bool | None = None

    def spec(self) -> FunctionSpec:
        return FunctionSpec(
            service=self.service,
            image=self.image,
            namespace=self.namespace,
            env_process=self.env_process,
            env_vars=self.env_vars,
            constraints=None if self.constraints is None else tuple(self.constraints),
            secrets=None if self.secrets is None else tuple(self.secrets),
            labels=self.labels,
            annotations=self.annotations,
            limits=_present(self.limits),
            requests=_present(self.requests),
            read_only_root_filesystem=self.read_only_root_filesystem,
        )


class DeleteFunctionRequest(_Body):
    function_name: _Required
    namespace: str | None = None


class FunctionNamespace(_Body):
    name: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None

    def namespace(self) -> Namespace:
        return Namespace(self.name, self.labels, self.annotations)


class NamespaceQuota(_Body):
    """
    Limits of a namespace; what is absent or null has none. What a GET shows beside them may come along.

    Unlike OpenFaaS's bodies it knows all its fields: one that is spelled wrongly would be a limit that does not hold.
    """

    model_config = ConfigDict(extra="forbid")

    namespace: str | None = None
    max_functions: _Limit | None = None
    max_memory: _Size | None = None
    max_in_flight: _Limit | None = None
    max_waiting: _Limit | None = None
    used: Any = None

    def quota(self) -> Quota:
        return Quota(
            max_functions=self.max_functions,
            max_memory=self.max_memory,
            max_in_flight=self.max_in_flight,
            max_waiting=self.max_waiting,
        )


class Secret(_Body):
    name: _Required
    namespace: str | None = None
    value: str | None = Field(default=None, repr=False)
    raw_value: str | None = Field(default=None, repr=False)

    def bytes_of_value(self) -> bytes:
        """
        Return ``value`` unless it is empty, else ``rawValue``: faas-cli sends both of a file, the first one trimmed.

        :raises InvalidSpec: both are empty, or the second one is not base64
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
    replicas: Annotated[int, Field(ge=0, le=2**31 - 1)]
    namespace: str | None = None


class AlertLabels(BaseModel):
    function_name: str | None = None


class Alert(_Body):
    status: str | None = None
    labels: AlertLabels = AlertLabels()


class AlertMessage(_Body):
    """What AlertManager posts."""

    status: str | None = None
    alerts: list[Alert] = []


def parse(model: type[_Model], body: bytes) -> _Model:
    """
    Return *body*, JSON, as *model*.

    :raises InvalidSpec: it is not JSON, or a field is missing or of a wrong type; says which
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_input=False, include_context=False)
        shown = [_describe(tuple(error["loc"]), error["type"], error["msg"]) for error in errors[:_ERRORS_SHOWN]]
        if any(error["type"] == "extra_forbidden" for error in errors):
            shown.append(f"known are {', '.join(each.alias or name for name, each in model.model_fields.items())}")
        if len(errors) > _ERRORS_SHOWN:
            shown.append(f"and {len(errors) - _ERRORS_SHOWN} more")
        raise InvalidSpec("; ".join(shown)) from None  # the original shows the values, which may be secrets


def body_schemas(reference: str) -> dict[str, Any]:
    """Return the JSON schemas of all bodies by name. *reference* is how they refer to each other, with ``{model}``."""
    bodies = (
        FunctionDeployment, DeleteFunctionRequest, FunctionNamespace, NamespaceQuota, Secret, ScaleServiceRequest,
        AlertMessage,
    )  # fmt: skip
    _, found = models_json_schema([(each, "validation") for each in bodies], ref_template=reference)
    schemas: dict[str, Any] = found["$defs"]
    return schemas


def spec_fields(record: FunctionRecord) -> dict[str, object]:
    """
    Return what was deployed, as FunctionStatus shows it (§4.2): identical, and absent where it was absent, but for the
    label that clients expect.
    """
    spec = record.spec
    given: dict[str, object] = {
        "envProcess": spec.env_process,
        "envVars": spec.env_vars,
        "constraints": spec.constraints,
        "secrets": spec.secrets,
        "limits": spec.limits,
        "requests": spec.requests,
        "readOnlyRootFilesystem": spec.read_only_root_filesystem,
    }
    return {
        "name": record.name,
        "image": spec.image,
        "namespace": record.namespace,
        **{field: value for field, value in given.items() if value is not None},
        "labels": {**(spec.labels or {}), "faas_function": record.name},
        "annotations": spec.annotations or {},
        "createdAt": timestamp(record.created_at),
    }


def namespace_fields(namespace: Namespace) -> dict[str, object]:
    """Return FunctionNamespace (§4.3); absent where it was absent."""
    given = {"labels": namespace.labels, "annotations": namespace.annotations}
    return {"name": namespace.name, **{field: value for field, value in given.items() if value is not None}}


def quota_fields(namespace: str, quota: Quota, used: dict[str, int]) -> dict[str, object]:
    """Return the limits as `NamespaceQuota` takes them, absent where there is none, and what is in use of them."""
    limits = {
        "maxFunctions": quota.max_functions,
        "maxMemory": quota.max_memory,
        "maxInFlight": quota.max_in_flight,
        "maxWaiting": quota.max_waiting,
    }
    return {
        "namespace": namespace,
        **{field: limit for field, limit in limits.items() if limit is not None},
        "used": used,
    }


def timestamp(unix_s: float) -> str:
    """Return RFC 3339 with a zone; without one, Go clients cannot read the whole list."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _present(resources: dict[str, str | None] | None) -> dict[str, str] | None:
    if resources is None:
        return None
    return {name: value for name, value in resources.items() if value is not None}


def _describe(where: tuple[int | str, ...], kind: str, message: str) -> str:
    if kind == "json_invalid":
        return f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}"
    field = ".".join(map(str, where)) or "the body"
    match kind:
        case "missing" | "string_too_short":
            return f"{field} is missing"
        case "extra_forbidden":
            return f"{field} is not a field that is known here"
        case "value_error":
            return f"{field}: {message.removeprefix('Value error, ')}"
        case _:
            return f"{field}: {message[:1].lower()}{message[1:]}"
