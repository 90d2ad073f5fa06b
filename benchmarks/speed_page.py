"""Write the charts and tables of ``docs/evidence/speed.md``, and the sentence of README.

    python benchmarks/speed_page.py

A bar is the time of all LayerNorm and GroupNorm calls of one training step, forward and backward, with PyTorch's eager
operators, divided by the time with normgrad's. ``benchmarks/model_calls.py`` measures the calls one by one. Sentences
and the first table replace what stands between ``<!-- models -->`` and ``<!-- end of models -->``, the table of the
operators what stands between ``<!-- operators -->`` and ``<!-- end of operators -->``. The training steps of
``normgrad bench --models`` go between ``<!-- steps -->`` and ``<!-- end of steps -->``, with a chart, for each results
file that there is.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpu_page
import cuda_page
from bars import Row, bar_chart

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "model_calls_h200.json"
#: Where the training steps were timed, with the results file and the chart.
STEPS = {
    name: (RESULTS.with_name(f"model_steps_{name}.json"), ROOT / "docs" / "evidence" / f"steps_{name}.svg")
    for name in ("h200", "cpu_2_cores")
}
PICTURE = ROOT / "docs" / "evidence" / "models.svg"
PAGE = ROOT / "docs" / "evidence" / "speed.md"
#: Pages that show the chart, each with the sentence under it and the link to the page above.
ENGLISH = """\
Time of all LayerNorm and GroupNorm calls of one training step, forward and backward, float32: {low} to {high} times
faster than PyTorch's eager operators on an {device} (PyTorch {torch}, Triton {triton}). It is the time of the norms,
not of the whole step: [Speed]({link}) has the times and what to expect.
"""
CHINESE = (
    "一个训练步中全部 LayerNorm 和 GroupNorm 调用（前向和反向，float32）的时间：在 {device} 上，"
    "相对 PyTorch eager 算子的加速比为 {low} 到 {high}（PyTorch {torch}，Triton {triton}）。"
    "这是归一化层的时间，不是整个训练步的时间：[速度]({link})一页给出各项时间和可以预期的效果。\n"
)
SENTENCES = {
    ROOT / "README.md": (ENGLISH, "docs/evidence/speed.md"),
    ROOT / "docs" / "index.md": (ENGLISH, "evidence/speed.md"),
    ROOT / "README.zh-CN.md": (CHINESE, "docs/evidence/speed.md"),
    ROOT / "docs" / "zh" / "index.md": (CHINESE, "../evidence/speed.md"),
}
MODELS = {
    "vit_b_16": "ViT-B/16, batch 128",
    "convnext_tiny": "ConvNeXt-Tiny, batch 128",
    "swin_t": "Swin-T, batch 128",
    "resnet50_group_norm": "ResNet-50 with GroupNorm, batch 128",
    "gpt2": "GPT-2, 16×1024 tokens",
}


@dataclass
class Times:
    """Milliseconds of some calls, and how many there are."""

    calls: int = 0
    pytorch: float = 0.0
    normgrad: float = 0.0

    @property
    def factor(self) -> float:
        """How many times faster normgrad is."""
        return self.pytorch / self.normgrad

    def add(self, row: dict[str, Any]) -> None:
        """Count a call that occurs ``row["count"]`` times in a step."""
        self.calls += row["count"]
        self.pytorch += row["count"] * row["pytorch_us"] / 1e3
        self.normgrad += row["count"] * row["normgrad_us"] / 1e3


def steps(stored: dict[str, Any], precision: str = "float32") -> Iterator[tuple[str, Times, Times]]:
    """Yield every model's label with the times of its forward and backward calls."""
    for model, label in MODELS.items():
        forward, backward = Times(), Times()
        for row in stored["results"]:
            if (row["model"], row["precision"]) == (model, precision):
                (backward if row["operator"].endswith("_backward") else forward).add(row)
        yield label, forward, backward


def both(forward: Times, backward: Times) -> Times:
    """Return the times of both passes together."""
    return Times(
        forward.calls + backward.calls, forward.pytorch + backward.pytorch, forward.normgrad + backward.normgrad
    )


def chart(stored: dict[str, Any]) -> str:
    """Return the picture."""
    rows = []
    for label, forward, backward in steps(stored):
        step = both(forward, backward)
        rows.append(Row(label, [(step.factor, f"{step.factor:.1f} × ({step.pytorch:.1f} → {step.normgrad:.1f} ms)")]))
    subtitle = f"Times faster than PyTorch eager: {stored['machine']['device']}, float32, forward and backward"
    return bar_chart("All LayerNorm and GroupNorm calls of a training step", subtitle, ["normgrad"], rows)


def table(stored: dict[str, Any]) -> str:
    """Return the table of the page."""
    titles = ["model", "norm calls", "PyTorch, ms", "normgrad, ms", "forward, ×", "backward, ×", "both, ×"]
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    for label, forward, backward in steps(stored):
        step, model = both(forward, backward), label.partition(",")[0]
        factors = (f"{times.factor:.1f}" for times in (forward, backward, step))
        cells = [model, str(step.calls), f"{step.pytorch:.1f}", f"{step.normgrad:.1f}", *factors]
        lines.append("| " + " | ".join(cells) + " |")
    machine = stored["machine"]
    versions = f"PyTorch {machine['versions']['torch']}, Triton {machine['versions']['triton']}"
    return f"{machine['device']}, {versions}, float32, {machine['date'][:10]}:\n\n" + "\n".join(lines) + "\n"


