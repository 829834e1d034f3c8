"""
`EtcdState`: what the leading scheduler writes behind it, under ``v1/state/`` (port: the write-behind's `StatePort`).

Every write holds only while its writer leads, so that one who was replaced without knowing it cannot overwrite what the
next one knows.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from gpufaas_core.messages import Restored
from gpufaas_core.snapshot import DeviceDoc, EngineDoc, FunctionDoc
from gpufaas_store.election import Leadership
from gpufaas_store.etcd import DoDelete, DoPut, Etcd

log = logging.getLogger(__name__)

_T = TypeVar("_T")

STATE: Final = "v1/state/"


class EtcdState:
    """:param leadership: of the writer"""

    def __init__(self, etcd: Etcd, leadership: Leadership) -> None:
        self._etcd = etcd
        self._leadership = leadership

    async def write(self, puts: Mapping[str, bytes], deletes: Sequence[str]) -> bool:
        operations = [*(DoPut(STATE + key, value) for key, value in puts.items())]
        gone = [DoDelete(STATE + key) for key in deletes]
        return (await self._etcd.txn((self._leadership.compare(),), [*operations, *gone])).succeeded

    async def read(self) -> Restored:
        """Return what an older scheduler left; what cannot be read is left out, and learnt again."""
        engine: EngineDoc | None = None
        devices: list[DeviceDoc] = []
        functions: list[FunctionDoc] = []
        for item in (await self._etcd.range(STATE)).items:
            key = item.key.removeprefix(STATE)
            if key == "engine":
                engine = _decoded(key, item.value, EngineDoc)
            elif key.startswith("devices/"):
                if (device := _decoded(key, item.value, DeviceDoc)) is not None:
                    devices.append(device)
            elif key.startswith("functions/") and (function := _decoded(key, item.value, FunctionDoc)) is not None:
                functions.append(function)
        return Restored(engine, tuple(functions), tuple(devices))


def _decoded(key: str, value: bytes, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.DecodeError as exc:
        log.warning("state.unreadable key=%s%s reason=%s", STATE, key, exc)
        return None
