"""
The OpenAPI 3.1 document, served at ``/openapi.json``.

FastAPI makes it from the routes (`typed_routes`). This module adds what all routes share (the password, clean paths,
how bodies are read), and the invocations, which FastAPI does not serve.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gpufaas_core.errors import BodyTooLarge, DeadlineExceeded, InvalidSpec, Overloaded, StorageFailed, UnknownFunction
from gpufaas_gateway.auth import is_public
from gpufaas_gateway.errors import METHODS, BodyTooSlow, Unavailable
from gpufaas_gateway.typed_routes import SCHEMAS, TEXT, Responses, refuses


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the document of all routes of *app*, and of invocations."""
    document = get_openapi(
        title="gpufaas gateway",
        version=app.version,
        description="OpenFaaS's routes and ours. Errors are plain text; X-OpenFaaS-Internal marks answers that "
        "are the platform's own, and not a function's.",
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        routes=app.routes,
    )
    document["security"] = [{"basic": []}]
    document["components"]["securitySchemes"] = {"basic": {"type": "http", "scheme": "basic"}}
    for path, operations in _invocations().items():
        document["paths"].setdefault(path, {}).update(operations)
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete(operation, path, is_public(method.upper(), path))
            for described in (operation.get("requestBody", {}), *operation["responses"].values()):
                schemas |= described.pop(SCHEMAS, {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _complete(operation: dict[str, Any], path: str, public: bool) -> None:
    """Add to *operation* what all operations share."""
    answers = operation["responses"]
    if "application/json" in answers.get("422", {}).get("content", {}):
        del answers["422"]  # FastAPI's own: we answer 400
    common: Responses = {}
    if "{" in path and not path.startswith(("/function/", "/async-function/")):  # `auth.CleanPaths`
        common |= {301: {"description": "The path is spelled otherwise: Location says how."}, **refuses(InvalidSpec)}
    if "application/json" in operation.get("requestBody", {}).get("content", {}):
        common |= refuses(InvalidSpec, BodyTooSlow, BodyTooLarge)
    if public:
        operation["security"] = []
    else:
        common[401] = {"description": "The password is missing or wrong.", "content": TEXT}
    for status, answer in common.items():
        answers.setdefault(str(status), answer)


def _invocations() -> dict[str, dict[str, Any]]:
    """Return the operations that are plain ASGI."""
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    callback = {"name": "X-Callback-Url", "in": "header", "schema": {"type": "string"}}
    answered = {"default": {"description": "The function's answer, or why there is none."}}
    refused = refuses(
        InvalidSpec, UnknownFunction, BodyTooLarge, Overloaded, Unavailable, DeadlineExceeded, StorageFailed
    )
    return {
        "/function/{name}": {
            method.lower(): {
                "summary": f"Invoke a function with {method}",
                "parameters": [name],
                "responses": {**answered},
            }
            for method in METHODS
        },
        "/async-function/{name}": {
            "post": {
                "summary": "Invoke a function asynchronously",
                "parameters": [name, callback],
                "requestBody": {"content": {"application/octet-stream": {}}},
                "responses": {"202": {"description": "It is kept, and will be executed."}}
                | {str(status): answer for status, answer in refused.items()},
            }
        },
    }
