"""Where schedulers and nodes listen by default."""

import pytest

from gpufaas_apps.cluster import listening


@pytest.mark.parametrize(("listen", "advertise", "where"), [
    ("", "", "127.0.0.1:7070"),
    ("", "127.0.0.1:7070", "127.0.0.1:7070"),
    ("", "localhost:9", "127.0.0.1:7070"),
    ("", "[::1]:9", "127.0.0.1:7070"),
    ("", "10.0.0.5:7070", "0.0.0.0:7070"),
    ("", "scheduler-1:7070", "0.0.0.0:7070"),
    ("0.0.0.0:9", "", "0.0.0.0:9"),
    ("127.0.0.1:9", "10.0.0.5:7070", "127.0.0.1:9"),
])  # fmt: skip
def test_on_loopback_unless_told_otherwise(listen: str, advertise: str, where: str) -> None:
    assert listening(listen, advertise, 7070) == where
