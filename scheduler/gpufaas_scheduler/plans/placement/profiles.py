"""
The thesis's measurements of 13 models on a V100-SXM2-16GB: latency, goodput, memory, and three measures of compute.

Source: P. Elvinger, ETH Zurich, 2024, table A.1. Cells that cannot be read there are empty.
"""

import csv
import functools
from importlib import resources
from typing import Final

V100: Final = "v100"
VISION: Final = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")


@functools.cache
def _table() -> dict[str, dict[str, dict[str, float | None]]]:
    text = resources.files(__package__).joinpath("v100.csv").read_text()
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for row in csv.DictReader(text.splitlines()):
        values = {key: float(row[key]) if row[key] else None for key in row if key not in ("model", "batch")}
        found.setdefault(row["model"], {})[row["batch"]] = values
    return found


def models() -> tuple[str, ...]:
    """Return the names of the models that were measured."""
    return tuple(_table())


def profile(model: str) -> dict[str, dict[str, float | None]]:
    """
    Return the batches of *model*, by size, as `plan compute` reads them.

    :raises KeyError: it was not measured
    """
    return _table()[model]
