"""Writes to etcd, many in one transaction."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpufaas_adapters.etcd.client import Compare, DoPut, Etcd, Operation
from gpufaas_core.units import Bytes, MiB

# Below etcd's limits of 128 operations and 1.5 MiB for one transaction.
_MAX_OPERATIONS: Final = 100
_MAX_BYTES: Final[Bytes] = 1 * MiB


@dataclass(slots=True)
class WriteStep:
    """What is done together or not at all."""

    compares: list[Compare]
    operations: list[Operation]
    done: Callable[[int], None]
    """Called with the revision at which it was done."""
    refused: Callable[[], Awaitable[None]]
    """Awaited when a condition did not hold."""
    size: Bytes = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(len(each.value) + 200 for each in self.operations if isinstance(each, DoPut))


async def commit(etcd: Etcd, steps: Sequence[WriteStep]) -> None:
    """Do as many at once as etcd takes; if a condition of one does not hold, each for itself."""
    together: list[WriteStep] = []
    for step in steps:
        if together and not _fit([*together, step]):
            await _commit_together(etcd, together)
            together = []
        together.append(step)
    if together:
        await _commit_together(etcd, together)


async def _commit_together(etcd: Etcd, steps: Sequence[WriteStep]) -> None:
    compares = list(dict.fromkeys(each for step in steps for each in step.compares))
    result = await etcd.txn(compares, [each for step in steps for each in step.operations])
    if result.succeeded:
        for step in steps:
            step.done(result.revision)
    elif len(steps) == 1:
        await steps[0].refused()
    else:
        for step in steps:
            await _commit_together(etcd, [step])


def _fit(steps: Sequence[WriteStep]) -> bool:
    return (
        sum(len(each.operations) for each in steps) <= _MAX_OPERATIONS
        and sum(len(each.compares) for each in steps) <= _MAX_OPERATIONS
        and sum(each.size for each in steps) <= _MAX_BYTES
    )
