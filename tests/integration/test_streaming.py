"""What passes through: methods, paths, headers and statuses untouched; bodies and answers as they come, both ways."""

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.conftest import ECHO_MODEL, GATED, HTTP, LIMIT_S, TORCH, Platform, until

MIRROR = """
    def handle(event, context):
        return {
            "method": event.method, "path": event.raw_path, "decoded": event.path, "query": dict(event.query),
            "headers": {name.lower(): event.headers.get_all(name) for name in event.headers},
            "body": event.text, "call_id": context.call_id,
        }
"""
ANSWERS = """
    import json

    def handle(event, context):
        return json.loads(event.body)
"""
STEPS = """
    import os, time

    def {load}
    def handle({model}event, context):
        def steps():
            for n in range(5):
                until = time.monotonic() + 30
                while n and not os.path.exists(event.text + str(n)) and time.monotonic() < until:
                    time.sleep(0.002)
                yield f"data: {{n}}\\n\\n"
        return {{"statusCode": 200, "body": steps(), "headers": {{"Content-Type": "text/event-stream"}}}}
"""
STEPS_HTTP = STEPS.format(load="unused(): pass", model="")
STEPS_MODEL = STEPS.format(load="load(device): return None", model="model, ")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


def raw(platform: Platform, text: bytes) -> bytes:
    """Send *text* as it is and return all that comes until the connection is closed."""
    with platform.socket() as sock:
        sock.sendall(text)
        return b"".join(iter(lambda: sock.recv(65536), b""))


# --- what goes in ---


@pytest.mark.parametrize("lang", [TORCH, HTTP])
def test_every_method_reaches_the_function(platform: Platform, lang: str) -> None:
    source = "def handle(event, context): return event.method"
    if lang == TORCH:
        source = "def load(device): pass\ndef handle(model, event, context): return event.method"
    path = platform.deploy("method", source, lang)

    answers = {method: platform.http.request(method, path) for method in METHODS}

    assert {answer.status_code for answer in answers.values()} == {200}
    assert {method: answer.text for method, answer in answers.items() if method != "HEAD"} == {
        method: method for method in METHODS if method != "HEAD"
    }
    assert answers["HEAD"].content == b""
    assert answers["HEAD"].headers["content-length"] == "4"


def test_the_path_and_the_query_arrive_as_they_were_sent(platform: Platform) -> None:
    path = platform.deploy("mirror", MIRROR, HTTP)

    seen = platform.http.get(f"{path}/a%2Fb//c/?x=1%20&y=").json()

    assert seen["path"] == "/a%2Fb//c/"
    assert seen["decoded"] == "/a/b//c/"
    assert seen["query"] == {"x": "1 ", "y": ""}
    assert platform.http.get(path).json()["path"] == "/"


def test_headers_arrive_but_for_those_that_belong_to_the_connection(platform: Platform) -> None:
    path = platform.deploy("mirror", MIRROR, HTTP)
    given = {"X-Mine": "a b", "TE": "trailers",
             "Keep-Alive": "1", "Proxy-Authorization": "secret", "Authorization": "mine"}  # fmt: skip

    seen = platform.call(path, b"x", headers=given).json()["headers"]

    assert seen["x-mine"] == ["a b"]
    assert seen["authorization"] == ["mine"]
    assert seen["content-length"] == ["1"]
    assert seen["x-forwarded-host"] == [f"127.0.0.1:{platform.port}"]
    assert seen["x-forwarded-for"][0].startswith("127.0.0.1:")
    assert not {"te", "keep-alive", "proxy-authorization", "connection"} & seen.keys()


def test_a_call_has_an_id_its_own_or_the_callers(platform: Platform) -> None:
    path = platform.deploy("mirror", MIRROR, HTTP)

    own = platform.call(path)
    given = [platform.call(path, headers={"X-Call-Id": "order-17"}) for _ in range(2)]

    assert len(own.headers["x-call-id"]) == 36
    assert own.json()["call_id"] == own.headers["x-call-id"]
    for answer in given:
        assert answer.headers.get_list("x-call-id") == ["order-17"]
        assert answer.json()["call_id"] == "order-17"
        assert answer.json()["headers"]["x-call-id"] == ["order-17"]


