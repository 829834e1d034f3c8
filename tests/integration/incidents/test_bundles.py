"""
What is uploaded as a bundle: 13 MiB became 3 GiB on the disk, a manifest of 1 GiB took 1.2 GB of memory, and what was
wrong in a bundle was an error of the platform's.
"""

import gzip
import hashlib
import json
import re
import tarfile
from collections.abc import Mapping

import httpx
import pytest
from tests.files import tar_of
from tests.integration.conftest import Peak, Platform

MiB = 1 << 20
CODE = {
    "gpufaas.json": json.dumps({"kind": "http", "template": "python3-http"}).encode(),
    "function/handler.py": b"def handle(event, context): return 'here'",
}


def header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf()


def packed(files: Mapping[str, bytes]) -> bytes:
    """Return a bundle's upload."""
    return gzip.compress(tar_of(files))


def swollen(name: str, begins: bytes, mebibytes: int, filler: bytes) -> bytes:
    """Return a bundle's upload with one more file, which is small as long as it is packed."""
    code = gzip.decompress(packed({key: text for key, text in CODE.items() if key != name})).rstrip(b"\0")
    code += bytes(-len(code) % 512)
    piece = gzip.compress(filler * MiB)
    first = begins.ljust(MiB, filler)
    return (
        gzip.compress(code + header(name, mebibytes * MiB) + first)
        + piece * (mebibytes - 1)
        + gzip.compress(bytes(1024))
    )


def deploy(platform: Platform, bundle: bytes) -> httpx.Response:
    digest = hashlib.sha256(bundle).hexdigest()
    assert platform.http.put(f"/system/artifacts/{digest}", content=bundle).status_code == 201
    wanted = {"service": "odd", "image": "odd", "annotations": {"gpufaas.bundle": digest}}
    return platform.http.post("/system/functions", json=wanted)


def unpacked(platform: Platform) -> int:
    return sum(path.stat().st_size for path in (platform.data / "bundles").rglob("*") if path.is_file())


def refused_as_wrong(platform: Platform, bundle: bytes, says: str) -> None:
    before = unpacked(platform)

    answer = deploy(platform, bundle)

    assert (answer.status_code, answer.headers["x-gpufaas-error"]) == (400, "invalid-spec"), answer.text
    assert re.search(says, answer.text), answer.text
    assert unpacked(platform) == before, "nothing of it is left"
    assert platform.http.get("/system/function/odd").status_code == 404


def test_files_that_are_wrong_in_nothing_are_taken(platform: Platform) -> None:
    """So that what follows is refused for what is said."""
    assert deploy(platform, swollen("function/data", b"", 2, b"\0")).status_code == 202
    assert platform.call("/function/odd").text == "here"


def test_one_that_grows_while_it_is_unpacked_is_refused_before_the_disk_is_full(platform: Platform) -> None:
    bundle = swollen("function/zeros", b"", 3 * 1024, b"\0")
    assert len(bundle) < 13 * MiB

    refused_as_wrong(platform, bundle, "more than 2.0 GiB when it is unpacked")


def test_a_manifest_of_a_gibibyte_is_refused_and_not_read(platform: Platform) -> None:
    peak = Peak(platform.pid)

    refused_as_wrong(
        platform,
        swollen("gpufaas.json", CODE["gpufaas.json"], 1024, b" "),
        r"gpufaas\.json of the bundle has more than 4 MiB",
    )

    assert peak.growth < 200 * MiB


WRONG = {
    "no archive": (b"I am a bundle", "no tar"),
    "broken off": (packed(CODE)[:-40], "no tar"),
    "empty": (packed({}), "without gpufaas.json"),
    "no manifest": (packed({"function/handler.py": b""}), "without gpufaas.json"),
    "no JSON": (packed({**CODE, "gpufaas.json": b"{"}), "malformed"),
    "nested": (packed({**CODE, "gpufaas.json": b"[" * 100_000}), "malformed"),
    "no handler": (packed({"gpufaas.json": CODE["gpufaas.json"]}), "has no function/handler.py"),
    "outside": (packed({**CODE, "../../escaped": b"x"}), "no tar that may be extracted"),
    "file and folder": (packed({**CODE, "function": b"x"}), "cannot be extracted|no tar that may be extracted"),
    "long name": (packed({**CODE, "function/" + "n" * 300: b"x"}), "cannot be extracted"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_in_one_is_the_authors(platform: Platform, wrong: str) -> None:
    refused_as_wrong(platform, *WRONG[wrong])
    assert not list(platform.data.parent.rglob("escaped"))
