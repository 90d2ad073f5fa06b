"""Writes the tables and the picture of ``docs/performance_gpu.md`` from ``benchmarks/results/cuda_h200.csv``.

Other libraries' speeds, which are not measured every time, come from ``cuda_h200_others.csv`` beside it.
"""

from __future__ import annotations

import csv
from pathlib import Path

from normgrad.bench.results import geometric_mean

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cuda_h200.csv"
OTHERS = RESULTS.with_name("cuda_h200_others.csv")
PAGE = ROOT / "docs" / "performance_gpu.md"
PICTURE = ROOT / "docs" / "performance_gpu.svg"
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"
SUMMARY_BEGIN, SUMMARY_END = "<!-- summary -->\n", "<!-- end of summary -->\n"
SHORT = {"channels_last": "channels_last", "contiguous": ""}
CONTESTANTS = {
    "normgrad": "normgrad",
    "eager": "PyTorch",
    "compile": "torch.compile",
    "liger": "Liger",
    "quack": "QuACK",
}
DRAWN = ("layer_norm_backward", "layer_norm", "group_norm_backward", "group_norm")
DRAWN += ("batch_norm_elemt_backward", "batch_norm_reduce_backward", "batch_norm_stats")

Row = dict[str, str]


def share(row: Row, name: str) -> float:
    """A contestant's speed in % of the copy."""
    return 100 * float(row["copy"]) / float(row[name])


def table(rows: list[Row]) -> list[str]:
    """The lines of a table of speeds."""
    timed = {name: title for name, title in CONTESTANTS.items() if any(row.get(name) for row in rows)}
    titles = ["operator", "sizes", "dtype", "order", "copy, µs", *(f"{title}, %" for title in timed.values())]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        shares = (f"{share(row, name):.0f}" if row.get(name) else "" for name in timed)
        cells = [row["operator"], row["sizes"], row["dtype"], SHORT[row["order"]], row["copy"], *shares]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def tables(rows: list[Row], others: list[Row]) -> str:
    """The cases by operator, the calls of the small ones, and those that other libraries took part in."""
    first = rows[0]
    lines = [
        f"{first['gpu']}, driver {first['driver']}, PyTorch {first['torch']}, Triton {first['triton']}. "
        "Speeds in % of a device-to-device copy of the same bytes.",
        "",
        *table(rows),
        "",
        "Host time of a call and time of a replayed CUDA graph, in µs:",
        "",
        "| operator | sizes | dtype | order | call | plan.run | PyTorch call | graph | PyTorch graph |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["call"]:
            times = (row[name] for name in ("call", "plan_call", "eager_call", "graph", "eager_graph"))
            cells = [row["operator"], row["sizes"], row["dtype"], SHORT[row["order"]], *times]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Other libraries, in a run of their own, with normgrad as it was then:", "", *table(others)]
    return "\n".join(lines) + "\n"


def summary(rows: list[Row]) -> str:
    """Return a table with a row for each operator and memory format: geometric mean and range over all sizes."""
    dtypes = ("bfloat16", "float32")
    titles = [
        "operator",
        "memory format",
        *(f"{dtype}, {what}" for dtype in dtypes for what in ("× PyTorch", "% of copy")),
    ]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for operator, order in dict.fromkeys((row["operator"], row["order"]) for row in rows):
        cells = [f"`{operator}`", order]
        for dtype in dtypes:
            chosen = [r for r in rows if (r["operator"], r["order"], r["dtype"]) == (operator, order, dtype)]
            ratios = [float(row["eager"]) / float(row["normgrad"]) for row in chosen]
            shares = [share(row, "normgrad") for row in chosen]
            cells.append(f"{geometric_mean(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})")
            cells.append(f"{geometric_mean(shares):.0f} ({min(shares):.0f} to {max(shares):.0f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def replaced(page: str, begin: str, end: str, content: str) -> str:
    """Return the page with new content between two markers."""
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return before + begin + content + end + after


def draw(rows: list[Row]) -> None:
    """A panel for each operator and order: the speeds by size, in bfloat16 and float32."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "normgrad"
    panels = [
        (operator, order)
        for operator in DRAWN
        for order in SHORT
        if any((row["operator"], row["order"]) == (operator, order) for row in rows)
    ]
    figure, axes = pyplot.subplots(-(-len(panels) // 2), 2, figsize=(13, 16), sharey=True, layout="constrained")
    for panel, (operator, order) in zip(axes.flat, panels, strict=False):
        for dtype, style in (("bfloat16", "-"), ("float32", "--")):
            chosen = [r for r in rows if (r["operator"], r["order"], r["dtype"]) == (operator, order, dtype)]
            chosen = [row for row in chosen if float(row["copy"]) > 5]
            places = range(len(chosen))
            for colour, name in enumerate(CONTESTANTS):
                points = [(place, share(row, name)) for place, row in enumerate(chosen) if row.get(name)]
                if points:
                    label = f"{CONTESTANTS[name]}, {dtype}"
                    panel.plot(*zip(*points, strict=True), style, color=f"C{colour}", marker=".", label=label)
            panel.set_xticks(places, [row["sizes"] for row in chosen], rotation=25, fontsize="x-small", ha="right")
        panel.set(title=f"{operator} {SHORT[order]}", ylim=(0, 110))
        panel.axhline(100, color="grey", linewidth=0.8)
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    for panel in axes[:, 0]:
        panel.set_ylabel("% of a copy")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Put the tables into the page, and the picture beside it."""
    with open(RESULTS, newline="") as file, open(OTHERS, newline="") as other_file:
        rows = list(csv.DictReader(file))
        others = list(csv.DictReader(other_file))
    page = replaced(PAGE.read_text(), BEGIN, END, tables(rows, others))
    PAGE.write_text(replaced(page, SUMMARY_BEGIN, SUMMARY_END, summary(rows)))
    draw(rows)


if __name__ == "__main__":
    main()
