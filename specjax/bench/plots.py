"""Pictures of a benchmark, all for one batch size and temperature. Runs are records as in results.json."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # safe for colour-blind readers
GREY = "#5f6770"
BAR = 0.8  # share of a workload's height that its bars fill together


def speedups(runs: Sequence[dict], setting: str) -> Figure:
    """Speed-up per workload with its interval, over the band in which eager differs from itself."""
    figure, axes = _workload_axes(runs, "Decode speed-up over eager", setting)
    noise = [run["speedup"] for run in runs if run["method"] == "eager" and run["speedup"]]
    if noise:
        axes.axvspan(min(noise), max(noise), color=GREY, alpha=0.2, linewidth=0, label="eager against itself", zorder=0)
    axes.axvline(1, color=GREY, linewidth=1, zorder=1)
    ends = [1.0]
    for method, colour, bars in _bars(runs):
        values = np.array([run["speedup"] or np.nan for _, run in bars])
        sides = np.array([run["speedup_interval"] or [run["speedup"] or np.nan] * 2 for _, run in bars]).T
        error = np.maximum(np.abs(sides - values), 0)
        places = [place for place, _ in bars]
        axes.barh(places, values - 1, _height(runs), left=1, color=colour, label=method, zorder=2)
        axes.errorbar(values, places, xerr=error, fmt="none", ecolor="#222222", elinewidth=1, capsize=2, zorder=3)
        for place, value, end in zip(places, values, np.fmax(sides[1], np.fmax(values, 1))):
            slower = "  slower" if value < 1 else ""
            axes.annotate(
                f"{value:.2f}×{slower}", (end, place), (5, 0), textcoords="offset points", va="center", fontsize=8
            )
        ends += [*sides.ravel(), *values]
    _ratio_axis(axes, np.nanmin([*ends, *noise]), np.nanmax(ends))
    axes.set_xlabel("times eager's tokens per second (log scale); whiskers: 95 % interval over prompts")
    _legend(axes)
    return figure


def tokens_per_cycle(runs: Sequence[dict], setting: str) -> Figure:
    """Tokens per cycle and workload, and a mark for the same before texts begin to repeat."""
    figure, axes = _workload_axes(runs, "Tokens per cycle", setting)
    longest = 1.0
    for method, colour, bars in _bars(runs):
        places = [place for place, _ in bars]
        values = [run["tokens_per_cycle"] for _, run in bars]
        axes.barh(places, values, _height(runs), color=colour, label=method, zorder=2)
        before = [(place, run["before_loop"]) for place, run in bars if run["before_loop"]["looping"]]
        axes.scatter(
            [figures["tokens_per_cycle"] for _, figures in before],
            [place for place, _ in before],
            marker="D", s=26, facecolor="white", edgecolor="#222222", zorder=3,
            label="before the text repeats itself" if before else None,
        )  # fmt: skip
        for place, run in bars:
            end = max(run["tokens_per_cycle"], run["before_loop"]["tokens_per_cycle"])
            label = f"{run['tokens_per_cycle']:.2f}"
            axes.annotate(label, (end, place), (6, 0), textcoords="offset points", va="center", fontsize=8)
        longest = max([longest, *values])
    axes.axvline(1, color=GREY, linewidth=1, zorder=3, label="eager: 1")
    axes.set_xlim(0, 1.12 * longest)
    axes.set_xlabel("tokens that one target pass yields, its own (bonus) token included")
    _legend(axes)
    return figure


def acceptance(runs: Sequence[dict], setting: str) -> Figure:
    """Share of cycles that keep a draft token at each depth: pooled (bold) and per workload (thin)."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    deepest = 1
    for method, colour in _methods(runs):
        mine = [run for run in runs if run["method"] == method and run["cycles"]]
        shares = np.array([run["acceptance_by_depth"] for run in mine])
        depths = np.arange(1, shares.shape[-1] + 1)
        deepest = max(deepest, len(depths))
        axes.plot(depths, shares.T, color=colour, alpha=0.3, linewidth=1)
        pooled = np.average(shares, axis=0, weights=[run["cycles"] for run in mine])
        axes.plot(depths, pooled, color=colour, linewidth=2.5, marker="o", label=method)
        best = int(shares.sum(1).argmax())
        axes.annotate(
            mine[best]["workload"], (1, shares[best, 0]), (6, 2), textcoords="offset points", fontsize=8, color=GREY
        )
    axes.set_xticks(range(1, deepest + 1))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("depth of the draft token")
    axes.set_ylabel("share of all cycles that keep it")
    _dress(axes, "Acceptance by depth", setting)
    axes.grid(axis="both", color="#e4e7ea", zorder=0)
    axes.plot([], [], color=GREY, alpha=0.5, linewidth=1, label="each workload (bold: all of them)")
    _legend(axes)
    return figure


def _methods(runs: Sequence[dict]) -> list[tuple[str, str]]:
    """Methods that draft, each with its colour."""
    names = [name for name in dict.fromkeys(run["method"] for run in runs) if name != "eager"]
    return [(name, COLOURS[i % len(COLOURS)]) for i, name in enumerate(names)]


def _bars(runs: Sequence[dict]):
    """Per method: its name, its colour and (place on the workload axis, run) for each of its runs."""
    workloads = list(dict.fromkeys(run["workload"] for run in runs))
    methods = _methods(runs)
    for number, (method, colour) in enumerate(methods):
        shift = (number - (len(methods) - 1) / 2) * _height(runs)
        yield method, colour, [(workloads.index(r["workload"]) + shift, r) for r in runs if r["method"] == method]


def _height(runs: Sequence[dict]) -> float:
    return BAR / max(1, len(_methods(runs)))


def _workload_axes(runs: Sequence[dict], title: str, setting: str) -> tuple[Figure, Axes]:
    """A figure with one place per workload from top to bottom."""
    workloads = list(dict.fromkeys(run["workload"] for run in runs))
    rows = len(workloads) * max(1, 0.75 * len(_methods(runs)))
    figure = Figure(figsize=(8.5, 1.7 + 0.38 * rows), layout="constrained")
    axes = figure.add_subplot()
    axes.set_yticks(range(len(workloads)), workloads)
    axes.set_ylim(len(workloads) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e7ea", zorder=0)
    _dress(axes, title, setting)
    return figure, axes


def _dress(axes: Axes, title: str, setting: str) -> None:
    axes.set_title(f"{title}\n", loc="left", fontweight="bold", fontsize=12)
    corner, above = (0, 1), (0, 6)
    axes.annotate(setting, corner, above, "axes fraction", "offset points", fontsize=9, color=GREY)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _legend(axes: Axes) -> None:
    """One entry per name, under the axes where it hides nothing."""
    handles = dict(reversed(list(zip(*reversed(axes.get_legend_handles_labels())))))
    axes.figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=4, frameon=False, fontsize=9)


def _ratio_axis(axes: Axes, low: float, high: float) -> None:
    """A log axis with plain numbers, on which half and twice are equally far from 1."""
    axes.set_xscale("log")
    axes.set_xlim(min(0.9, 0.95 * low), max(1.2, high) * 1.25)
    left, right = axes.get_xlim()
    fine = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3)
    coarse = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10)
    axes.xaxis.set_major_locator(FixedLocator(fine if right < 4 * left else coarse))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.xaxis.set_minor_locator(NullLocator())
