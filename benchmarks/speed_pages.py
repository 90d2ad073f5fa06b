"""The generated parts of docs/evidence/cpu.md, gpu.md and speed.md, of the guides with times, and of the pages that
show the chart of models.

``pages.py`` calls :func:`written`. The results come from ``normgrad bench``, and from the scripts beside this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import bars
from model_calls import COLUMNS, Timed, cells, worst_first
from page_parts import ROOT, machine_line, replaced, table

from normgrad.bench.cases import SMALL
from normgrad.bench.implementations.ours import CALL, NUMPY_CALL, PLAN
from normgrad.bench.pattern_report import LIMITS
from normgrad.bench.pattern_runner import CONTROL
from normgrad.bench.patterns import NORMAL
from normgrad.bench.results import geometric_mean

RESULTS = ROOT / "benchmarks" / "results"
EVIDENCE = ROOT / "docs" / "evidence"
PYTORCH, COPY = "PyTorch", "copy"
#: Operators that PyTorch has on the CPU too, with the same contract.
SAME_IN_PYTORCH = ("layer_norm_backward", "layer_norm", "group_norm_backward", "group_norm")
CPU_DTYPES = ("float32", "float16", "bfloat16")
GPU_DTYPES = ("bfloat16", "float32")
FORMATS = {"contiguous": "", "channels_last": "last"}

Row = dict[str, Any]
Case = dict[str, Row]  # by implementation
Groups = dict[tuple[str, str], dict[str, list[float]]]  # by operator and memory format, then by dtype


def stored(name: str) -> dict[str, Any]:
    """Return a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def cases(rows: Iterable[Row]) -> Iterator[Case]:
    """Yield the measurements of every case; who was wrong or took no part is not among them."""
    for _, group in groupby(rows, lambda row: tuple(row[k] for k in ("operator", "shape", "group", "dtype", "layout"))):
        found = {row["implementation"]: row for row in group if row["problem"] is None}
        if PLAN in found:
            yield found


def speedup(case: Case, peer: str = PYTORCH, ours: str = PLAN) -> float | None:
    """Return a library's time over ours."""
    return case[peer]["seconds"] / case[ours]["seconds"] if peer in case and ours in case else None


def ratios(found: Iterable[Case], peer: str = PYTORCH, ours: str = PLAN) -> list[float]:
    """Return a library's time over ours in the cases in which both took part."""
    return [ratio for case in found if (ratio := speedup(case, peer, ours)) is not None]


def size_of(row: Row) -> str:
    """Return the shape, with the number of groups of GroupNorm."""
    return row["shape"].replace("x", "×") + (f" / {row['group']}" if row.get("group") else "")


def name_of(case: Case) -> str:
    """Return an operator, its sizes, dtype and memory format."""
    row = case[PLAN]
    return f"`{row['operator']}` {size_of(row)} {row['dtype']} {FORMATS[row['layout']]}".rstrip()


def grouped(found: Iterable[Case], *keys: str) -> dict[tuple[str, ...], list[Case]]:
    """Return the cases by fields of their records."""
    groups: dict[tuple[str, ...], list[Case]] = {}
    for case in found:
        groups.setdefault(tuple(case[PLAN][key] for key in keys), []).append(case)
    return groups


def speedups(found: Iterable[Case]) -> Groups:
    """Return PyTorch's time over ours by operator, memory format and dtype."""
    groups: Groups = {}
    for (operator, layout, dtype), some in grouped(found, "operator", "layout", "dtype").items():
        groups.setdefault((operator, layout), {})[dtype] = ratios(some)
    return groups


def mean_and_range(found: Sequence[float], digits: int = 1) -> str:
    """Return the geometric mean with the least and the largest; a dash where there is none."""
    if not found:
        return "–"
    return f"{geometric_mean(found):.{digits}f} ({min(found):.{digits}f} to {max(found):.{digits}f})"


def machine_name(machine: dict[str, Any]) -> str:
    """Return what was measured on, and with which PyTorch, for the subtitle of a chart."""
    on_cpu = f"{machine['threads']} cores of an {machine.get('processor')}"
    return f"{on_cpu if machine['device'] == 'cpu' else machine['device']}, PyTorch {machine['versions']['torch']}"


