"""
The state of the leading scheduler (``v1/state/``): written behind its decisions, read by the next leader.

Only the leader can write: each write is a transaction on the condition that the leader's key is the one of this writer.
A scheduler that was replaced and does not know it yet changes nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from gpufaas_adapters.etcd.client import Compare, DoDelete, DoPut, Etcd
from gpufaas_adapters.etcd.reading import decoded
from gpufaas_core.messages import Restored
from gpufaas_core.snapshot import DeviceDoc, EngineDoc, FunctionDoc
from gpufaas_core.units import Seconds

STATE: Final = "v1/state/"
_DEVICES: Final = f"{STATE}devices/"
_FUNCTIONS: Final = f"{STATE}functions/"
_ENGINE: Final = f"{STATE}engine"


class EtcdState:
    """The port of ``gpufaas_cache_manager.write_behind`` on etcd. *leads*: `Leadership.compare` of the writer."""

    def __init__(self, etcd: Etcd, leads: Compare) -> None:
        self._etcd = etcd
        self._leads = leads

    async def write(self, puts: Mapping[str, bytes], deletes: Sequence[str]) -> bool:
        """
        Do all of it in one step; False: another leads, and nothing was done. Keys are relative to ``v1/state/``.

        :raises StorageFailed: etcd is away, or full; it may have been done
        """
        operations = [DoPut(STATE + key, value) for key, value in puts.items()]
        outcome = await self._etcd.txn((self._leads,), (*operations, *(DoDelete(STATE + key) for key in deletes)))
        return outcome.succeeded


async def read_state(etcd: Etcd, elapsed_s: Seconds = 0.0) -> Restored:
    """
    Return what the last leader wrote, as it was at one moment. A doc that cannot be read is logged and left out: its
    node knows the content.

    :param elapsed_s: the least time since that leader's last write: as long as no scheduler led
    :raises StorageFailed: etcd is away
    """
    engine: EngineDoc | None = None
    functions: list[FunctionDoc] = []
    devices: list[DeviceDoc] = []
    for item in (await etcd.range(STATE)).items:
        if item.key == _ENGINE:
            engine = decoded(item, EngineDoc)
        elif item.key.startswith(_FUNCTIONS) and (function := decoded(item, FunctionDoc)) is not None:
            functions.append(function)
        elif item.key.startswith(_DEVICES) and (device := decoded(item, DeviceDoc)) is not None:
            devices.append(device)
    return Restored(engine, tuple(functions), tuple(devices), elapsed_s)