def sentence(stored: dict[str, Any], text: str, link: str) -> str:
    """Fill in a sentence of ``SENTENCES``."""
    factors = [both(forward, backward).factor for _, forward, backward in steps(stored)]
    versions = stored["machine"]["versions"]
    return text.format(
        low=f"{min(factors):.1f}",
        high=f"{max(factors):.1f}",
        device=stored["machine"]["device"],
        torch=versions["torch"],
        triton=versions["triton"],
        link=link,
    )


def operators() -> str:
    """Return a table of LayerNorm and GroupNorm: how many times faster than PyTorch, on the GPU and on the CPU."""
    with open(cuda_page.RESULTS, newline="") as file:
        gpu = list(csv.DictReader(file))
    cpu = cpu_page.ratios(cpu_page.measured(cpu_page.RESULTS), cpu_page.measured(cpu_page.GRID))
    dtypes = ("bfloat16", "float32")
    titles = ["operator", "memory format", *(f"{device}, {dtype}" for device in ("GPU", "CPU") for dtype in dtypes)]
    lines = ["| " + " | ".join(titles) + " |", "|---|---|" + "---:|" * (len(titles) - 2)]
    for operator, order in cpu:
        found = [cuda_page.factors(gpu, operator, order, dtype) for dtype in dtypes]
        found += [cpu[operator, order].get(dtype, []) for dtype in dtypes]
        lines.append("| " + " | ".join([f"`{operator}`", order, *map(cpu_page.mean_and_range, found)]) + " |")
    return "\n".join(lines) + "\n"


def by_model(stored: dict[str, Any]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Return the records of ``normgrad bench --models`` by title and dtype, then by mode."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in stored["results"]:
        found.setdefault((row["title"], row["dtype"]), {})[row["mode"]] = row
    return found


def where(stored: dict[str, Any]) -> str:
    """Return the device in words."""
    machine = stored["machine"]
    return (
        f"{machine['threads']} cores of an {machine['processor']}" if machine["device"] == "cpu" else machine["device"]
    )


def steps_chart(stored: dict[str, Any]) -> str:
    """Return a chart of the training steps: how many times faster than the same mode with PyTorch's norms."""
    series = {"override": "override()", "modules": "modules", "compile+modules": "modules, both compiled"}
    rows = []
    for (title, dtype), modes in by_model(stored).items():
        bars = [
            (modes[mode]["speedup"], f"{modes[mode]['speedup']:.2f} ×") if modes.get(mode, {}).get("speedup") else None
            for mode in series
        ]
        if any(bars):
            rows.append(Row(f"{title}, {dtype}", bars))
    subtitle = (
        f"Times faster than with PyTorch's norms: {where(stored)}, PyTorch {stored['machine']['versions']['torch']}"
    )
    return bar_chart("Training steps of whole models", subtitle, list(series.values()), rows)


def steps_table(stored: dict[str, Any]) -> str:
    """Return the table of the training steps: milliseconds, and the ratio to the mode's baseline."""
    baselines: dict[str, str | None] = {row["mode"]: row["baseline"] for row in stored["results"]}
    titles = ["model", "dtype", "batch"]
    for mode, baseline in baselines.items():
        titles += [f"{mode}, ms", f"× {baseline}"] if baseline else [f"{mode}, ms"]
    lines = ["| " + " | ".join(titles) + " |", "|---|---|---|" + "---:|" * (len(titles) - 3)]
    for (title, dtype), modes in by_model(stored).items():
        cells = [title, dtype, modes["eager"]["batch"].replace("x", "×")]
        for mode, baseline in baselines.items():
            row = modes.get(mode, {})
            cells.append(f"{1e3 * row['seconds']:.1f}" if row.get("seconds") else "")
            if baseline:
                cells.append(f"{row['speedup']:.2f}" if row.get("speedup") else "")
        lines.append("| " + " | ".join(cells) + " |")
    machine = stored["machine"]
    return (
        f"{where(stored)}, PyTorch {machine['versions']['torch']}, {machine['date'][:10]}:\n\n"
        + "\n".join(lines)
        + "\n"
    )


def training_steps() -> tuple[str, dict[Path, str]]:
    """Return the part of the page about training steps, and its charts by path."""
    parts, charts = [], {}
    for results, picture in STEPS.values():
        if results.exists():
            stored = json.loads(results.read_text(encoding="utf-8"))
            charts[picture] = steps_chart(stored)
            parts.append(f"![Times faster than with PyTorch's norms]({picture.name})\n\n{steps_table(stored)}")
    if not parts:
        return "", charts
    return "\n".join(["## Training steps of whole models\n", *parts]), charts


def replaced(page: str, marker: str, content: str) -> str:
    """Return the page with other content between a pair of markers."""
    begin, end = f"<!-- {marker} -->\n", f"<!-- end of {marker} -->\n"
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return before + begin + content + end + after


def written() -> dict[Path, str]:
    """Return what every file should hold."""
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = replaced(PAGE.read_text(encoding="utf-8"), "models", table(stored))
    page = replaced(page, "operators", operators())
    section, charts = training_steps()
    files = {PICTURE: chart(stored), PAGE: replaced(page, "steps", section), **charts}
    for path, (text, link) in SENTENCES.items():
        files[path] = replaced(path.read_text(encoding="utf-8"), "models", sentence(stored, text, link))
    return files


def main() -> None:
    """Write the chart and the pages."""
    for path, content in written().items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
