"""
The OpenAPI 3.1 document of the gateway's routes, served at ``/openapi.json``.

Written as a table and not derived from the handlers: those read bodies themselves, because FastAPI's own reading
answers 422 where OpenFaaS's clients expect 400. A test walks the routes and compares; `make fuzz` compares the answers.
Bodies come from the models that parse them (`wire.body_schemas`).
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gpufaas_core.environment import Environment
from gpufaas_core.logs import LogLine
from gpufaas_core.model import EngineStatus, Explanation
from gpufaas_core.remote_build import BuildStatus
from gpufaas_gateway.errors import METHODS
from gpufaas_gateway.wire import body_schemas

_Json = dict[str, Any]

_TEXT: Final = "text/plain"
_JSON: Final = "application/json"
_NDJSON: Final = "application/x-ndjson"
_STRING: Final[_Json] = {"type": "string"}
_COUNT: Final[_Json] = {"type": "integer", "minimum": 0}
_STRINGS: Final[_Json] = {"type": "object", "additionalProperties": _STRING}

_REASONS: Final[Mapping[int, str]] = {
    301: "The path is spelled otherwise: Location says how.",
    400: "What was sent is malformed or cannot be; the text names the field.",
    401: "The password is missing or wrong.",
    403: "It is not allowed: the signature is missing or not of this body, or the namespace's quota is in use.",
    404: "There is none of that name.",
    405: "The method is not served here.",
    408: "The body did not come in time.",
    409: "It exists already, or is in use.",
    413: "The body is too large.",
    422: "A value of the query is malformed.",
    429: "The queue is full, or the namespace's quota of calls: Retry-After says when to try again.",
    500: "What was asked for failed in part; one line each.",
    502: "The function failed.",
    503: "The platform is starting, or the function cannot be called.",
    504: "The function's time limit is over.",
    507: "The disk is full, or cannot be written.",
}
_PARAMETERS: Final[Mapping[str, _Json]] = {
    "name": {"in": "path", "schema": _STRING, "description": "NAME or NAME.NAMESPACE"},
    "digest": {
        "in": "path",
        "schema": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
        "description": "sha256 of the content",
    },
    "call": {"in": "path", "schema": _STRING, "description": "X-Call-Id of the call"},
    "namespace": {"in": "query", "schema": _STRING, "description": "openfaas-fn unless given"},
    "usage": {"in": "query", "schema": _STRING, "description": "1 or true: with what its workers hold"},
    "function": {"in": "query", "schema": _STRING, "description": "the function, in full or in its namespace"},
    "limit": {"in": "query", "schema": {"type": "integer"}, "description": "at most so many, 1000 unless given"},
    "instance": {"in": "query", "schema": _STRING, "description": "only lines of this worker"},
    "callId": {"in": "query", "schema": _STRING, "description": "only lines of the call with this X-Call-Id"},
    "tail": {"in": "query", "schema": {"type": "integer"}, "description": "the last so many lines; 0 or less: all"},
    "since": {"in": "query", "schema": {"type": "string", "format": "date-time"}, "description": "not earlier lines"},
    "follow": {"in": "query", "schema": _STRING, "description": "1 or true: go on with lines as they are printed"},
    "X-Build-Signature": {
        "in": "header",
        "schema": {"type": "string", "pattern": "^sha256=[0-9a-f]{64}$"},
        "description": "HMAC-SHA256 of the body with the payload secret",
    },
    "X-Callback-Url": {"in": "header", "schema": _STRING, "description": "where the answer is sent to"},
}

_SCHEMAS: Final[Mapping[str, _Json]] = {
    "FunctionStatus": {
        "type": "object",
        "required": ["name", "image", "namespace", "labels", "annotations", "createdAt", "replicas",
                     "availableReplicas", "gpufaas"],
        "properties": {
            "name": _STRING, "image": _STRING, "namespace": _STRING, "envProcess": _STRING, "envVars": _STRINGS,
            "constraints": {"type": "array", "items": _STRING}, "secrets": {"type": "array", "items": _STRING},
            "labels": _STRINGS, "annotations": _STRINGS, "limits": _STRINGS, "requests": _STRINGS,
            "readOnlyRootFilesystem": {"type": "boolean"}, "createdAt": {"type": "string", "format": "date-time"},
            "replicas": _COUNT, "availableReplicas": _COUNT,
            "invocationCount": {**_COUNT, "description": "in lists only"},
            "usage": {
                "type": "object",
                "properties": {
                    "cpu": {"type": "number", "minimum": 0, "description": "millicores"}, "totalMemoryBytes": _COUNT,
                },
            },
            "gpufaas": {"type": "object", "description": "what only this platform knows of it"},
        },
    },
    "Namespace": {
        "type": "object",
        "required": ["name"],
        "properties": {"name": _STRING, "labels": _STRINGS, "annotations": _STRINGS},
    },
    "QuotaStatus": {
        "type": "object",
        "required": ["namespace", "used"],
        "properties": {
            "namespace": _STRING, "maxFunctions": _COUNT, "maxMemory": {**_COUNT, "description": "bytes"},
            "maxInFlight": _COUNT, "maxWaiting": _COUNT,
            "used": {
                "type": "object",
                "required": ["functions", "memory"],
                "properties": {
                    "functions": _COUNT, "memory": {**_COUNT, "description": "bytes"},
                    "inFlight": {**_COUNT, "description": "at this gateway; where calls have a limit"},
                    "waiting": {**_COUNT, "description": "at this gateway; where calls have a limit"},
                },
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
    },
    "SecretName": {
        "type": "object",
        "required": ["name", "namespace"],
        "properties": {"name": _STRING, "namespace": _STRING},
        "additionalProperties": False,
    },
    "Version": {
        "type": "object",
        "required": ["commit_message", "sha", "release"],
        "properties": {"commit_message": _STRING, "sha": _STRING, "release": _STRING},
    },
    "GatewayInfo": {
        "type": "object",
        "required": ["provider", "version", "arch"],
        "properties": {
            "provider": {
                "type": "object",
                "required": ["provider", "orchestration", "version"],
                "properties": {
                    "provider": _STRING, "orchestration": _STRING, "version": {"$ref": "#/components/schemas/Version"},
                },
            },
            "version": {"$ref": "#/components/schemas/Version"},
            "arch": _STRING,
        },
    },
    "PublicKey": {
        "type": "object",
        "required": ["key_id", "algorithm", "public_key"],
        "properties": {"key_id": _STRING, "algorithm": _STRING, "public_key": _STRING},
        "additionalProperties": False,
    },
    "AsyncCall": {
        "type": "object",
        "required": ["callId", "function", "state", "attempts", "callbackAttempts", "status", "reason", "acceptedAt",
                     "endedAt", "dueAt"],
        "properties": {
            "callId": _STRING, "function": _STRING, "state": _STRING, "attempts": _COUNT, "callbackAttempts": _COUNT,
            "status": {"type": ["integer", "null"], "description": "of the last execution"},
            "reason": {"type": ["string", "null"]},
            "acceptedAt": {"type": "string", "format": "date-time"},
            "endedAt": {"type": ["string", "null"], "format": "date-time"},
            "dueAt": {"type": ["string", "null"], "format": "date-time"},
        },
        "additionalProperties": False,
    },
}  # fmt: skip

_BODY_ERRORS: Final = (400, 408, 413, 503)


def document(version: str) -> _Json:
    """Return the document of a platform of *version*."""
    schemas: _Json = {**_SCHEMAS, **body_schemas("#/components/schemas/{model}")}
    _, ours = msgspec.json.schema_components(
        [EngineStatus, Environment, Explanation, LogLine, BuildStatus], ref_template="#/components/schemas/{name}"
    )
    ours = msgspec.json.decode(msgspec.json.encode(ours))  # defaults that are tuples are lists then
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpufaas gateway",
            "version": version,
            "description": "OpenFaaS's routes and ours. Errors are plain text; X-OpenFaaS-Internal marks answers that "
            "are the platform's own, and not a function's.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"basic": []}],
        "paths": {**_of_functions(), **_of_resources(), **_of_calls(), **_of_platform()},
        "components": {
            "securitySchemes": {"basic": {"type": "http", "scheme": "basic"}},
            "schemas": {**ours, **schemas},
        },
    }


def _of_functions() -> _Json:
    return {
        "/system/functions": {
            "get": _op("List functions", ["namespace"], {200: _list("FunctionStatus")}, 503),
            "post": _op("Deploy a function", ["namespace"], {202: None}, *_BODY_ERRORS, 403, 409, 502, 507,
                        body="FunctionDeployment"),
            "put": _op("Update a function", ["namespace"], {200: None}, *_BODY_ERRORS, 403, 404, 502, 507,
                       body="FunctionDeployment"),
            "delete": _op("Remove a function", ["namespace"], {202: None}, *_BODY_ERRORS, 404, 507,
                          body="DeleteFunctionRequest"),
        },
        "/system/function/{name}": {
            "get": _op("Describe a function", ["name", "namespace", "usage"], {200: _one("FunctionStatus")}, 404, 503),
        },
        "/system/scale-function/{name}": {
            "post": _op("Ask for so many copies", ["name", "namespace"], {202: None}, *_BODY_ERRORS, 404,
                        body="ScaleServiceRequest"),
        },
        "/system/alert": {
            "post": _op("AlertManager's webhook", [], {200: None}, *_BODY_ERRORS, 500, body="AlertMessage"),
        },
        "/system/logs": {
            "get": _op("Read what a function printed", [], {200: {_NDJSON: {"schema": {
                "description": "one LogLine, JSON, in every line", "type": "string",
            }}}}, 400, 404, 422) | {"parameters": [
                {**_parameter("name"), "in": "query"},
                *map(_parameter, ("namespace", "instance", "callId", "tail", "since", "follow")),
            ]},
        },
    }  # fmt: skip


def _of_resources() -> _Json:
    """Quotas, secrets and namespaces."""
    paths: _Json = {
        "/system/namespace/{name}/quota": {
            "get": _op("What a namespace may use, and uses", ["name"], {200: _one("QuotaStatus")}, 404, 503),
            "put": _op("Set what a namespace may use", ["name"], {202: None}, *_BODY_ERRORS, 404, 507,
                       body="NamespaceQuota"),
            "delete": _op("Let a namespace have no quota", ["name"], {202: None}, 404, 503, 507),
        },
        "/system/secrets": {
            "get": _op("List secrets, without their values", ["namespace"], {200: _list("SecretName")}, 503, 507),
            "post": _op("Create a secret", ["namespace"], {201: None}, *_BODY_ERRORS, 409, 507, body="Secret"),
            "put": _op("Update a secret", ["namespace"], {202: None}, *_BODY_ERRORS, 404, 507, body="Secret"),
            "delete": _op("Remove a secret", ["namespace"], {202: None}, *_BODY_ERRORS, 404, 507, body="Secret"),
        },
    }  # fmt: skip
    changes = {
        "post": ("Create a namespace", 201, (409,)),
        "put": ("Update a namespace", 202, (404,)),
        "delete": ("Remove a namespace", 202, (404, 409)),
    }
    for path in ("/system/namespaces", "/system/namespaces/", "/system/namespace", "/system/namespace/"):
        for one in (False, True):
            if one and path.endswith("/"):
                continue
            given = ["name"] if one else []
            paths[path + "/{name}" if one else path] = {
                "get": _op("Describe a namespace", given, {200: _one("Namespace")}, 404, 503)
                if one
                else _op(
                    "List namespaces", given, {200: {_JSON: {"schema": {"type": "array", "items": _STRING}}}}, 503
                ),
                **{
                    method: _op(what, given, {status: None}, *_BODY_ERRORS, *errors, 507)
                    | {"requestBody": {**_body(_one("FunctionNamespace")), "required": not one}}
                    for method, (what, status, errors) in changes.items()
                },
            }
    return paths


def _of_calls() -> _Json:
    return {
        "/system/async/dead": {
            "get": _op("List asynchronous calls that were given up", ["function", "namespace", "limit"],
                       {200: _list("AsyncCall")}, 400),
        },
        "/system/async/dead/{call}": {"delete": _op("Forget a dead letter", ["call"], {202: None}, 404, 507)},
        "/system/async/dead/{call}/retry": {"post": _op("Try a dead letter again", ["call"], {202: None}, 404, 507)},
        "/async/{call}": {
            "get": _op("What became of an asynchronous call", ["call"], {200: _one("AsyncCall")}, 404),
        },
        "/function/{name}": {
            method.lower(): _public(f"Invoke a function with {method}", ["name"])
            | {"responses": {"default": {"description": "The function's answer, or why there is none."}}}
            for method in METHODS
        },
        "/async-function/{name}": {
            "post": _public("Invoke a function asynchronously", ["name", "X-Callback-Url"], {202: None}, 400, 404, 413,
                            429, 503, 504, 507)
            | {"requestBody": {**_body({"application/octet-stream": {}}), "required": False}},
            "get": _by_id("What became of an asynchronous call", {200: _one("AsyncCall"), 405: None}, 404),
            "delete": _by_id("Cancel an asynchronous call", {202: None}, 404, 409, 507),
        },
    }  # fmt: skip


def _of_platform() -> _Json:
    return {
        "/system/info": {"get": _op("Who answers here", [], {200: _one("GatewayInfo")})},
        "/system/status": {"get": _op("Devices, queues and what is resident", [], {200: _one("EngineStatus")})},
        "/system/explain/{call}": {
            "get": _op("Why a call was started where it was, or waits", ["call"], {200: _one("Explanation")}, 404),
        },
        "/system/environments": {
            "get": _op("What nodes provide to functions: Python, wheels, packages", [], {200: _list("Environment")}),
            "post": _op("The same, of the nodes on which a function may run", [], {200: _list("Environment")},
                        *_BODY_ERRORS, body="FunctionDeployment"),
        },
        "/system/artifacts/{digest}": {
            "head": _op("Whether it was uploaded", ["digest"], {200: None, 404: None}),
            "put": _op("Upload a bundle or weights", ["digest"], {201: None}, 408, 507)
            | {"requestBody": _body({"application/octet-stream": {}})},
        },
        "/build": {
            "post": _public("Build an image of sources, as a remote builder", ["X-Build-Signature"],
                            {200: {**_one("BuildStatus"), _NDJSON: {"schema": {
                                "description": "one BuildStatus, JSON, in every line", "type": "string"}}}},
                            403, 404, 408, 413, 429, 507)
            | {"requestBody": _body({"application/octet-stream": {}})},
        },
        "/publickey": {"get": _public("The key that build secrets are sealed for", [], {200: _one("PublicKey")}, 404)},
        "/healthz": _with_head(_public("Whether it serves", [], {200: _media(_TEXT)}, 503)),
        "/readyz": _with_head(_public("Whether calls would find a device", [], {200: _media(_TEXT)}, 503)),
        "/metrics": _with_head(_public("Prometheus's", [], {200: _media(_TEXT)})),
        "/": _with_head(_public("To the page", [], {307: None})),
        "/ui/": {"get": _op("A page that lists functions", [], {200: _media("text/html")})},
        "/docs": {"get": _op("This document as a page", [], {200: _media("text/html")})},
        "/openapi.json": {"get": _op("This document", [], {200: {_JSON: {"schema": {"type": "object"}}}})},
    }  # fmt: skip


def _op(
    summary: str, parameters: list[str], answers: Mapping[int, _Json | None], *errors: int, body: str = ""
) -> _Json:
    """*answers* by status: their content; None: empty. *errors* are text."""
    refused = {401, *errors}
    if any(_PARAMETERS[each]["in"] == "path" for each in parameters):
        refused |= {301, 400}  # `auth.CleanPaths`
    op: _Json = {
        "summary": summary,
        "parameters": [_parameter(each) for each in parameters],
        "responses": {
            str(status): {"description": _REASONS.get(status, "Done."), **({"content": content} if content else {})}
            for status, content in answers.items()
        }
        | {
            str(status): {"description": _REASONS[status], **({} if status == 301 else {"content": _media(_TEXT)})}
            for status in sorted(refused)
        },
    }
    if body:
        op["requestBody"] = _body(_one(body))
    return op


def _public(
    summary: str, parameters: list[str], answers: Mapping[int, _Json | None] | None = None, *errors: int
) -> _Json:
    """An operation that needs no password (`auth.PUBLIC`)."""
    op = _op(summary, parameters, answers or {}, *errors)
    del op["responses"]["401"]
    return {**op, "security": []}


def _by_id(summary: str, answers: Mapping[int, _Json | None], *errors: int) -> _Json:
    """An operation on a call, which its path has where the same path has a function's name otherwise."""
    op = _op(summary, [], answers, *errors)
    return {**op, "parameters": [{**_parameter("name"), "description": _PARAMETERS["call"]["description"]}]}


def _with_head(op: _Json) -> _Json:
    return {"get": op, "head": op}


def _parameter(name: str) -> _Json:
    parameter = _PARAMETERS[name]
    return {"name": name, "required": parameter["in"] == "path" or name == "name", **parameter}


def _body(content: _Json) -> _Json:
    return {"required": True, "content": content}


def _one(schema: str) -> _Json:
    return {_JSON: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _list(schema: str) -> _Json:
    return {_JSON: {"schema": {"type": "array", "items": {"$ref": f"#/components/schemas/{schema}"}}}}


def _media(media: str) -> _Json:
    return {media: {"schema": _STRING}}
