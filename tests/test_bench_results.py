"""The benchmark: its clock, what follows from its times, and its files. Nothing here depends on speed."""

import csv
import io
import json
import math
from functools import partial

import numpy as np
import pytest
from rich.console import Console

from normgrad.bench import memory, plot, report, results, runner
from normgrad.bench.cases import (
    Case,
)
from normgrad.bench.clock import Timing, measure
from normgrad.bench.implementations import streaming
from normgrad.bench.implementations.implementation import Role
from normgrad.bench.implementations.ours import CALL, NUMPY_CALL, Normgrad
from normgrad.bench.results import CaseResult, Measurement
from support.bench import LAYER_NORM, QUICKLY, TINY

pytestmark = pytest.mark.usefixtures("on_the_reference")


# The clock and the memory


def test_everyone_is_called_in_every_round():
    called = {"a": 0, "b": 0, "c": 0}

    def count(name):
        called[name] += 1

    timings = measure({name: partial(count, name) for name in called}, 1e-3, lambda run, calls: run() or 1e-3)
    assert set(timings) == set(called)
    assert len(set(called.values())) == 1
    assert all(timing.rounds >= 5 for timing in timings.values())


def test_the_median_is_of_the_rounds():
    times = iter([1.0, 5.0, 1.0, 3.0, 2.0, 4.0])
    timings = measure({"a": lambda: None}, 1e-9, lambda run, calls: next(times))
    assert timings == {"a": Timing(3.0, 1.0, 5, 1)}


def test_short_calls_are_timed_together():
    timings = measure({"a": lambda: None}, 1e-9, lambda run, calls: 1e-6, batch=1e-3)
    assert timings["a"].calls == 1000


def test_growth_sees_a_temporary_array():
    if memory.peak_growth(lambda: None) is None:
        pytest.skip("this system does not tell")
    size = 64 << 20
    assert memory.peak_growth(lambda: np.ones(size, np.uint8).sum()) > size // 2


# What follows


def _result(case, ours, peer, limit):
    def measured(name, role, seconds):
        return Measurement(name, role, Timing(seconds, seconds, 5, 1), 0.5)

    roles = {Role.OURS: ("normgrad", ours), Role.PEER: ("PyTorch", peer), Role.LIMIT: ("stream", limit)}
    return CaseResult(case, [measured(name, role, seconds) for role, (name, seconds) in roles.items()])


def _large(rows):
    return Case("layer_norm_backward", (rows, 1 << 20), "float32")


def test_ratios():
    result = _result(_large(1), 2.0, 3.0, 1.0)
    assert result.of_limit(result.ours) == 0.5
    assert result.of_peer(result.ours) == 1.5


def test_the_worst_comes_first():
    made = [_result(_large(rows), seconds, 9.0, 1.0) for rows, seconds in ((1, 1.1), (2, 2.0), (3, 1.5))]
    wrong = CaseResult(_large(4), [Measurement("normgrad", Role.OURS, None, math.inf, "grad_input: all wrong")])
    order = [result.case.shape[0] for result in results.worst_first([*made, wrong])]
    assert order == [4, 2, 3, 1]


def test_summaries():
    (summary,) = results.summaries([_result(_large(1), 1.25, 2.5, 1.0), _result(_large(2), 1.0, 0.5, 1.0)])
    assert summary.cases == 2
    assert summary.worst_of_limit == 0.8
    assert summary.mean_of_limit == pytest.approx(math.sqrt(0.8))
    assert summary.mean_of_peer == pytest.approx(1.0)
    assert summary.largest_error == 0.5


def _with_calls(**seconds):
    result = _result(LAYER_NORM, 1.0, 2.0, 1.0)
    names = {"tensors": CALL, "numpy": NUMPY_CALL}
    calls = [Measurement(names[kind], Role.OURS, Timing(time, time, 5, 1), 0.1) for kind, time in seconds.items()]
    return CaseResult(result.case, [*result.measurements, *calls])


def test_speeds_against_peers_take_our_slowest_way():
    both = _with_calls(tensors=4.0)
    assert results.speeds_against_peers([both]) == {"PyTorch": [(0.5, both)]}
    assert results.numpy_speeds_against_peers([both]) == {}


def test_a_call_with_numpy_arrays_counts_where_there_is_none_with_tensors():
    every = _with_calls(tensors=4.0, numpy=8.0)
    assert results.speeds_against_peers([every]) == {"PyTorch": [(0.5, every)]}
    assert results.numpy_speeds_against_peers([every]) == {"PyTorch": [(0.25, every)]}
    alone = _with_calls(numpy=8.0)
    assert results.speeds_against_peers([alone]) == {"PyTorch": [(0.25, alone)]}
    assert results.numpy_speeds_against_peers([alone]) == {}


def test_the_report_says_how_calls_with_numpy_arrays_compare():
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(console, [_with_calls(tensors=1.0, numpy=8.0)])
    text = console.export_text()
    assert "Slower than PyTorch in 0 of 1 cases." in text
    assert "Called with NumPy arrays, which does not count: in 1 of 1 cases." in text
    assert "call, NumPy" in text


# Files


def test_csv(tmp_path):
    made = [runner.run_case(case, [Normgrad(), streaming.Streaming()], QUICKLY) for case in TINY]
    results.write_csv(tmp_path / "b.csv", results.rows(made))
    with (tmp_path / "b.csv").open(newline="", encoding="utf-8") as stream:
        read = list(csv.DictReader(stream))
    assert len(read) == sum(len(result.measurements) for result in made)
    for row in read:
        assert float(row["seconds"]) > 0
        assert (row["error_of_bound"] == "") == (row["role"] == "limit")
        assert float(row["of_limit"]) > 0


def test_json_holds_what_is_not_finite_as_text(tmp_path):
    wrong = CaseResult(LAYER_NORM, [Measurement("normgrad", Role.OURS, None, math.inf, "wrong")], {"JAX": "absent"})
    results.write_json(tmp_path / "b.json", {"cores": 2}, results.rows([wrong]), skipped=results.skipped([wrong]))
    content = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    assert content["machine"] == {"cores": 2}
    assert content["results"][0]["error_of_bound"] == "inf"
    assert content["results"][0]["seconds"] is None
    assert content["skipped"][0]["implementation"] == "JAX"


def test_lines_of_the_plot_take_the_mean_of_equal_sizes():
    made = [_result(_large(1), 2.0, 4.0, 1.0), _result(_large(1), 8.0, 4.0, 1.0), _result(_large(2), 2.0, 4.0, 1.0)]
    lines = plot.lines(made, "layer_norm_backward", "float32")
    assert lines["normgrad"] == [(4 << 20, pytest.approx(0.25)), (8 << 20, 0.5)]
    assert set(lines) == {"normgrad", "PyTorch"}


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    made = [_result(_large(1), 2.0, 4.0, 1.0), _result(_large(2), 2.0, 4.0, 1.0)]
    plot.draw(tmp_path / "b.png", made, "a title")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_title_and_legend_of_a_single_panel_are_inside_the_plot(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    title = "normgrad 0.1.0, backend cpu, 16 threads, AMD EPYC 9654 96-Core Processor, PyTorch 2.13.0+cpu, 2026-11-16"
    plot.draw(tmp_path / "b.png", [_result(_large(1), 2.0, 4.0, 1.0)], title)
    figure = pyplot.gcf()
    renderer = figure.canvas.get_renderer()
    for part in (figure.legends[0], figure._suptitle):
        box = part.get_window_extent(renderer)
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1
        assert 0 <= box.y0 <= box.y1 <= figure.bbox.y1
