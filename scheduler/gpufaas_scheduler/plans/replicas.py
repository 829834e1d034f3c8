"""
How many replicas of a model are wanted, where they start, who sends them the weights, and which of them go.

Source: Flashpoint (J. San Juan, University of Waterloo, 2023): scaling policies, receiver choice, sender map,
scale-down. The formulas of the policies but Atoll's are those of the systems they are named after; the thesis names
metric and target.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpufaas_core._types import Bytes, Seconds

QUEUE_LATENCY: Final[Seconds] = 7.0
UTILISATION: Final = 0.6


def by_queue_latency(current: int, latency: Seconds, target: Seconds = QUEUE_LATENCY) -> int:
    """TorchServe on Kubernetes: replicas in proportion to the mean time in the queue."""
    return math.ceil(current * latency / target)


def by_request_rate(rate: float, service: Seconds) -> int:
    """Atoll: as many as the *rate* per second (its 99th percentile) keeps busy; however many there are."""
    return math.ceil(rate * service)


def by_utilisation(current: int, used: float, target: float = UTILISATION) -> int:
    """OpenWhisk on Kubernetes: in proportion to the compute that is used, 0 to 1; so it grows 1.67 times at most."""
    return math.ceil(current * used / target)


def by_invocations(invocations: float, target: float) -> int:
    """SageMaker: at most *target* invocations for each replica."""
    return math.ceil(invocations / target)


def direction(served: float, arriving: float, low: float, high: float) -> int:
    """
    Return 1 to scale up, -1 to scale down, 0 to stay.

    :param served: what all replicas answer per second
    :param arriving: requests per second
    :param low: so far may *served* be below *arriving*
    :param high: so far may it be above; the thesis prints both comparisons the other way round
    """
    return 1 if served < arriving - low else -1 if served > arriving + high else 0


@dataclass(frozen=True, slots=True)
class Host:
    id: str
    free: tuple[Bytes, ...]
    """Device memory that is free, of each device."""
    memory: Bytes
    """Host memory that is free."""
    holds: bool = False
    """Whether it has the model's weights."""


class Receiver(NamedTuple):
    host: str
    device: int


def choose_receivers(hosts: Sequence[Host], wanted: int, on_device: Bytes, on_host: Bytes) -> list[Receiver]:
    """
    Return the devices that take a replica or a part, at most *wanted*.

    First all of the hosts that hold the weights: they start at once. Then one of each other host, so that the next
    burst finds many hosts that hold them; more rounds if that was not enough. A host that does not hold the weights
    must have *on_host* bytes free for them.
    """
    free = {
        host.id: [index for index, size in enumerate(host.free) if size >= on_device]
        for host in hosts
        if host.holds or host.memory >= on_host
    }
    chosen = [Receiver(host.id, device) for host in hosts if host.holds for device in free[host.id]][:wanted]
    others = [
        [Receiver(host.id, device) for device in free[host.id]] for host in hosts if not host.holds and host.id in free
    ]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*others))
    return [*chosen, *filter(None, turns)][:wanted]


def map_senders(senders: Sequence[str], receivers: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """
    Return the hosts that each sender sends the weights to, one chain each; their lengths differ by at most one.

    A receiver that is a sender needs none, and devices of one host need one transfer.
    """
    hosts = [host for host in dict.fromkeys(receivers) if host not in set(senders)]
    return {sender: tuple(hosts[index :: len(senders)]) for index, sender in enumerate(senders)}


def scale_down(devices: Sequence[int], count: int) -> list[int]:
    """
    Return the indexes of the replicas that go, so that *count* devices become free.

    :param devices: how many devices each replica has; partitioned ones serve slower, so the largest go first

    Never frees more than *count* devices, and so perhaps fewer.
    """
    gone = []
    for index in sorted(range(len(devices)), key=lambda i: (-devices[i], i)):
        if devices[index] <= count:
            gone.append(index)
            count -= devices[index]
    return gone
