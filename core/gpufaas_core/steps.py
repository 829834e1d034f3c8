"""A state machine as a table of steps."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

StateT = TypeVar("StateT", bound=int)


class IllegalStep(Exception):
    """The step is not allowed in this state. Nothing was changed."""


class Step(dict[StateT, StateT]):
    """
    ``thing.state = STEP[thing.state]``. A dict is faster than a function, and each call takes several steps.

    :raises IllegalStep: the step is not allowed in that state
    """

    def __init__(self, thing: str, names: Sequence[str], name: str, after: Mapping[StateT, StateT]) -> None:
        """:param names: of the states, as *thing* is in them: ``waits``"""
        super().__init__(after)
        self._thing = thing
        self._names = names
        self._name = name

    def __missing__(self, state: StateT) -> StateT:
        raise IllegalStep(f"{self._thing} that {self._names[state]} cannot {self._name}")
