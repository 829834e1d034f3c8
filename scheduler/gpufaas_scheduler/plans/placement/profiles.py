"""
The thesis's measurements of 13 models on a V100-SXM2-16GB: latency, goodput, memory, and three measures of compute.

Source: P. Elvinger, ETH Zurich, 2024, table A.1. Cells that cannot be read there are empty.
"""

import csv
import functools
from importlib import resources
from typing import Final

from gpufaas_scheduler.plans.placement.problem import DeviceCoefficients, ModelCoefficients

V100: Final = "v100"
VISION: Final = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")


IGNITER_V100: Final = DeviceCoefficients(
    F=1530, P=300, p_idle=53.5, B=1e7, alpha_f=-1.0254136, alpha_sch=0.0047506535, beta_sch=-0.0090224257
)
_MODELS: Final = {
    "alexnet": (
        20, 0.031768278, (0.004153511, 8.7115844, 23.736069, 0.055520465, 0.34601099), (0.023892972, 37.108146),
        (0.0030920459, 2.0295712), 0.0023763751,
    ),
    "resnet50": (
        80, 0.0738162, (-0.017514658, 58.264481, -0.011862242, 0.34485782, 1.9095017), (0.16233532, 4.6268645),
        (0.021959513, -0.18994204), 0.0021630605,
    ),
    "vgg19": (
        29, 0.03924937, (-0.0048346495, 158.19297, 44.452131, 0.18840725, 0.92619197), (0.5367285, 2.081851),
        (0.045217532, 2.7228167), 0.0020177315,
    ),
}  # fmt: skip
IGNITER_MODELS: Final = {
    name: ModelCoefficients(n=n, t_sch0=t, k=k, p=p, c=c, alpha_cache=a, d_in=602112, d_out=4000)
    for name, (n, t, k, p, c, a) in _MODELS.items()
}
"""iGniter's coefficients, fitted to its published measurements of a V100; ms, bytes, percent, W, MHz."""


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
    Return the batches of *model*, by size, as `solve compute` reads them.

    :raises KeyError: it was not measured
    """
    return _table()[model]
