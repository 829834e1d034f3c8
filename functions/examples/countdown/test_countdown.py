from typing import Any

import pytest


def test_events_count_down_and_end(deployed: Any) -> None:
    status, pieces = deployed("countdown").call(query="from=3")

    assert status == 200
    assert pieces == [f'data: {{"left": {n}}}\n\n'.encode() for n in (3, 2, 1)] + [b"event: done\ndata: {}\n\n"]


@pytest.mark.parametrize("query", ["from=x", "from=-1", "pause=x", "pause=-1", "pause=inf", "pause=nan"])
def test_what_cannot_be_counted_is_refused(deployed: Any, query: str) -> None:
    assert deployed("countdown").call(query=query)[0] == 400
