"""
The roles that a policy is composed of. It is the second half of the contract of policies (`contract`).

=============== ======================================================================= ====================
role            what it decides                                                         default
=============== ======================================================================= ====================
*admission*     whether a new call is served, and by which variant of its task          in time, if it says so
*order*         whose call is next for an idle device: it drives a scheduling run       that of the policy
*placement*     where a call goes, when the order asks about it                         that of the policy
*batching*      which further waiting calls of its function start with a call           those that wait
*replacement*   which copies make room, where a placement names no victims              least recently used
*scaling*       copies and nodes beyond what calls need now, after the causes it names  that of plans
*prefetch*      which weights nodes bring into their host tiers ahead of loads          that of the policy
=============== ======================================================================= ====================

A named policy fills *order* and *placement*; a spec may fill any role anew (`policies.spec`). What fills a role knows
the others by these protocols only. A class of your own is registered as an entry point of the group
``gpufaas.policies.ROLE`` (docs/writing-a-policy.md).

*Admission.* The engine asks it about a call when it comes, if its function wants that (`Function.sheds`).

*One run.* What carries out plans comes first (`policies.planned`, in each policy), then the order, then scaling: each
sees what the one before it did. The engine asks batching about each start of a function whose calls may form batches,
also from a local queue. A batch that the engine refuses starts as the one call that the order chose. Prefetch comes
last: it is asked while calls wait for functions that no device holds, if a node has a host tier.

*Precedence.* Where roles disagree, or one of them and a declared wish, the first of these decides:

1. *What is in use*: a copy that runs calls, loads, or has a local queue stays. Only `Preempt` stops a call.
2. *What was declared*: constraints, the minimum and the maximum of copies, the share that a function with a goal
   asks for.
3. *What waits*: the last copy of a function with waiting calls stays, and so does the node with its only copies.
4. *Who owns the copies* of a function (`gpufaas_core.owners`): a scaling acts on functions whose owner is their calls,
   or for which it is (`Owning`), and on no others.
5. *Admission*, then *order and placement*, with *batching*: a call that was refused is not placed.
6. *Scaling*.

The engine holds to 1, and to 2 but for shares, whatever a policy proposes (`handle.commit`), and to what a plan says of
devices. The rest restrains scaling only, which acts for calls that are not there yet: `policies.composite.objection`
refuses its actions in the engine's stead. The owner of a function may limit it below what its goal asks for, and a plan
may drain a last copy, for one elsewhere. Order and placement may evict a last copy, because they do so for a call that
waits longer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Protocol, TypeAlias, runtime_checkable

from gpufaas_core.model import Seconds
from gpufaas_scheduler.contract import Assign, Choose, Load, Plan, Reject, Start, Wake
from gpufaas_scheduler.view_contract import QueueView, View, WaitingCall
from gpufaas_scheduler.view_nouns import DeviceView

ADMISSION: Final = "admission"
ORDER: Final = "order"
PLACEMENT: Final = "placement"
BATCHING: Final = "batching"
REPLACEMENT: Final = "replacement"
SCALING: Final = "scaling"
PREFETCH: Final = "prefetch"

Placed: TypeAlias = Start | Assign | Load | None
"""The action that places a call; None: the call goes on waiting."""


class Admission(Protocol):
    def admit(self, view: View, call: WaitingCall) -> Choose | Reject | None:
        """
        Return what becomes of *call*, which has just come and is in no queue yet; None: it is placed, or waits, as a
        call of its function. Asked only for functions that want it.
        """


class Placement(Protocol):
    def place(self, view: View, call: WaitingCall, device: DeviceView) -> Placed:
        """
        Return where *call* goes when the idle *device* is considered for it. Another device may be better: a holder
        that is idle, or that is free sooner than a load would take.
        """


class Order(Protocol):
    def plan(self, view: View, placement: Placement) -> Plan:
        """
        One scheduling run over the idle devices, as `SchedulingPolicy.plan`. The order picks the next call for a
        device, and proposes what *placement* returns for it. A call whose function the device holds may be started
        there without asking.
        """


@runtime_checkable
class Particular(Protocol):
    """An order that asks more of a placement than `Placement` has."""

    @property
    def placements(self) -> Collection[str]:
        """The placements that it goes with, by name."""


class WaitsView(View, Protocol):
    """What `least-wait` asks of the view beside: how far the figures may have moved that it keeps from run to run."""

    @property
    def moves(self) -> int:
        """It changes whenever a copy or a device comes or goes, and with each deployment."""

    def faded(self, since: Seconds) -> float:
        """Return by what factor, at most 1, the `rate` of a function has changed that had no call since then."""


class PassesQueue(QueueView, Protocol):
    """What the order `o3` asks of the queue beside, to count how often each call was passed over."""

    @property
    def next_number(self) -> int:
        """The arrival number of the next call that comes."""

    @property
    def returned(self) -> Sequence[WaitingCall]:
        """The calls that came back (`WaitingCall.left`), by number. There are nearly always none."""

    def first_stayed(self, before: int = ...) -> WaitingCall | None:
        """Return `first` among the calls that did not come back."""


class PassesView(View, Protocol):
    @property
    def queue(self) -> PassesQueue: ...


class Batching(Protocol):
    def extend(self, view: View, start: Start, call: WaitingCall) -> Start | Wake:
        """
        Return *start*, the start of *call*, with further waiting calls of the same function, or as it is. Of a local
        queue, it names the calls there of that copy; the answer may have fewer.

        A `Wake`: the call waits for others until then; the key does not matter. A call of a local queue, or one that a
        call waits for, starts all the same.
        """


class Scaling(Protocol):
    @property
    def watches(self) -> int:
        """The mask of causes after which it runs (`policy_contract.Watching`)."""

    def plan(self, view: View) -> Plan:
        """Propose loads, evictions, limits, nodes, wakes or a plan, one at a time; see *Precedence*."""


@runtime_checkable
class Owning(Protocol):
    """A scaling for functions that others do not decide about."""

    @property
    def owners(self) -> Collection[str]:
        """The owners (`gpufaas_core.owners`), beside `CALLS`, on whose functions it acts."""


class Prefetch(Protocol):
    def plan(self, view: View, devices: Sequence[DeviceView]) -> Plan:
        """
        Propose loads into host tiers (`Load` with the tier `HOST`) or beside what devices compute (`beside`), one at a
        time; other actions are refused. It is asked while calls wait for functions that no device holds, if a node has
        a host tier: about *devices* on which a call has just started, or that may be free soon when a call of such a
        function comes or weights have come.
        """
