"""
Plots of runs, as SVG or PNG: latency and misses, the distribution of latency, residency over time.

The only module that imports matplotlib. It uses the object-oriented API: no global state, no windows, and the same
bytes in each run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from gpufaas_core.model import Seconds
from gpufaas_simulator.report import Estimate
from gpufaas_simulator.timeline import Stay

Setting = tuple[str, int]
"""A policy, and a working set."""

_SETTINGS: Final[Any] = {  # matplotlib's own type has every key in it
    "svg.hashsalt": "gpufaas",
    "svg.fonttype": "none",  # text stays text: smaller, and it can be found
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.constrained_layout.use": True,
}
_COLOURS: Final = ("#999999", "#56b4e9", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""The colours of policies, in order; a palette for colour-blind readers (Okabe and Ito)."""
_HOT: Final = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00", "#0072b2")
"""The colours of the functions that a residency plot names: the same palette without black and grey."""
_MUTED: Final = "#dddddd"


def save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    svg = path.suffix == ".svg"
    with mpl.rc_context(_SETTINGS):
        figure.savefig(path, dpi=110, metadata={"Date": None} if svg else {"Software": None})
    return path


def latency_and_misses(found: Mapping[Setting, Mapping[str, Estimate]]) -> Figure:
    """Bars by working set and policy with 95 % confidence intervals; latency on a logarithmic axis."""
    policies = list(dict.fromkeys(policy for policy, _ in found))
    sets = list(dict.fromkeys(working_set for _, working_set in found))
    width = 0.8 / len(policies)
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(8, 3))
        for at, (name, label) in enumerate((("mean", "mean latency, s"), ("miss_ratio", "miss ratio"))):
            axes = figure.add_subplot(1, 2, at + 1)
            for index, policy in enumerate(policies):
                places, heights, errors = [], [], []
                for place, working_set in enumerate(sets):
                    if (policy, working_set) in found:
                        value = found[policy, working_set][name]
                        places.append(place + (index - (len(policies) - 1) / 2) * width)
                        heights.append(value.mean)
                        errors.append(value.half_width)
                colour = _COLOURS[index % len(_COLOURS)]
                low = [min(error, 0.99 * height) for error, height in zip(errors, heights, strict=True)]
                axes.bar(places, heights, width, yerr=[low, errors], label=policy, color=colour,
                         error_kw={"elinewidth": 0.8})  # fmt: skip
            axes.set_xticks(range(len(sets)), [f"{each} functions" if each else "" for each in sets])
            axes.set_ylabel(label)
            axes.grid(axis="x", visible=False)
            if name == "mean":
                axes.set_yscale("log")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=len(policies), frameon=False)
    return figure


def latency_cdf(found: Mapping[Setting, NDArray[np.float64]]) -> Figure:
    """The share of calls that were answered within so many seconds, a panel per working set."""
    policies = list(dict.fromkeys(policy for policy, _ in found))
    sets = list(dict.fromkeys(working_set for _, working_set in found))
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(max(4.0, 3.0 * len(sets)), 3))
        first = None
        for at, working_set in enumerate(sets):
            axes = first = figure.add_subplot(1, len(sets), at + 1, sharey=first)
            for index, policy in enumerate(policies):
                values = found.get((policy, working_set))
                if values is None or not len(values):
                    continue
                # More than a thousand points would not be visible.
                shares = np.linspace(0, 1, min(len(values), 1000))
                axes.step(np.quantile(values, shares), shares, label=policy, color=_COLOURS[index % len(_COLOURS)],
                          where="post")  # fmt: skip
            axes.set_xscale("log")
            axes.set_xlabel("latency, s" + (f", {working_set} functions" if working_set else ""))
            if not at:
                axes.set_ylabel("share of calls")
        if first is not None:
            drawn = first.get_legend_handles_labels()
            figure.legend(*drawn, loc="outside upper center", ncols=len(policies), frameon=False)
    return figure


def residency(stays: Sequence[Stay], end_s: Seconds, title: str) -> Figure:
    """
    Draw one row per device, with a bar for each model from the start of its load to its eviction. The models that were
    resident longest have a colour and a name; the others are grey.
    """
    devices = sorted({stay.device for stay in stays}, key=_natural)
    resident_s: defaultdict[str, Seconds] = defaultdict(float)
    for stay in stays:
        resident_s[stay.function] += stay.end_s - stay.begin_s
    longest = sorted(sorted(resident_s, key=lambda name: -resident_s[name])[: len(_HOT)], key=_natural)
    colour_of = dict(zip(longest, _HOT, strict=False))
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(10, max(1.5, 0.45 * len(devices) + 0.8)))
        axes = figure.add_subplot()
        for row, device in enumerate(devices):
            mine = sorted((stay for stay in stays if stay.device == device), key=lambda stay: stay.begin_s)
            lanes: list[Seconds] = []  # until when each is taken
            placed = []
            for stay in mine:
                lane = next((at for at, until in enumerate(lanes) if until <= stay.begin_s), len(lanes))
                lanes[lane : lane + 1] = [stay.end_s]
                placed.append((stay, lane))
            height = 0.85 / max(1, len(lanes))
            for stay, lane in placed:
                at = row - 0.425 + lane * height
                length_s = stay.end_s - stay.begin_s
                colour = colour_of.get(stay.function, _MUTED)
                axes.broken_barh([(stay.begin_s, length_s)], (at, height * 0.92), facecolors=colour, edgecolor="white",
                                 linewidth=0.4)  # fmt: skip
                if stay.function in colour_of and length_s > 0.06 * end_s:
                    axes.text(stay.begin_s, at + height / 2, f" {stay.function}", va="center", fontsize=5, clip_on=True)
        axes.set_yticks(range(len(devices)), devices)
        axes.invert_yaxis()  # the first device on top
        axes.set_xlim(0, end_s)
        axes.set_xlabel("s")
        axes.set_title(title, loc="left")
        axes.grid(axis="y", visible=False)
        named = [Patch(color=colour, label=name) for name, colour in colour_of.items()]
        if len(resident_s) > len(named):
            named.append(Patch(color=_MUTED, label=f"{len(resident_s) - len(named)} others"))
        figure.legend(handles=named, loc="outside right upper", frameon=False)
    return figure


def lines(x: Sequence[float], series: Mapping[str, Sequence[Estimate]], x_label: str, y_label: str) -> Figure:
    """Draw lines with bands of 95 % confidence intervals."""
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(4.5, 3))
        axes = figure.add_subplot()
        for index, (label, values) in enumerate(series.items()):
            colour = _COLOURS[(index + 2) % len(_COLOURS)]
            means = np.array([value.mean for value in values])
            halves = np.array([value.half_width for value in values])
            axes.plot(x, means, marker="o", markersize=3, label=label, color=colour)
            axes.fill_between(x, means - halves, means + halves, alpha=0.2, color=colour, linewidth=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if len(series) > 1:
            axes.legend(frameon=False)
    return figure


def _natural(name: str) -> tuple[object, ...]:
    """Return a key that sorts g2 before g10."""
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or -1)
