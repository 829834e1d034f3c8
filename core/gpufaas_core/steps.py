"""A life as a table of steps. Pure: what may happen in which state is read in one place, and nothing else happens."""

from collections.abc import Mapping, Sequence


class IllegalStep(Exception):
    """A step that leads nowhere from the state that is the case. Nothing was changed."""


class Step(dict[int, int]):
    """
    ``thing.state = STEP[thing.state]``: the state after the step.

    A dict, and not a function that looks into one: several steps are taken with each call.

    :raises IllegalStep: the step leads nowhere from that state
    """

    def __init__(self, thing: str, names: Sequence[str], name: str, after: Mapping[int, int]) -> None:
        """:param names: of the states, as *thing* is in them: ``waits``"""
        super().__init__(after)
        self._thing = thing
        self._names = names
        self._name = name

    def __missing__(self, state: int) -> int:
        raise IllegalStep(f"{self._thing} that {self._names[state]} cannot {self._name}")
