"""
A worker said NaN for its time, or a status of 999: that was passed on, learnt and stored, and the bundle could not be
deployed any more, also after a restart. The handler here writes to its worker's own sockets.
"""

from collections.abc import Callable

import httpx
import pytest
from tests.integration.conftest import HTTP, Platform

LIAR = """
    import os, stat
    from gpufaas_core.wire.heads import AnswerHead, EndHead
    from gpufaas_core.wire.kinds import Kind
    from gpufaas_core.wire.prefix import encode_frame

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


@pytest.mark.long
def test_a_bundle_whose_worker_lied_is_served_after_a_restart(make_platform: Callable[..., Platform]) -> None:
    platform = make_platform("--device", "cpu:0=400MiB").start()
    liar = platform.deploy("liar", LIAR)
    for lie in (b"nan", b"huge"):
        platform.call(liar, lie)
    assert platform.stop() == 0

    platform.start()

    assert platform.call(liar).text == "honest"


LIAR_AT_LOAD = """
    import os, stat
    from gpufaas_core.wire.heads import ReadyHead
    from gpufaas_core.wire.kinds import Kind
    from gpufaas_core.wire.prefix import encode_frame

    def load(device):
        if os.environ["lie"] == "yes":
            for fd in map(int, os.listdir("/proc/self/fd")):
                try:
                    if stat.S_ISSOCK(os.fstat(fd).st_mode):
                        os.write(fd, encode_frame(Kind.READY, ReadyHead(-5, [("load", float("inf"))])))
                except OSError:
                    pass

    def handle(model, event, context):
        return "honest"
"""


def test_a_lie_about_the_load_is_a_load_that_failed(platform: Platform) -> None:
    liar = platform.deploy("liar", LIAR_AT_LOAD, env={"lie": "yes"})

    answer = platform.call(liar)

    assert (answer.status_code, answer.headers["x-gpufaas-error"]) == (502, "load-failed")
    assert "its memory is -5 bytes" in answer.text
    platform.deploy("liar", LIAR_AT_LOAD, env={"lie": "no"})
    assert platform.call(liar).text == "honest"


RANDOM = """
    import os, random, stat
    from gpufaas_core.wire.heads import AnswerHead, EndHead
    from gpufaas_core.wire.kinds import Kind
    from gpufaas_core.wire.prefix import encode_frame

    def handle(event, context):
        draw = random.Random(event.text)
        stream = bytearray()
        for _ in range(draw.randrange(1, 5)):
            kind = draw.choice([Kind.HEAD, Kind.CHUNK, Kind.END, Kind.ANSWER, Kind.READY, 77])
            head = draw.choice([
                AnswerHead(draw.choice([200, 99, 999]), [], draw.choice([0.1, -1.0])), EndHead(0.1), None
            ])
            stream += encode_frame(kind, head, draw.randbytes(draw.randrange(100)))
        for _ in range(draw.randrange(3)):
            stream[draw.randrange(len(stream))] = draw.randrange(256)
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.write(fd, stream)
            except OSError:
                pass
        return "honest"

    def load(device):
        return None
""".replace("def handle(event", "def handle(model, event")


@pytest.mark.long
def test_whatever_a_worker_writes_its_call_ends_and_the_next_one_is_served(platform: Platform) -> None:
    liar = platform.deploy("liar", RANDOM, timeout="5s")

    for seed in range(60):
        try:
            answer = platform.call(liar, b"%d" % seed)
        except httpx.RemoteProtocolError:
            continue  # half of an answer was out: it must not look whole
        assert answer.status_code in (200, 502, 504), f"seed {seed}: {answer.text}"
    platform.deploy("liar", LIAR)
    assert platform.call(liar).text == "honest"


MODEL = """
    def load(device):
        return None
"""
CLOSES = """
    import os, socket, stat, time

    def handle(event, context):
        if event.body in (b"STREAM", b"SEQPACKET"):
            sockets = [fd for fd in map(int, os.listdir("/proc/self/fd"))
                       if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISSOCK(os.fstat(fd).st_mode)]
            ends = [socket.socket(fileno=os.dup(each)) for each in sorted(sockets)]
            kind = getattr(socket, "SOCK_" + event.text)
            [each for each in ends if each.type == kind][-1].shutdown(socket.SHUT_RDWR)
        time.sleep(0.2)
        return "open"
"""


def test_a_function_that_closes_what_its_calls_come_over_is_ended(platform: Platform) -> None:
    """A worker of several slots lived on, and each call through the closed one took all of its time limit."""
    path = platform.deploy("closes", CLOSES, HTTP, slots="3")
    assert platform.call(path).text == "open"

    assert platform.call(path, b"STREAM").status_code == 502

    assert {platform.begin(path).result().text for _ in range(3)} == {"open"}


@pytest.mark.parametrize("define", ["def handle", "async def handle"])
def test_a_function_that_closes_what_its_files_come_over_is_ended(platform: Platform, define: str) -> None:
    source = CLOSES.replace("def handle(", f"{define}(model, ").replace('"open"', "str(os.getpid())")
    path = platform.deploy("closes", MODEL + source)
    large, headers = b"x" * (2 << 20), {"connection": "close"}
    pid = platform.call(path, large, headers=headers).text
    assert platform.call(path, b"SEQPACKET").text == pid

    other = platform.call(path, large, headers=headers)

    assert (other.status_code, other.text != pid) == (200, True), "it had not begun, and is placed again"