def test_every_answer_says_when_it_began_and_where_its_time_went(platform: Platform) -> None:
    path = platform.deploy("mirror", MIRROR, HTTP)
    before = time.time_ns()

    miss, hit = platform.call(path), platform.call(path)

    assert before <= int(miss.headers["x-start-time"]) <= time.time_ns()
    for answer in (miss, hit):
        parts = dict(each.split(";dur=") for each in answer.headers["server-timing"].split(", "))
        assert parts.keys() >= {"queue", "load", "run"}
        assert all(float(value) >= 0 for value in parts.values())
        assert answer.headers["x-gpufaas-device"] == "local/cpu:0"
    assert miss.headers["x-gpufaas-start"] == "disk"
    assert "load-process" in miss.headers["server-timing"]
    assert hit.headers["x-gpufaas-start"] == "hit"
    assert "load-process" not in hit.headers["server-timing"]


def test_a_function_has_its_name_with_and_without_the_namespace(platform: Platform) -> None:
    platform.deploy("mirror", MIRROR, HTTP)

    assert platform.call("/function/mirror.openfaas-fn/sub").json()["path"] == "/sub"
    assert platform.call("/function/mirror.other").status_code == 404


def test_an_unknown_function_is_answered_404_and_a_method_that_is_none_405_or_400(platform: Platform) -> None:
    path = platform.deploy("mirror", MIRROR, HTTP)

    unknown = platform.call("/function/nobody")
    bad = platform.http.request("PROPFIND", path)
    none = raw(platform, b"NONSENSE " + path.encode() + b" HTTP/1.1\r\nHost: x\r\n\r\n")

    assert unknown.status_code == 404
    assert "nobody" in unknown.text
    assert unknown.headers["x-openfaas-internal"] == "gateway"
    assert bad.status_code == 405
    assert {each.strip() for each in bad.headers["allow"].split(",")} == set(METHODS)
    assert none.startswith(b"HTTP/1.1 400 ")
    assert platform.call(path).status_code == 200


@pytest.mark.parametrize(
    "bad",
    [
        b"Content-Length: abc\r\n\r\n",
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Bad Header: x\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_a_malformed_request_is_answered_400_and_harms_nobody(platform: Platform, bad: bytes) -> None:
    path = platform.deploy("mirror", MIRROR, HTTP)

    answer = raw(platform, f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode() + bad)

    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert platform.call(path).status_code == 200


# --- what comes out ---


@pytest.mark.parametrize("status", [200, 201, 202, 301, 307, 400, 404, 418, 429, 500, 503])
def test_the_functions_status_headers_and_body_are_the_answers(platform: Platform, status: int) -> None:
    path = platform.deploy("answers", ANSWERS, HTTP)
    wanted = {"statusCode": status, "body": "said", "headers": {"X-Its": "own", "Location": "/there"}}

    answer = platform.call(path, json.dumps(wanted).encode())

    assert (answer.status_code, answer.text) == (status, "said")
    assert answer.headers["x-its"] == "own"
    assert answer.headers["location"] == "/there"
    assert "x-openfaas-internal" not in answer.headers


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("body", [None, "a body that has no place here"])
def test_an_answer_without_a_body_has_none_and_the_connection_lives(
    platform: Platform, status: int, body: str | None
) -> None:
    path = platform.deploy("answers", ANSWERS, HTTP)
    connection = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=LIMIT_S)
    try:
        for _ in range(2):
            connection.request("POST", path, json.dumps({"statusCode": status, "body": body}))
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (status, b"")
        sock = connection.sock
        connection.request("POST", path, json.dumps({"body": "next"}))
        assert connection.getresponse().read() == b"next"
        assert connection.sock is sock
    finally:
        connection.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"statusCode": 99},
        {"statusCode": 103},
        {"statusCode": 777},
        {"statusCode": "many"},
        {"body": "x", "headers": {"bad name": "x"}},
        {"body": "x", "headers": {"": "x"}},
        {"body": "x", "headers": {"X-Split": "a\r\nSet-Cookie: b"}},
        {"body": "x", "headers": {"X-Bell": "\x07"}},
        {"body": "x", "headers": {"X-Snow": "☃"}},
    ],
)
def test_an_answer_that_is_none_is_the_functions_error(platform: Platform, wrong: dict[str, object]) -> None:
    path = platform.deploy("answers", ANSWERS, HTTP)

    answer = platform.call(path, json.dumps(wrong).encode())

    assert answer.status_code == 500
    assert "Error" in answer.text
    assert platform.call(path, b'{"body": "fine"}').text == "fine"


def test_the_functions_own_connection_headers_are_dropped(platform: Platform) -> None:
    path = platform.deploy("answers", ANSWERS, HTTP)
    headers = {"Connection": "close", "Transfer-Encoding": "chunked", "Content-Length": "99", "Server-Timing": "no",
               "X-Call-Id": "forged", "Set-Cookie": ["a=1", "b=2"]}  # fmt: skip

    answer = platform.call(path, json.dumps({"body": "said", "headers": headers}).encode())

    assert answer.text == "said"
    assert answer.headers["content-length"] == "4"
    assert "transfer-encoding" not in answer.headers
    assert answer.headers["x-call-id"] != "forged"
    assert answer.headers.get_list("server-timing") != ["no"]
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]


