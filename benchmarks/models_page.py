"""Put the norms of whole models into the pages: chart, table and README, from ``results/model_calls_h200.json``.

    python benchmarks/models_page.py

A bar is the time of all LayerNorm and GroupNorm calls of one training step, forward and backward, with PyTorch's eager
operators, divided by the time with normgrad's. ``benchmarks/model_calls.py`` measures the calls one by one. The chart
is ``docs/evidence/models.svg``. Table and sentences replace what stands between ``<!-- models -->`` and
``<!-- end of models -->``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bars import Row, bar_chart

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "model_calls_h200.json"
PICTURE = ROOT / "docs" / "evidence" / "models.svg"
PAGE = ROOT / "docs" / "evidence" / "speed.md"
#: Pages that show the chart, each with the sentence under it.
SENTENCES = {
    ROOT / "README.md": (
        "Time of all LayerNorm and GroupNorm calls of one training step, forward and backward, float32: {low} to {high}\n"
        "times faster than PyTorch's eager operators on an {device} (PyTorch {torch}, Triton {triton}). It is the time\n"
        "of the norms, not of the whole step: [Speed](docs/evidence/speed.md) has the times and what to expect."
    ),
    ROOT / "docs" / "index.md": (
        "Time of all LayerNorm and GroupNorm calls of one training step, forward and backward, float32: {low} to {high}\n"
        "times faster than PyTorch's eager operators on an {device} (PyTorch {torch}, Triton {triton}). It is the time\n"
        "of the norms, not of the whole step: [Speed](evidence/speed.md) has the times and what to expect."
    ),
    ROOT / "README.zh-CN.md": (
        "一个训练步中全部 LayerNorm 和 GroupNorm 调用（前向和反向，float32）的时间：在 {device} 上，相对 PyTorch eager\n"
        "算子的加速比为 {low} 到 {high}（PyTorch {torch}，Triton {triton}）。这是归一化层的时间，不是整个训练步的时间：\n"
        "[速度](docs/evidence/speed.md)一页给出各项时间和可以预期的效果。"
    ),
    ROOT / "docs" / "zh" / "index.md": (
        "一个训练步中全部 LayerNorm 和 GroupNorm 调用（前向和反向，float32）的时间：在 {device} 上，相对 PyTorch eager\n"
        "算子的加速比为 {low} 到 {high}（PyTorch {torch}，Triton {triton}）。这是归一化层的时间，不是整个训练步的时间：\n"
        "[速度](../evidence/speed.md)一页给出各项时间和可以预期的效果。"
    ),
}
BEGIN, END = "<!-- models -->\n", "<!-- end of models -->\n"
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
        step = both(forward, backward)
        factors = (f"{times.factor:.1f}" for times in (forward, backward, step))
        cells = [label, str(step.calls), f"{step.pytorch:.1f}", f"{step.normgrad:.1f}", *factors]
        lines.append("| " + " | ".join(cells) + " |")
    machine = stored["machine"]
    versions = f"PyTorch {machine['versions']['torch']}, Triton {machine['versions']['triton']}"
    return f"{machine['device']}, {versions}, float32, {machine['date'][:10]}:\n\n" + "\n".join(lines) + "\n"


def sentence(stored: dict[str, Any], text: str) -> str:
    """Fill in a sentence of ``SENTENCES``."""
    factors = [both(forward, backward).factor for _, forward, backward in steps(stored)]
    machine = stored["machine"]
    return (
        text.format(
            low=f"{min(factors):.1f}",
            high=f"{max(factors):.1f}",
            device=machine["device"],
            torch=machine["versions"]["torch"],
            triton=machine["versions"]["triton"],
        )
        + "\n"
    )


def replaced(page: str, content: str) -> str:
    """Return the page with other content between the markers."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + content + END + after


def written(stored: dict[str, Any]) -> dict[Path, str]:
    """Return what every file should hold."""
    files = {PICTURE: chart(stored), PAGE: replaced(PAGE.read_text(encoding="utf-8"), table(stored))}
    for page, text in SENTENCES.items():
        files[page] = replaced(page.read_text(encoding="utf-8"), sentence(stored, text))
    return files


def main() -> None:
    """Write the chart and the pages."""
    for path, content in written(json.loads(RESULTS.read_text(encoding="utf-8"))).items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
