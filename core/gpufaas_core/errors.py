"""
The errors of the platform, named for what the caller can do about them.

::

    GpufaasError
    ├── InvalidSpec            what was asked for is malformed: fix it, then ask again
    │   └── NoDeviceFits       larger than any device: a smaller model, or a larger device
    ├── UnknownFunction        deploy it first
    ├── FunctionExists         update it (PUT), or remove it first
    ├── UnknownName            there is no namespace, secret or node of this name
    ├── NameTaken              a namespace or secret of this name exists: update it, or remove it first
    ├── BodyTooLarge           the body is over the limit
    ├── Overloaded             a queue is full: come back after `retry_after_s`
    ├── DeadlineExceeded       the time that the caller gave ran out
    ├── CallCancelled          the caller went away
    ├── CheckBroken            the check of a deployment was ended from outside, without a result
    ├── LoadFailed             the model did not load; carries the tail of its stderr
    ├── OutOfMemory            a call, or a load on the largest device, needs more memory than it may have
    ├── WorkerCrashed          the worker ended during the call; carries the tail of its stderr
    ├── BadAnswer              the function's answer cannot be passed on: mend the function
    ├── LeaseRefused           the node took nothing of the call: it may be placed again
    ├── NoRoom                 copies that are never evicted hold the memory: lower their minimum
    ├── NestedCall             a function's call to a function can never start: see the message
    ├── CorruptArtifact        bytes on disk or on the wire are not those of their digest
    ├── UnknownArtifact        no bytes of that digest here: upload them
    ├── FetchFailed            others have the bytes, and could not be read: try again
    └── StorageFailed          a write failed: the data directory is full or read-only, or etcd refuses
        └── StorageAway        the storage does not answer: ask again in a while

No error knows HTTP; the gateway holds the only table from these to statuses.
"""

from gpufaas_core._types import Seconds


class GpufaasError(Exception):
    """The base of all errors. The message tells the user what was asked, what is the case, and what to do."""


class InvalidSpec(GpufaasError):
    pass


class NoDeviceFits(InvalidSpec):
    pass


class UnknownFunction(GpufaasError):
    pass


class FunctionExists(GpufaasError):
    pass


class UnknownName(GpufaasError):
    pass


class NameTaken(GpufaasError):
    pass


class BodyTooLarge(GpufaasError):
    pass


class Overloaded(GpufaasError):
    def __init__(self, message: str, retry_after_s: Seconds = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(GpufaasError):
    pass


class CallCancelled(GpufaasError):
    pass


class LoadFailed(GpufaasError):
    def __init__(self, message: str, retry_after_s: Seconds = 0.0) -> None:
        """:param retry_after_s: until it is tried again at the earliest; 0.0: not known"""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OutOfMemory(GpufaasError):
    pass


class WorkerCrashed(GpufaasError):
    pass


class CheckBroken(GpufaasError):
    pass


class BadAnswer(GpufaasError):
    pass


class LeaseRefused(GpufaasError):
    pass


class NoRoom(GpufaasError):
    pass


class NestedCall(GpufaasError):
    pass


class CorruptArtifact(GpufaasError):
    pass


class UnknownArtifact(GpufaasError):
    pass


class FetchFailed(GpufaasError):
    pass


class StorageFailed(GpufaasError):
    pass


class StorageAway(StorageFailed):
    pass