# --- streams ---


@pytest.mark.parametrize(("source", "lang"), [(STEPS_HTTP, HTTP), (STEPS_MODEL, TORCH)])
def test_each_piece_of_an_answer_comes_when_it_is_yielded(platform: Platform, source: str, lang: str) -> None:
    """The next step is only taken when the one before has arrived here: no timing is involved."""
    path = platform.deploy("steps", source, lang)
    gate = str(platform.open / f"steps-{lang}-")
    seen = []

    with platform.http.stream("POST", path, content=gate.encode()) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["transfer-encoding"] == "chunked"
        for piece in answer.iter_raw():
            seen.append(piece)
            Path(f"{gate}{len(seen)}").touch()

    assert seen == [b"data: %d\n\n" % n for n in range(5)]


@pytest.mark.parametrize("lang", [TORCH, HTTP])
@pytest.mark.parametrize("error", ["ValueError('halfway')", "OSError('disk of the author')", "SystemExit(3)"])
def test_an_exception_in_mid_stream_cuts_the_connection_and_the_worker_lives(
    platform: Platform, lang: str, error: str
) -> None:
    handler = f"""
    import os

    def answer(event):
        if not event.body:
            return str(os.getpid())
        def pieces():
            yield "first"
            raise {error}
        return pieces()
    """
    model = "\n    def load(device): pass\n    def handle(model, event, context): return answer(event)\n"
    plain = "\n    def handle(event, context): return answer(event)\n"
    path = platform.deploy("halfway", handler + (model if lang == TORCH else plain), lang)
    pid = platform.call(path).text

    cut = raw(platform, f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx".encode())

    head, _, body = cut.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == b"5\r\nfirst\r\n", "the closing chunk of length 0 must not come"
    assert platform.call(path).text == pid
    until(lambda: "Traceback" in platform.log("halfway"))


def test_a_body_streams_down_while_the_answer_streams_up(platform: Platform) -> None:
    """Of a CPU function, from its very first, cold call on."""
    path = platform.deploy(
        "upper", "def handle(event, context): return (piece.upper() for piece in event.stream())", HTTP
    )
    with platform.socket() as sock:
        reader = sock.makefile("rb")
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n".encode())
        while reader.readline() != b"\r\n":
            pass
        first = [reader.readline() for _ in range(2)]
        sock.sendall(b"3\r\ndef\r\n")
        second = [reader.readline() for _ in range(2)]
        sock.sendall(b"0\r\n\r\n")
        end = [reader.readline() for _ in range(2)]
        reader.close()

    assert first == [b"3\r\n", b"ABC\r\n"]
    assert second == [b"3\r\n", b"DEF\r\n"]
    assert end == [b"0\r\n", b"\r\n"]


def test_many_streams_at_once_stay_apart(platform: Platform) -> None:
    path = platform.deploy("echo", "def handle(event, context): return event.stream()", HTTP)

    def pieces(letter: bytes) -> Iterator[bytes]:
        for _ in range(60):
            yield letter * 20_000

    calls = [platform.begin(path, pieces(b"%c" % (65 + n))) for n in range(12)]

    for n, call in enumerate(calls):
        assert call.result().content == b"%c" % (65 + n) * 1_200_000


def test_a_slow_upload_does_not_hold_the_device(platform: Platform) -> None:
    path = platform.deploy("model", ECHO_MODEL)
    other = platform.deploy("other", ECHO_MODEL)
    with platform.socket() as slow:
        slow.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 8\r\n\r\nhalf".encode())
        until(lambda: platform.status()["functions"]["model.openfaas-fn"]["inflight"] == 1)

        assert platform.call(other, b"meanwhile").text == "meanwhile"
        assert platform.call(path, b"same function").text == "same function"
        until(platform.is_idle, "only the slow call is there, and it holds nothing")

        slow.sendall(b"half")
        answer = b"".join(iter(lambda: slow.recv(65536), b""))
    assert answer.endswith(b"\r\n\r\nhalfhalf")


def test_a_slow_reader_does_not_hold_the_device(platform: Platform) -> None:
    path = platform.deploy("wordy", "def load(d): pass\ndef handle(m, e, c): return (b'x' * 65536 for _ in range(100))")
    other = platform.deploy("other", ECHO_MODEL)
    with slow_reader(platform) as slow:
        slow.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        until(lambda: slow.recv(1, socket.MSG_PEEK))

        assert platform.call(other, b"meanwhile").text == "meanwhile"
        until(platform.is_idle)

        size = sum(map(len, iter(lambda: slow.recv(65536), b"")))
    assert size > 100 * 65536


@pytest.mark.parametrize("lang", [TORCH, HTTP])
def test_a_reader_who_stops_reading_is_cut_off_at_the_time_limit(platform: Platform, lang: str) -> None:
    """He holds a device or a slot (his answer is larger than any buffer) no longer than any other call may."""
    pieces = "return (b'x' * 65536 for _ in iter(int, 1))"
    source = f"def handle(event, context): {pieces}"
    if lang == TORCH:
        source = f"def load(device): pass\ndef handle(model, event, context): {pieces}"
    path = platform.deploy("wordy", source, lang, timeout="1s", labels={"com.openfaas.scale.min": "1"})
    until(lambda: "wordy" in platform.residents(), "it is loaded")

    def stops_reading() -> bool:
        with slow_reader(platform) as slow:
            slow.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
            begun = slow.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
            until(platform.is_idle, "what has no end of its own is cut off")
            return begun

    until(stops_reading, "an answer has begun within its time")


@pytest.mark.parametrize("sent", [b"", b"ha"])
def test_a_caller_who_never_sends_his_body_is_answered_504(platform: Platform, sent: bytes) -> None:
    path = platform.deploy("model", ECHO_MODEL, timeout="300ms")

    answer = raw(
        platform, f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 4\r\n\r\n".encode() + sent
    )

    assert answer.startswith(b"HTTP/1.1 504 ")
    assert b"body" in answer
    assert b"0.3 s" in answer


def test_pipelined_calls_are_answered_in_order(platform: Platform) -> None:
    path = platform.deploy("model", ECHO_MODEL)
    calls = b"".join(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nConnection: {how}\r\n\r\n{n}".encode()
        for n, how in enumerate(["keep-alive"] * 4 + ["close"])
    )

    answer = raw(platform, calls)

    assert [part[:1] for part in answer.split(b"\r\n\r\n")[1:]] == [b"0", b"1", b"2", b"3", b"4"]


def test_a_body_may_wait_for_100_continue(platform: Platform) -> None:
    path = platform.deploy("small", ECHO_MODEL, max_body="1Ki")
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: "
    with platform.socket() as sock:
        sock.sendall(f"{head}4\r\n\r\n".encode())
        assert sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"body")
        assert b"".join(iter(lambda: sock.recv(65536), b"")).endswith(b"\r\n\r\nbody")

    assert raw(platform, f"{head}4096\r\n\r\n".encode()).startswith(b"HTTP/1.1 413 ")


