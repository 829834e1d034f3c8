"""`Messages`: our keys and values in etcd's own messages."""

from typing import Any

from aetcd import rpc

from gpufaas_adapters.etcd.client.values import Compare, DoDelete, DoPut, Item, Operation


class Messages:
    """:param prefix: begins every key, with its slash"""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def key(self, key: str) -> bytes:
        return f"{self._prefix}{key}".encode()

    def span(self, prefix: str) -> tuple[bytes, bytes]:
        """Return the first key that begins with *prefix*, and the first key after all of those."""
        start = self.key(prefix)  # UTF-8: no byte is 0xff
        return start, start[:-1] + bytes([start[-1] + 1])

    def name(self, key: bytes) -> str:
        return key.decode().removeprefix(self._prefix)

    def item(self, found: Any) -> Item:
        return Item(self.name(found.key), found.value, found.create_revision, found.mod_revision, found.lease)

    def compare(self, each: Compare) -> Any:
        return rpc.Compare(
            key=self.key(each.key),
            target=rpc.Compare.MOD if each.target == "mod" else rpc.Compare.CREATE,
            result=rpc.Compare.EQUAL if each.is_equal else rpc.Compare.NOT_EQUAL,
            **{f"{each.target}_revision": each.revision},
        )

    def operation(self, each: Operation) -> Any:
        if isinstance(each, DoPut):
            put = rpc.PutRequest(key=self.key(each.key), value=each.value, lease=each.lease)
            return rpc.RequestOp(request_put=put)
        start, end = self.span(each.key) if each.below else (self.key(each.key), b"")
        if isinstance(each, DoDelete):
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=start, range_end=end))
        return rpc.RequestOp(request_range=rpc.RangeRequest(key=start, range_end=end))