def speedup_chart(title: str, subtitle: str, groups: Groups, dtypes: Sequence[str]) -> str:
    """Return a chart: how many times faster than PyTorch, by operator, memory format and dtype."""
    rows = []
    for (operator, layout), by_dtype in groups.items():
        means = [geometric_mean(by_dtype.get(dtype, [])) for dtype in dtypes]
        label = operator if layout == "contiguous" else f"{operator} {layout}"
        rows.append(bars.Row(label, [mean and (mean, f"{mean:.1f} ×") for mean in means]))
    return bars.bar_chart(title, subtitle, dtypes, rows)


# CPU


def cpu_shares(found: list[Case]) -> str:
    """Return a table of shares of the bandwidth limit, from 1 MB on."""
    rows = []
    large = (case for case in found if case[PLAN]["bytes"] >= SMALL)
    for (operator, dtype, layout), group in grouped(large, "operator", "dtype", "layout").items():
        shares = [case[PLAN]["of_limit"] for case in group]
        error = max(case[PLAN]["error_of_bound"] for case in group)
        mean = geometric_mean(ratios(group))
        against = f"{mean:.2f}" if mean is not None else "–"
        figures = [f"{min(shares):.0%}", f"{geometric_mean(shares):.0%}", against, f"{error:.3f}"]
        rows.append([f"`{operator}`", dtype, FORMATS[layout], *figures])
    return table(["operator", "dtype", "format", "worst", "mean", "× PyTorch", "error / bound"], rows)


def cpu_slower(found: list[Case], title: str) -> str:
    """Return the cases in which PyTorch is faster than the plan or the call with tensors, the worst first."""
    compared, behind = 0, []
    from_numpy = ratios(found, ours=NUMPY_CALL)
    for case in found:
        three = [speedup(case, ours=ours) for ours in (PLAN, CALL, NUMPY_CALL)]
        counting = [ratio for ratio in three[:2] if ratio is not None]
        compared += bool(counting)
        if min(counting, default=1.0) < 1:
            figures = ["" if ratio is None else f"{ratio:.2f}" for ratio in three]
            behind.append((min(counting), [name_of(case), *figures]))
    text = f"{title}: slower than PyTorch in {len(behind)} of {compared} cases, the plan or the call with tensors.\n"
    if from_numpy:
        slow = sum(ratio < 1 for ratio in from_numpy)
        text += "A call with NumPy arrays takes longer than PyTorch's operator on tensors in "
        text += f"{slow} of {len(from_numpy)}.\n"
    if not behind:
        return text
    titles = ["case", "plan, × PyTorch", "call, × PyTorch", "call with NumPy, × PyTorch"]
    return text + "\n" + table(titles, [line for _, line in sorted(behind)])


def cpu_grid(found: list[Case]) -> str:
    """Return a table of the grid: how the libraries compare over all sizes, and how the process grew."""
    peers = [peer for peer in (PYTORCH, "torch.compile", "JAX") if any(peer in case for case in found)]
    rows = []
    for (operator, dtype, layout), group in grouped(found, "operator", "dtype", "layout").items():
        against = [ratios(group, peer) for peer in peers]
        figures = [f"{geometric_mean(each):.2f}, {min(each):.2f}" if each else "–" for each in against]
        largest = (max(case[PLAN][f"{name}_bytes"] or 0 for case in group) for name in ("peak_growth", "workspace"))
        figures += [f"{nbytes / 2**20:.1f} MB" for nbytes in largest]
        rows.append([f"`{operator}`", dtype, FORMATS[layout], str(len(group)), *figures])
    titles = ["operator", "dtype", "format", "cases", *(f"× {peer}" for peer in peers), "growth", "workspace"]
    return table(titles, rows)


def cpu_calls(results: dict[str, Any]) -> str:
    """Return what whole calls cost, and the first call of a process."""
    overhead, startup = results["overhead"], results["startup"]
    rows = [[each["case"], *(f"{1e6 * seconds:.1f}" for seconds in each["seconds"].values())] for each in overhead]
    text = "Whole calls, which allocate their results (`plan.run` does not), µs:\n\n"
    text += table(["case", *overhead[0]["seconds"]], rows)
    if startup:
        rows = [[f"{v:.2f} s" if isinstance(v, float) else str(v) for v in each.values()] for each in startup]
        titles = [name.replace("_", " ") for name in startup[0]]
        text += "\nThe first call in a fresh process:\n\n" + table(titles, rows)
    return text


def cpu_summary() -> Groups:
    """Return the speed-ups from 1 MB on. What is not among the default sizes, timed for longer, is of the grid."""
    default, grid = (list(cases(stored(name)["results"])) for name in ("cpu_2_cores", "cpu_2_cores_grid"))
    timed = {case[PLAN]["operator"] for case in default}
    found = [*default, *(case for case in grid if case[PLAN]["operator"] not in timed)]
    return speedups(c for c in found if c[PLAN]["operator"] in SAME_IN_PYTORCH and c[PLAN]["bytes"] >= SMALL)