def test_head_of_an_answer_without_end_is_answered_and_its_slot_freed(platform: Platform) -> None:
    endless = (
        "import itertools\ndef load(device): return 1\ndef handle(m, e, c): return (str(n) for n in itertools.count())"
    )
    path = platform.deploy("endless", endless)

    answer = platform.http.head(path)

    assert (answer.status_code, answer.content) == (200, b"")
    until(platform.is_idle)


@pytest.mark.parametrize("lang", [TORCH, HTTP])
def test_head_has_the_length_of_the_body_that_it_leaves_out_and_the_connection_lives(
    platform: Platform, lang: str
) -> None:
    source = "def handle(event, context): return 'seven77'"
    if lang == TORCH:
        source = "def load(device): pass\ndef handle(model, event, context): return 'seven77'"
    path = platform.deploy("seven", source, lang)
    connection = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=LIMIT_S)
    try:
        for method, body in (("HEAD", b""), ("GET", b"seven77"), ("HEAD", b"")):
            connection.request(method, path)
            answer = connection.getresponse()
            assert (answer.getheader("content-length"), answer.read()) == ("7", body)
            assert not answer.will_close
    finally:
        connection.close()


MEASURED = """
    import os, time

    def handle(event, context):
        length, gate, *pieces = event.text.split(",")
        def answer():
            for number, piece in enumerate(pieces):
                until = time.monotonic() + 60
                while number and not os.path.exists(gate) and time.monotonic() < until:
                    time.sleep(0.005)
                yield piece
        return {"statusCode": 200, "body": answer(), "headers": {"content-length": length}}
"""


def test_an_answer_of_declared_length_streams_with_that_length(platform: Platform) -> None:
    path = platform.deploy("measured", MEASURED, HTTP)
    gate = platform.open / "measured-gate"

    with platform.http.stream("POST", path, content=f"6,{gate},one,two".encode()) as answer:
        assert answer.headers["content-length"] == "6"
        assert "transfer-encoding" not in answer.headers
        pieces = answer.iter_raw()
        assert next(pieces) == b"one"
        gate.touch()
        assert b"".join(pieces) == b"two"


