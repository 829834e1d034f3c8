"""Counts down in server-sent events: ``?from=3&pause=0.5`` streams 3, 2, 1 and done, half a second apart."""

import json
import time
from collections.abc import Iterator
from typing import Any

HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def handle(event: Any, context: Any) -> Any:
    try:
        start, pause = int(event.query.get("from", "10")), float(event.query.get("pause", "0"))
    except ValueError:
        return {"statusCode": 400, "body": {"error": "from must be an integer, and pause a number of seconds"}}
    if not (start >= 0 and 0 <= pause <= 60):
        return {"statusCode": 400, "body": {"error": "from must be 0 or more, and pause 0 to 60 seconds"}}
    return {"headers": HEADERS, "body": events(start, pause)}


def events(start: int, pause: float) -> Iterator[str]:
    for left in range(start, 0, -1):
        yield f"data: {json.dumps({'left': left})}\n\n"
        if pause:
            time.sleep(pause)
    yield "event: done\ndata: {}\n\n"