def cpu_page(page: str) -> tuple[str, str]:
    """Return docs/evidence/cpu.md and its chart."""
    results = stored("cpu_2_cores")
    machine, found = results["machine"], list(cases(results["results"]))
    grid = list(cases(stored("cpu_2_cores_grid")["results"]))
    tables = [
        machine_line(results, "numpy", "numba", "torch"),
        cpu_shares(found),
        cpu_slower(found, "The default sizes"),
        cpu_calls(results),
        "The grid, from 2×2 to 256 MB (`normgrad bench --grid`): times of other libraries over the plan's,\n"
        "geometric mean and worst; the largest growth of the process during a plan's run, and the largest workspace.\n"
        "Below 1 MB a plain call with tensors counts too; one with NumPy arrays is timed beside it.\n",
        cpu_grid(grid),
        cpu_slower(grid, "The grid"),
    ]
    groups = cpu_summary()
    rows = [
        [f"`{operator}`", layout, *(mean_and_range(by.get(dtype, [])) for dtype in CPU_DTYPES)]
        for (operator, layout), by in groups.items()
    ]
    page = replaced(page, "summary", table(["operator", "memory format", *CPU_DTYPES], rows))
    page = replaced(page, "tables", "\n".join(tables))
    page = replaced(page, "patterns", patterns(stored("patterns_cpu_2_cores")))
    subtitle = f"Geometric mean over tensors of 1 MB and more: {machine_name(machine)}"
    return page, speedup_chart("Times faster than PyTorch's operators on a CPU", subtitle, groups, CPU_DTYPES)


# GPU


def described(row: Row) -> list[str]:
    """Return the cells of a case: operator, sizes, dtype and memory format."""
    return [row["operator"], size_of(row), row["dtype"], row["layout"].replace("contiguous", "")]


def gpu_speeds(found: list[Case]) -> str:
    """Return a table of speeds in % of the copy."""
    shown = [peer for peer in (PLAN, PYTORCH, "Liger") if any(peer in case for case in found)]
    rows = []
    for case in found:
        row, copy = case[PLAN], case[COPY]["seconds"]
        shares = (f"{100 * copy / case[peer]['seconds']:.0f}" if peer in case else "" for peer in shown)
        rows.append([*described(row), f"{1e6 * copy:.1f}", *shares])
    return table(["operator", "sizes", "dtype", "format", "copy, µs", *(f"{peer}, %" for peer in shown)], rows)


def gpu_peers(found: list[Case], others: list[Case]) -> str:
    """Return a table of other libraries in % of the copy in their run, with normgrad's latest figures."""
    latest = {tuple(described(case[PLAN])): case for case in found}
    peers, rows = (PYTORCH, "torch.compile", "Liger", "QuACK"), []
    for case in others:
        cell = described(case[PLAN])
        if tuple(cell) in latest:  # its own run has more dtypes
            shares = [speedup(latest[tuple(cell)], COPY), *(speedup(case, COPY, peer) for peer in peers)]
            rows.append([*cell, *("" if share is None else f"{100 * share:.0f}" for share in shares)])
    return table(["operator", "sizes", "dtype", "format", *(f"{name}, %" for name in ("normgrad", *peers))], rows)


def gpu_calls(found: list[Case]) -> str:
    """Return the host times of calls and the times of replayed graphs, of small tensors."""
    columns = {
        "call": (CALL, "host_seconds"),
        "plan.run": (PLAN, "host_seconds"),
        "PyTorch call": (PYTORCH, "host_seconds"),
        "graph": (PLAN, "graph_seconds"),
        "PyTorch graph": (PYTORCH, "graph_seconds"),
    }
    rows = []
    for case in found:
        row = case[PLAN]
        if row["graph_seconds"] is not None:
            times = (f"{1e6 * case[name][field]:.1f}" if name in case else "" for name, field in columns.values())
            rows.append([*described(row), *times])
    return table(["operator", "sizes", "dtype", "format", *columns], rows)