@pytest.mark.parametrize(("said", "came"), [("5", b"one"), ("7", b"onetwo")])
def test_an_answer_that_is_longer_or_shorter_than_it_said_cuts_the_connection(
    platform: Platform, said: str, came: bytes
) -> None:
    path = platform.deploy("measured", MEASURED, HTTP)
    body = f"{said},{platform.open},one,two"

    cut = raw(platform, f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())

    head, _, rest = cut.partition(b"\r\n\r\n")
    assert f"content-length: {said}".encode() in head.lower()
    assert rest == came
    until(lambda: "Content-Length" in platform.log("measured"))
    assert platform.call(path, f"6,{platform.open},one,two".encode()).text == "onetwo"


def test_a_large_answer_that_is_whole_has_its_length(platform: Platform) -> None:
    path = platform.deploy("large", "def handle(event, context): return 'x' * 1_000_000", HTTP)

    answer = platform.call(path)

    assert (answer.headers["content-length"], len(answer.content)) == ("1000000", 1_000_000)


# --- slow bodies ---


def test_a_slow_body_that_says_its_length_holds_no_slot(platform: Platform) -> None:
    path = platform.deploy("single", "def handle(event, context): return event.body", HTTP, slots="1")
    assert platform.call(path, b"warm").text == "warm"
    with platform.socket() as slow:
        slow.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 8\r\n\r\nhalf".encode())
        until(lambda: platform.status()["functions"]["single.openfaas-fn"]["inflight"] == 1)

        assert platform.call(path, b"meanwhile").text == "meanwhile"
        until(platform.is_idle, "only the slow call is there, and it holds nothing")

        slow.sendall(b"half")
        assert b"".join(iter(lambda: slow.recv(65536), b"")).endswith(b"\r\n\r\nhalfhalf")


@pytest.mark.parametrize(
    "source",
    ["def handle(event, context): return event.body", "def handle(event, context): return event.stream()"],
    ids=["answered at the end", "answered as it comes"],
)
def test_a_body_that_streams_and_stops_gives_its_slot_up(platform: Platform, source: str) -> None:
    path = platform.deploy("single", source, HTTP, slots="1", body_patience="300ms")
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"

    def stops() -> bytes:
        with platform.socket() as slow:
            slow.sendall(head.encode() + b"4\r\nhalf\r\n")
            behind = platform.begin(path, b"next")
            said = b"".join(iter(lambda: slow.recv(65536), b""))
        assert behind.result().text == "next"
        until(platform.is_idle)
        return said

    if "stream" in source:
        begun: list[bytes] = []
        until(lambda: begun.append(stops()) or begun[-1].startswith(b"HTTP/1.1 200 "), "it answers within the patience")
        assert not begun[-1].endswith(b"0\r\n\r\n"), "half an answer must not look whole"
    else:
        said = stops()
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b"gpufaas.body-patience" in said


def test_a_caller_who_is_answered_meanwhile_may_take_his_time(platform: Platform) -> None:
    """All pieces together take longer than the patience lasts, but none of them after the last piece of the answer."""
    path = platform.deploy(
        "upper", "def handle(event, context): return (p.upper() for p in event.stream())", HTTP, body_patience="1s"
    )

    def talks_on() -> bool:
        """Not if this machine stood still for a second."""
        with contextlib.suppress(ConnectionError), platform.socket() as sock, sock.makefile("rb") as reader:
            sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n".encode())
            while reader.readline() not in (b"\r\n", b""):
                pass
            ends = time.monotonic() + 2
            while [reader.readline() for _ in range(2)] == [b"1\r\n", b"A\r\n"]:
                if time.monotonic() > ends:
                    return True
                time.sleep(0.1)  # a caller who thinks
                sock.sendall(b"1\r\na\r\n")
        return False

    until(talks_on)


def test_a_caller_may_ask_for_less_time(platform: Platform) -> None:
    path = platform.deploy("gated", GATED, HTTP)
    gate = platform.gate()

    answer = platform.call(path, gate.body, headers={"X-Timeout": "300ms"})

    gate.open()
    assert answer.status_code == 504
    assert "X-Timeout" in answer.text
    assert float(answer.headers["x-duration-seconds"]) > 0


def slow_reader(platform: Platform) -> socket.socket:
    """A connection with so small a buffer that not reading it is felt at the other end."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(LIMIT_S)
    sock.connect(("127.0.0.1", platform.port))
    return sock
