"""`EtcdSettings`: addresses, certificates and user."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import Seconds

DEFAULT_PREFIX: Final = "/gpufaas"


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """:raises InvalidSpec: the settings do not go together; `Etcd` reads the files"""

    endpoints: tuple[str, ...] = ("127.0.0.1:2379",)
    """Members of one cluster: HOST:PORT, or a URL as etcd itself writes it (``https://`` asks for TLS)."""
    prefix: str = DEFAULT_PREFIX
    ca: Path | None = None
    """Certificates of the authorities that may have signed etcd's. With it, or with *cert*, the connection is TLS."""
    cert: Path | None = None
    key: Path | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    timeout_s: Seconds = 5.0
    """The limit of one request, with its repetitions at other endpoints."""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise InvalidSpec("etcd: no endpoint is given: name at least one, as HOST:PORT")
        for endpoint in self.endpoints:
            address_of(endpoint)
        if bool(self.cert) != bool(self.key):
            raise InvalidSpec("etcd: a client certificate and its key go together: give both, or neither")
        if bool(self.user) != bool(self.password):
            raise InvalidSpec("etcd: a user and a password go together: give both, or neither")
        if not self.prefix.strip("/") or self.prefix.endswith("/"):
            raise InvalidSpec(f"etcd: {self.prefix!r} is no prefix for our keys: write for example {DEFAULT_PREFIX}")

    @property
    def tls(self) -> bool:
        return bool(self.ca or self.cert) or any(each.startswith("https://") for each in self.endpoints)


def address_of(endpoint: str) -> str:
    """Return HOST:PORT of *endpoint*. :raises InvalidSpec: it has none"""
    address = endpoint.removeprefix("http://").removeprefix("https://").rstrip("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in address:
        raise InvalidSpec(f"etcd: {endpoint[:200]!r} is not an endpoint: write HOST:PORT, for example 10.0.0.5:2379")
    return address