def gpu_page(page: str) -> tuple[str, str]:
    """Return docs/evidence/gpu.md and its chart."""
    results, others = stored("cuda_h200"), stored("cuda_h200_others")
    found = list(cases(results["results"]))
    tables = [
        machine_line(results, "torch", "triton") + "Speeds in % of a device-to-device copy of the same bytes.\n",
        gpu_speeds(found),
        "Host time of a call and time of a replayed CUDA graph, in µs:\n",
        gpu_calls(found),
        machine_line(others, "torch", "triton") + "Other libraries; normgrad's figures are those of the first table.\n",
        gpu_peers(found, list(cases(others["results"]))),
    ]
    rows = []
    for (operator, layout), group in grouped(found, "operator", "layout").items():
        figures = []
        for dtype in GPU_DTYPES:
            some = [case for case in group if case[PLAN]["dtype"] == dtype]
            figures.append(mean_and_range(ratios(some)))
            figures.append(mean_and_range([100 * (speedup(case, COPY) or 0.0) for case in some], digits=0))
        rows.append([f"`{operator}`", layout, *figures])
    titles = [f"{dtype}, {what}" for dtype in GPU_DTYPES for what in ("× PyTorch", "% of copy")]
    page = replaced(page, "summary", table(["operator", "memory format", *titles], rows))
    page = replaced(page, "tables", "\n".join(tables))
    page = replaced(page, "patterns", patterns(stored("patterns_h200")))
    page = replaced(page, "model calls", model_calls(stored("model_calls_h200")))
    subtitle = f"Geometric mean over the sizes of the table: {machine_name(results['machine'])}"
    return page, speedup_chart("Times faster than PyTorch's eager operators", subtitle, speedups(found), GPU_DTYPES)


# Values, and the calls of models


def patterns(results: dict[str, Any]) -> str:
    """Return the worst pattern of every operator, dtype and memory format, the worst first."""
    rows: list[Row] = [row for row in results["results"] if row["time_over_normal"] is not None]
    changed = [row for row in rows if row["pattern"] not in (NORMAL.name, CONTROL)]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in changed:
        groups.setdefault((row["operator"], row["dtype"], row["layout"]), []).append(row)
    worst = [max(group, key=lambda row: row["time_over_normal"]) for group in groups.values()]
    limit = LIMITS["cpu" if results["machine"]["device"] == "cpu" else "cuda"]
    slow = sum(row["time_over_normal"] > limit for row in changed)
    control = [row["time_over_normal"] for row in rows if row["pattern"] == CONTROL]
    text = machine_line(results, "normgrad", "torch", "numba" if limit == LIMITS["cpu"] else "triton")
    text += f"{slow} of {len(changed)} measurements take more than {limit} × the time on normal data.\n"
    text += f"Control, normal data against other normal data: {min(control):.2f} to {max(control):.2f}.\n"
    for where, ratio in results["subnormal_cost"].items():
        text += f"A plain multiply-add {where} takes {ratio:.2f} × the time on subnormal operands.\n"
    titles = ["operator", "shape", "dtype", "format", "worst pattern"]
    titles += ["µs", "normal, µs", "time / normal", "time / PyTorch"]
    worst.sort(key=lambda row: -row["time_over_normal"])
    return text + "\n" + table(titles, map(_pattern_cells, worst))


def _pattern_cells(row: Row) -> list[str]:
    figures = [f"{row['seconds'] * 1e6:.1f}", f"{row['normal_seconds'] * 1e6:.1f}", f"{row['time_over_normal']:.2f}"]
    figures.append("–" if row["time_over_pytorch"] is None else f"{row['time_over_pytorch']:.2f}")
    return [f"`{row['operator']}`", size_of(row), row["dtype"], row["layout"], row["pattern"], *figures]


def model_calls(results: dict[str, Any]) -> str:
    """Return every distinct norm call of the models, the slowest against PyTorch first."""
    found = worst_first([Timed(**row) for row in results["results"]])
    slower = sum((line.time_over_pytorch or 0.0) > 1 for line in found)
    text = machine_line(results, "normgrad", "torch", "triton")
    text += f"{slower} of {len(found)} distinct calls take longer than PyTorch's.\n\n"
    return text + table(COLUMNS, map(cells, found))


# docs/evidence/speed.md, and the pages with the chart of models

MODELS = {
    "vit_b_16": "ViT-B/16, batch 128",
    "convnext_tiny": "ConvNeXt-Tiny, batch 128",
    "swin_t": "Swin-T, batch 128",
    "resnet50_group_norm": "ResNet-50 with GroupNorm, batch 128",
    "gpt2": "GPT-2, 16×1024 tokens",
}
#: The sentence under the chart, by language.
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


