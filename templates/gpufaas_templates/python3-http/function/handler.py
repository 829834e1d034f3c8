"""A function on the CPU: `handle` runs once per call."""

from typing import Any


def handle(event: Any, context: Any) -> Any:
    """
    Answer one call.

    *event* has body (bytes), headers, method, path, query, text and json(). *context* has hostname, call_id, function
    and device. Return str, bytes, a dict or list (sent as JSON), {"statusCode": 200, "body": ..., "headers": {...}},
    or yield pieces to stream them.
    """
    return {"statusCode": 200, "body": {"message": "Hello from gpufaas!", "bytes": len(event.body)}}
