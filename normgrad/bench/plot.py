"""A picture: speed as a share of the limit over the size of the data, one line per library."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from normgrad.bench.implementations.implementation import Role
from normgrad.bench.results import CaseResult, geometric_mean


def lines(results: Sequence[CaseResult], operator: str, dtype: str) -> dict[str, list[tuple[int, float]]]:
    """By implementation: bytes and share of the limit, the geometric mean where several cases have one size."""
    shares: dict[str, dict[int, list[float]]] = {}
    for result in results:
        if (result.case.operator, result.case.dtype) != (operator, dtype):
            continue
        for m in result.measurements:
            share = result.of_limit(m)
            if m.role is not Role.LIMIT and share is not None:
                shares.setdefault(m.implementation, {}).setdefault(result.case.nbytes, []).append(share)
    return {
        name: [(nbytes, geometric_mean(values) or 0.0) for nbytes, values in sorted(by_size.items())]
        for name, by_size in shares.items()
    }


def draw(path: Path, results: Sequence[CaseResult], title: str) -> None:
    """One panel per operator and dtype."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "normgrad"  # the same picture from the same numbers

    operators = list(dict.fromkeys(result.case.operator for result in results))
    dtypes = list(dict.fromkeys(result.case.dtype for result in results))
    figure, axes = pyplot.subplots(
        len(operators),
        len(dtypes),
        figsize=(1 + 4 * len(dtypes), 1.6 + 2.6 * len(operators)),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    names = list(dict.fromkeys(m.implementation for r in results for m in r.measurements if m.role is not Role.LIMIT))
    colours = {name: f"C{number}" for number, name in enumerate(names)}
    for row, operator in enumerate(operators):
        for column, dtype in enumerate(dtypes):
            panel = axes[row][column]
            for name, points in lines(results, operator, dtype).items():
                sizes, shares = zip(*points, strict=True)
                panel.plot(sizes, [100 * share for share in shares], marker=".", color=colours[name], label=name)
            panel.axhline(100, color="grey", linewidth=0.8)
            panel.set(xscale="log", title=f"{operator}\n{dtype}")
            panel.title.set_fontsize("small")
            panel.grid(alpha=0.3)
    for panel in axes[-1]:
        panel.set_xlabel("bytes of the input")
    for panel in axes[:, 0]:
        panel.set_ylabel("% of the bandwidth limit")
    handles = [pyplot.Line2D([], [], color=colours[name], marker=".", label=name) for name in names]
    # A column of panels is as wide as about 50 characters of the title or two names of the legend.
    columns = max(1, min(len(names), 2 * len(dtypes)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize="small")
    figure.suptitle(textwrap.fill(title, 50 * len(dtypes)), fontsize="medium")
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