@dataclass
class Times:
    """Milliseconds of the norm calls of a training step, and how many there are."""

    calls: int = 0
    pytorch: float = 0.0
    normgrad: float = 0.0

    @property
    def factor(self) -> float:
        """How many times faster normgrad is."""
        return self.pytorch / self.normgrad

    def add(self, row: Row) -> None:
        """Count a call that occurs ``row["count"]`` times in a step."""
        self.calls += row["count"]
        self.pytorch += row["count"] * row["pytorch_us"] / 1e3
        self.normgrad += row["count"] * row["normgrad_us"] / 1e3


def norm_times(results: dict[str, Any]) -> dict[str, tuple[Times, Times, Times]]:
    """Return the times of a step's norms in float32 by model: forward, backward and both."""
    found = {}
    for model, label in MODELS.items():
        forward, backward, both = Times(), Times(), Times()
        for row in results["results"]:
            if (row["model"], row["precision"]) == (model, "float32"):
                (backward if row["operator"].endswith("_backward") else forward).add(row)
                both.add(row)
        found[label] = forward, backward, both
    return found


def norms_chart(results: dict[str, Any]) -> str:
    """Return the chart of README."""
    rows = []
    for label, (_, _, step) in norm_times(results).items():
        text = f"{step.factor:.1f} × ({step.pytorch:.1f} → {step.normgrad:.1f} ms)"
        rows.append(bars.Row(label, [(step.factor, text)]))
    subtitle = f"Times faster than PyTorch eager: {results['machine']['device']}, float32, forward and backward"
    return bars.bar_chart("All LayerNorm and GroupNorm calls of a training step", subtitle, ["normgrad"], rows)


def norms_table(results: dict[str, Any]) -> str:
    """Return the same as a table."""
    rows = []
    for label, (forward, backward, both) in norm_times(results).items():
        factors = (f"{times.factor:.1f}" for times in (forward, backward, both))
        totals = [str(both.calls), f"{both.pytorch:.1f}", f"{both.normgrad:.1f}"]
        rows.append([label.partition(",")[0], *totals, *factors])
    titles = ["model", "norm calls", "PyTorch, ms", "normgrad, ms", "forward, ×", "backward, ×", "both, ×"]
    return machine_line(results, "torch", "triton", end=", float32:") + "\n" + table(titles, rows, numbers=6)


def norms_sentence(results: dict[str, Any], text: str, link: str) -> str:
    """Fill in a sentence of ``SENTENCES``."""
    factors = [both.factor for _, _, both in norm_times(results).values()]
    machine = results["machine"]
    versions = {name: machine["versions"][name] for name in ("torch", "triton")}
    return text.format(
        low=f"{min(factors):.1f}", high=f"{max(factors):.1f}", device=machine["device"], link=link, **versions
    )


def operators_table() -> str:
    """Return a table of LayerNorm and GroupNorm: how many times faster than PyTorch, on the GPU and on the CPU."""
    gpu, cpu = speedups(cases(stored("cuda_h200")["results"])), cpu_summary()
    rows = []
    for key in cpu:
        found = [groups.get(key, {}).get(dtype, []) for groups in (gpu, cpu) for dtype in GPU_DTYPES]
        rows.append([f"`{key[0]}`", key[1], *map(mean_and_range, found)])
    titles = [f"{device}, {dtype}" for device in ("GPU", "CPU") for dtype in GPU_DTYPES]
    return table(["operator", "memory format", *titles], rows, numbers=4)


# Training steps


def by_model(results: dict[str, Any]) -> dict[tuple[str, str], dict[str, Row]]:
    """Return the records of ``normgrad bench --models`` by title and dtype, then by mode."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in results["results"]:
        found.setdefault((row["title"], row["dtype"]), {})[row["mode"]] = row
    return found


def steps_chart(results: dict[str, Any]) -> str:
    """Return a chart of the training steps in eager mode: how many times faster than with PyTorch's norms."""
    titles = {"override": "override()", "modules": "modules"}
    titles |= {"override16": "override(), 16-bit output", "modules16": "modules, 16-bit output"}
    measured = {row["mode"] for row in results["results"]}
    series = {mode: title for mode, title in titles.items() if mode in measured}
    rows = []
    for (title, dtype), modes in by_model(results).items():
        factors = [modes.get(mode, {}).get("speedup") for mode in series]
        if any(factors):
            rows.append(bars.Row(f"{title}, {dtype}", [f and (f, f"{f:.2f} ×") for f in factors]))
    subtitle = f"Times faster than with PyTorch's norms: {machine_name(results['machine'])}"
    return bars.bar_chart("Training steps of whole models, eager mode", subtitle, list(series.values()), rows)


