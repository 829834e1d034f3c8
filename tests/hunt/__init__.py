"""
Hunts for tests that do not hold: each integration test several times, in each of four settings of the machine.

``python -m tests.hunt``, or ``make hunt``: see `tests.hunt.__main__`.
"""
