import asyncio
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow
"""Its build imports torch and trains."""


def test_it_goes_on_with_the_text_that_it_has_learnt(deployed: Any) -> None:
    status, pieces = deployed("zen").call(b"Beautiful is better", "letters=11")

    assert (status, b"".join(pieces)) == (200, b" than ugly.")
    assert len(pieces) == 11


def test_texts_that_are_written_at_once_share_forward_passes_and_are_the_same(deployed: Any) -> None:
    zen = deployed("zen")
    prompts = [b"Beautiful is better", b"Errors should never", b"Now is better than ", b"Namespaces are one "]
    alone = [b"".join(zen.call(each, "letters=60")[1]) for each in prompts]
    before = zen.model.passes

    together = asyncio.run(_all(zen, prompts))

    assert together == alone
    assert zen.model.passes - before <= 60 + 10, "not 4 x 60"


async def _all(zen: Any, prompts: list[bytes]) -> list[bytes]:
    answers = await asyncio.gather(*(zen.answer(each, "letters=60") for each in prompts))
    return [b"".join(pieces) for _, pieces in answers]


@pytest.mark.parametrize("query", ["letters=0", "letters=x", "letters=1001", "pause=2", "pause=nan"])
def test_what_cannot_be_written_is_refused(deployed: Any, query: str) -> None:
    status, answer = deployed("zen").call(b"", query)

    assert status == 400
    assert "letters" in answer["error"]
