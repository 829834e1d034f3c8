"""What can go wrong with etcd."""

from gpufaas_core.errors import StorageAway, StorageFailed


class EtcdUnreachable(StorageAway):
    """etcd does not answer: try again later. With `maybe_done`, a write may have been done."""

    def __init__(self, message: str, maybe_done: bool = True) -> None:
        super().__init__(message)
        self.maybe_done = maybe_done


class EtcdRefused(StorageFailed):
    """etcd answers and refuses, and will until its configuration or ours is changed."""


class EtcdFull(StorageFailed):
    """etcd's database has reached its quota: it only reads and deletes until an operator makes room."""


class Compacted(EtcdRefused):
    """etcd has dropped the history that was asked for."""


class ForeignKeys(EtcdRefused):
    """The keys below our prefix are not ours, or of a version that this one does not know."""