def steps_table(results: dict[str, Any]) -> str:
    """Return the table of the training steps: milliseconds, and the ratio to the mode's baseline."""
    baselines: dict[str, str | None] = {row["mode"]: row["baseline"] for row in results["results"]}
    titles = ["model", "dtype", "batch"]
    for mode, baseline in baselines.items():
        titles += [f"{mode}, ms", f"× {baseline}"] if baseline else [f"{mode}, ms"]
    rows = []
    for (title, dtype), modes in by_model(results).items():
        line = [title, dtype, modes["eager"]["batch"].replace("x", "×")]
        for mode, baseline in baselines.items():
            row = modes.get(mode, {})
            line.append(f"{1e3 * row['seconds']:.1f}" if row.get("seconds") else "")
            if baseline:
                line.append(f"{row['speedup']:.2f}" if row.get("speedup") else "")
        rows.append(line)
    return machine_line(results, "torch") + "\n" + table(titles, rows, numbers=len(titles) - 3)


def training_steps(folder: Path = RESULTS) -> tuple[str, dict[Path, str]]:
    """Return the part of the page about training steps, and its charts by path; empty without results."""
    parts, charts = [], {}
    for name in ("h200", "cpu_2_cores"):
        path = folder / f"model_steps_{name}.json"
        if path.exists():
            results, picture = json.loads(path.read_text(encoding="utf-8")), EVIDENCE / f"steps_{name}.svg"
            charts[picture] = steps_chart(results)
            parts.append(f"![Times faster than with PyTorch's norms]({picture.name})\n\n{steps_table(results)}")
    return "\n".join(["## Training steps of whole models\n", *parts]) if parts else "", charts


# The guides with times


def jax_times(results: dict[str, Any]) -> str:
    """Return the table of ``jax_norms.py``: µs of normgrad and of the plain formula."""
    names = ("forward", "forward_xla", "step", "step_xla")
    titles = ["function", "shape", "dtype", *(f"{pass_}: {by}" for pass_ in names[::2] for by in ("normgrad", "XLA"))]
    rows = [
        [f"`{row['function']}`", size_of(row), row["dtype"], *(f"{1e6 * row[name]:,.0f}" for name in names)]
        for row in results["results"]
    ]
    return machine_line(results, "jax", end=", µs:") + "\n" + table(titles, rows, numbers=4)


def sync_batch_norm_times(results: dict[str, Any]) -> str:
    """Return the table of ``sync_batch_norm.py``: ms of a step, and what it exchanges."""
    names = ("batch_norm", "sync_batch_norm", "exchange")
    rows = [
        [size_of(row), row["dtype"], *(f"{1e3 * row[name]:.2f}" for name in names), f"{row['bytes']:,}"]
        for row in results["results"]
    ]
    titles = ["batch per process", "dtype", "BatchNorm", "SyncBatchNorm", "exchange", "bytes sent per step"]
    return machine_line(results, "torch", end=", ms:") + "\n" + table(titles, rows, numbers=4)


def guides() -> dict[Path, str]:
    """Return the guides with times."""
    times = {"jax": jax_times(stored("jax_norms")), "sync_batch_norm": sync_batch_norm_times(stored("sync_batch_norm"))}
    paths = {ROOT / "docs" / "guides" / f"{guide}.md": content for guide, content in times.items()}
    return {path: replaced(path.read_text(encoding="utf-8"), "times", content) for path, content in paths.items()}


def written() -> dict[Path, str]:
    """Return what every file should hold."""
    models = stored("model_calls_h200")
    section, charts = training_steps()
    speed = (EVIDENCE / "speed.md").read_text(encoding="utf-8")
    parts = (("models", norms_table(models)), ("operators", operators_table()), ("steps", section))
    for marker, content in parts:
        speed = replaced(speed, marker, content)
    files = {EVIDENCE / "speed.md": speed, EVIDENCE / "models.svg": norms_chart(models), **charts, **guides()}
    for name, make in (("cpu", cpu_page), ("gpu", gpu_page)):
        page = EVIDENCE / f"{name}.md"
        files[page], files[EVIDENCE / f"{name}.svg"] = make(page.read_text(encoding="utf-8"))
    for path, (text, link) in SENTENCES.items():
        files[path] = replaced(path.read_text(encoding="utf-8"), "models", norms_sentence(models, text, link))
    return files
