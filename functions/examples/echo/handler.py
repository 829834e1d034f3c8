"""Answers with the JSON that it was sent, parsed and serialised on the way."""

import json
from typing import Any

JSON = {"Content-Type": "application/json"}


def handle(event: Any, context: Any) -> Any:
    try:
        value = event.json()
    except ValueError as exc:
        return {"statusCode": 400, "body": {"error": f"the body is not JSON: {exc}"}}
    if value is None or isinstance(value, str):
        # By itself a text would be sent as it is, and None as nothing.
        return {"headers": JSON, "body": json.dumps(value)}
    return {"headers": JSON, "body": value}
