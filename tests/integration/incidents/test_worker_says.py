"""
A worker said NaN for its time, or a status of 999: that was passed on, learnt and stored, and the bundle could not be
deployed any more, also after a restart. The handler here writes to its worker's own sockets.
"""

from collections.abc import Callable

import pytest
from tests.integration.conftest import Platform

LIAR = """
    import os, stat
    from gpufaas_core.frames import AnswerHead, EndHead, Kind, encode_frame

    LIES = {
        "nan": encode_frame(Kind.ANSWER, AnswerHead(200, [], float("nan"))),
        "huge": encode_frame(Kind.ANSWER, AnswerHead(200, [], 0.1, 1 << 62)),
        "status": encode_frame(Kind.ANSWER, AnswerHead(999, [], 0.1)),
        "split": encode_frame(Kind.ANSWER, AnswerHead(200, [(b"x-a", b"b\\r\\nset-cookie: c")], 0.1)),
        "order": encode_frame(Kind.END, EndHead(0.1)),
        "garbage": b"\\xff" * 100,
    }

    def load(device):
        return None

    def handle(model, event, context):
        if event.text in LIES:
            for fd in map(int, os.listdir("/proc/self/fd")):
                try:
                    if stat.S_ISSOCK(os.fstat(fd).st_mode):
                        os.write(fd, LIES[event.text])
                except OSError:
                    pass
        return "honest"
"""


@pytest.mark.parametrize(
    ("lie", "code", "says"),
    [
        ("nan", "worker-crashed", "took nan s"),
        ("huge", "worker-crashed", "bytes"),
        ("status", "bad-answer", "status 999"),
        ("split", "bad-answer", "is no header"),
        ("order", "worker-crashed", "what it must not"),
        ("garbage", "worker-crashed", "what it must not"),
    ],
)
def test_a_lie_costs_its_call_and_is_not_learnt(platform: Platform, lie: str, code: str, says: str) -> None:
    liar = platform.deploy("liar", LIAR)

    answer = platform.call(liar, lie.encode())

    assert (answer.status_code, answer.headers["x-gpufaas-error"]) == (502, code)
    assert says in answer.text
    assert platform.call(liar).text == "honest"
    platform.deploy("liar", LIAR)
    assert platform.call(liar).text == "honest"


def test_a_bundle_whose_worker_lied_is_served_after_a_restart(make_platform: Callable[..., Platform]) -> None:
    platform = make_platform("--device", "cpu:0=400MiB").start()
    liar = platform.deploy("liar", LIAR)
    for lie in (b"nan", b"huge"):
        platform.call(liar, lie)
    assert platform.stop() == 0

    platform.start()

    assert platform.call(liar).text == "honest"
