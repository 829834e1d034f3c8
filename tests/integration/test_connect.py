"""gpufaas.connect on the real platform: the ports that are open, and what authors and callers are told of others."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from tests.integration.conftest import HTTP, TORCH, Platform
from tests.waiting import until

from gpufaas import Refused

FIRST = 2_000_000_000 + os.getpid() % 1000 * 65_536
UIDS = f"{FIRST}-{FIRST + 65_535}"
"""Which no platform beside this one has: under strict it would not start."""
CONNECTS = """
    import asyncio, os, socket, urllib.request

    def ask(event):
        port, how = int(event.path.strip("/") or 0), event.query.get("by", "")
        if how == "asyncio":
            async def opens():
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
            asyncio.run(opens())
        elif how == "name":
            return socket.getaddrinfo("localhost", 80)[0][0].name
        elif how == "gateway":
            return str(urllib.request.urlopen(os.environ["OPENFAAS_URL"] + "/healthz").status)
        else:
            socket.create_connection(("127.0.0.1", port)).close()
        return "connected"
"""
MODEL = (
    CONNECTS
    + """
    def load(device):
        return None

    def handle(model, event, context):
        return ask(event)
"""
)
FUNCTION = (
    CONNECTS
    + """
    def handle(event, context):
        return {"statusCode": 200, "body": ask(event)}
"""
)
SOURCES = {"model": (MODEL, TORCH), "function": (FUNCTION, HTTP)}


@pytest.fixture(scope="module")
def platform(module_platform: Callable[..., Platform]) -> Platform:
    if subprocess.run([sys.executable, "-m", "gpufaas_cli", "isolation", "check"], capture_output=True).returncode:
        pytest.skip("this machine lacks what --isolation strict needs")
    return module_platform("--device", "cpu:0=1GiB", "--isolation", "strict", "--uid-range", UIDS).start()


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        yield one.getsockname()[1], two.getsockname()[1]


@pytest.mark.parametrize("kind", SOURCES)
def test_a_function_reaches_the_ports_that_it_names_and_the_gateway(
    platform: Platform, ports: tuple[int, int], kind: str
) -> None:
    path = platform.deploy(f"named-{kind}", *SOURCES[kind], connect=str(ports[0]))

    assert platform.call(f"{path}/{ports[0]}").text == "connected"
    assert platform.call(f"{path}/{ports[0]}?by=asyncio").text == "connected"
    assert platform.call(f"{path}?by=gateway").text == "200"
    assert platform.call(f"{path}?by=name").status_code == 200
    for way in ("", "?by=asyncio"):
        refused = platform.call(f"{path}/{ports[1]}{way}")
        assert refused.status_code == 500
        assert "its TCP port is not among those of the annotation gpufaas.connect" in refused.text
    until(lambda: "gpufaas.connect" in platform.log(f"named-{kind}"), "the log says it, too")


def test_under_strict_a_function_without_the_annotation_reaches_the_gateway_only(
    platform: Platform, ports: tuple[int, int]
) -> None:
    path = platform.deploy("nothing-named", *SOURCES["function"])

    assert platform.call(f"{path}?by=gateway").text == "200"
    assert platform.call(f"{path}/{ports[0]}").status_code == 500
    assert "connects to the gateway only" in platform.said()


def test_any_is_any(platform: Platform, ports: tuple[int, int]) -> None:
    path = platform.deploy("any-port", *SOURCES["function"], connect="any")

    assert {platform.call(f"{path}/{port}").text for port in ports} == {"connected"}


def test_a_load_that_cannot_connect_says_so(platform: Platform, ports: tuple[int, int]) -> None:
    source = f"""
        import socket
        def load(device):
            return socket.create_connection(("127.0.0.1", {ports[0]}))
        def handle(model, event, context):
            return "loaded"
    """
    failed = platform.call(platform.deploy("load-connects", source))

    assert failed.status_code == 502
    assert "its TCP port is not among those of the annotation gpufaas.connect" in failed.text


def test_etcds_port_is_refused(platform: Platform) -> None:
    with pytest.raises(
        Refused, match=r"gpufaas.connect: '2379' has port 2379 or 2380, which are etcd's: leave them out"
    ):
        platform.deploy("reads-etcd", *SOURCES["function"], connect="2379")


@pytest.mark.skipif(os.geteuid() != 0, reason="as another user the range of uids is not in force")
def test_the_start_up_line_has_the_uids_beside_their_word(platform: Platform) -> None:
    assert f"uids {UIDS}, Landlock" in platform.said()
