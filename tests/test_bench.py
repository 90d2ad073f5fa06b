"""The benchmark: its cases, its verification, its clock, its tables and its files. Nothing here depends on speed."""

import csv
import json
import math
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from normgrad.bench import memory, overhead, plot, results, runner, startup
from normgrad.bench.cases import (
    CHANNELS_LAST,
    DTYPES,
    GATHER,
    SETS,
    TARGETS,
    Case,
    cases,
    selected,
)
from normgrad.bench.clock import Timing, measure
from normgrad.bench.contenders import streaming
from normgrad.bench.contenders.contender import Contender, Role, Unavailable
from normgrad.bench.contenders.ours import CALL, PLAN, Normgrad
from normgrad.bench.results import CaseResult, Measurement
from normgrad.bench.verification import Claim, verify
from normgrad.bench.workload import TRAFFIC, workload
from normgrad.cli import main
from normgrad.operators import OPERATORS

TINY = [
    Case("layer_norm_backward", (5, 7), "float32"),
    Case("group_norm_backward", (3, 4, 2, 3), "float16", CHANNELS_LAST, 2),
    Case("batch_norm_elemt_backward", (3, 4, 5), "bfloat16"),
    Case("layer_norm", (5, 7), "bfloat16"),
    Case("group_norm", (3, 4, 2, 3), "float32", group=2),
    Case("batch_norm_stats", (3, 4, 2, 3), "float16", CHANNELS_LAST),
    Case("batch_norm_elemt", (3, 4), "float32"),
    Case("batch_norm_reduce_backward", (3, 4, 2, 3), "bfloat16"),
    Case(GATHER, (3, 4), "float32"),
]
LAYER_NORM = TINY[0]
QUICKLY = runner.Settings(budget=1e-3)


@pytest.fixture(autouse=True)
def on_the_reference(monkeypatch):
    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    monkeypatch.setenv("COLUMNS", "80")


class Altered:
    """A contender whose results are the right ones with a change."""

    name = "altered"

    def __init__(self, change, role=Role.PEER):
        self.change, self.role = change, role

    def prepare(self, work):
        own = next(iter(Normgrad().prepare(work)))

        def altered():
            made = [np.array(result) for result in own.results()]
            self.change(made)
            return made

        yield Contender(self.name, self.role, own.run, altered)


# Cases


def test_the_sets_hold_what_the_targets_are_about():
    default = list(cases(SETS["default"]))
    for operator in TARGETS:
        own = selected(default, [operator])
        assert {case.dtype for case in own} == set(DTYPES)
        assert sum(not case.is_small for case in own) >= 3 * 3
    shapes = {case.shape for case in selected(default, ["layer_norm_backward"])}
    assert {(8192, 1024), (4096, 4096), (65536, 256), (1024, 16384), (64, 262144)} <= shapes
    assert {case.layout for case in selected(default, ["group_norm_backward"])} == {"contiguous", CHANNELS_LAST}


def test_the_grid_goes_from_four_elements_to_256_megabytes():
    grid = list(cases(SETS["grid"]))
    assert {case.operator for case in grid} == set(OPERATORS)
    for operator in set(OPERATORS) - {GATHER}:
        sizes = [case.nbytes for case in selected(grid, [operator], ["float32"])]
        assert (min(sizes), max(sizes)) == (16, 256 << 20)
    assert len(set(grid)) == len(grid)


def test_selection():
    grid = list(cases(SETS["grid"]))
    chosen = selected(grid, ["group_norm"], ["float16"], [CHANNELS_LAST], 10_000)
    assert chosen
    for case in chosen:
        assert (case.operator, case.dtype, case.layout) == ("group_norm", "float16", CHANNELS_LAST)
        assert case.nbytes <= 10_000


@pytest.mark.parametrize("case", TINY, ids=str)
def test_data_lies_in_the_order_of_the_layout(case):
    work = workload(case)
    data = work.arguments["input"]
    if case.layout == CHANNELS_LAST:
        assert np.moveaxis(data, 1, -1).flags.c_contiguous
    else:
        assert data.flags.c_contiguous
    assert all(np.isnan(output).all() for output in work.outputs())


def test_every_operator_has_a_case_and_its_traffic():
    assert {case.operator for case in TINY} == set(OPERATORS) == set(TRAFFIC)


# Verification


@pytest.mark.parametrize("case", TINY, ids=str)
@pytest.mark.parametrize("part", [1 << 17, 8])
def test_right_results_are_taken_in_one_part_or_several(case, part, monkeypatch):
    monkeypatch.setattr("normgrad.bench.verification.PART", part)
    work = workload(case)
    for contender in Normgrad().prepare(work):
        for strict in (True, False):
            claim = Claim(contender.results(), strict)
            verify(work, [claim])
            assert claim.verdict.problem == ""
            assert 0 <= claim.verdict.worst <= 1


@pytest.mark.parametrize("case", TINY, ids=str)
@pytest.mark.parametrize("strict", [True, False])
def test_every_output_is_looked_at_to_its_last_element(case, strict, monkeypatch):
    monkeypatch.setattr("normgrad.bench.verification.PART", 8)
    work = workload(case)
    contender = next(iter(Normgrad().prepare(work)))
    for position, name in enumerate(work.operator.signature.output_names):
        for wrong_value in (np.nan, 100.0):
            altered = [np.array(result) for result in contender.results()]
            altered[position][(-1,) * altered[position].ndim] = wrong_value
            claim = Claim(altered, strict)
            verify(work, [claim])
            assert claim.verdict.problem.startswith(name)
            assert not claim.verdict.worst <= 1


def test_ours_is_judged_by_the_bound_and_others_loosely():
    def slightly_off(made):
        made[0] *= np.float32(1 + 1e-5)

    for role, wrong in ((Role.OURS, True), (Role.PEER, False)):
        result = runner.run_case(LAYER_NORM, [Altered(slightly_off, role)], QUICKLY)
        assert bool(result.measurements[0].problem) is wrong


def test_wrong_results_get_no_time_and_no_place():
    def transposed(made):
        made[0] = made[0][::-1]

    result = runner.run_case(LAYER_NORM, [Normgrad(), Altered(transposed)], QUICKLY)
    wrong = result.measurements[-1]
    assert wrong.problem
    assert wrong.timing is None
    assert result.fastest(Role.PEER) is None
    assert results.wrong([result]) == [(LAYER_NORM, wrong)]
    assert result.ours.timing is not None


def test_a_wrong_shape_is_wrong():
    work = workload(LAYER_NORM)
    for strict in (True, False):
        made = list(next(iter(Normgrad().prepare(work))).results())
        made[1] = made[1][:-1]
        claim = Claim(made, strict)
        verify(work, [claim])
        assert "the shape is (6,), and must be (7,)" in claim.verdict.problem


# Contenders


@pytest.mark.parametrize("case", TINY, ids=str)
def test_other_libraries_compute_the_same(case):
    contending = runner.libraries(runner.Settings())
    result = runner.run_case(case, contending, QUICKLY)
    assert [m.problem for m in result.measurements] == [""] * len(result.measurements)
    assert all(m.timing.median > 0 for m in result.measurements)
    names = [m.contender for m in result.measurements]
    assert names[:2] == [PLAN, CALL]
    assert "Numba stream" in names
    assert result.of(Role.PEER) or result.skipped


@pytest.mark.parametrize("operator", TRAFFIC)
@pytest.mark.parametrize("threads", [1, 2])
def test_streams_touch_every_word(operator, threads, monkeypatch):
    monkeypatch.setattr("normgrad.bench.contenders.streaming.get_num_threads", lambda: threads)
    traffic = TRAFFIC[operator]
    words = 3 * (1 << 15) + 5
    arrays = [np.arange(words, dtype=np.uint64) for _ in range(traffic.reads)]
    written = [np.zeros(words, np.uint64) for _ in range(traffic.writes)]
    counters = np.zeros(3, np.uint64)
    kernel = streaming._KERNELS[traffic]
    kernel(counters, *arrays, *written)
    assert int(counters[1]) == 4
    if written:
        assert (written[0] == sum(arrays)).all()
    elif traffic.reads == 1:
        assert int(counters[2]) == words * (words - 1) // 2
    for array in written:
        array[:] = 0
    streaming.on_threads(kernel, arrays + written)
    assert all((array == sum(arrays)).all() for array in written)


def test_a_library_that_cannot_is_left_out_with_its_reason():
    class Absent:
        name = "absent"

        def prepare(self, work):
            raise Unavailable("it has no such thing")

    result = runner.run_case(LAYER_NORM, [Normgrad(), Absent()], QUICKLY)
    assert result.skipped == {"absent": "it has no such thing"}


def test_the_plain_call_is_measured_on_small_data_alone(monkeypatch):
    monkeypatch.setattr("normgrad.bench.cases.SMALL", 10)
    assert [c.name for c in Normgrad().prepare(workload(LAYER_NORM))] == [PLAN]


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
    assert summary.reached is False
    (summary,) = results.summaries([_result(_large(1), 1.0, 2.5, 0.95)])
    assert summary.reached is True


def test_speeds_against_peers_take_our_slowest_way():
    result = _result(LAYER_NORM, 1.0, 2.0, 1.0)
    call = Measurement("normgrad call", Role.OURS, Timing(4.0, 4.0, 5, 1), 0.1)
    both = CaseResult(result.case, [*result.measurements, call])
    assert results.speeds_against_peers([both]) == {"PyTorch": [(0.5, both)]}


# Files


def test_csv(tmp_path):
    made = [runner.run_case(case, [Normgrad(), streaming.Streaming()], QUICKLY) for case in TINY]
    results.write_csv(tmp_path / "b.csv", made)
    with (tmp_path / "b.csv").open(newline="", encoding="utf-8") as stream:
        read = list(csv.DictReader(stream))
    assert len(read) == sum(len(result.measurements) for result in made)
    for row in read:
        assert float(row["seconds"]) > 0
        assert (row["error_of_bound"] == "") == (row["role"] == "limit")
        assert float(row["of_limit"]) > 0


def test_json_holds_what_is_not_finite_as_text(tmp_path):
    wrong = CaseResult(LAYER_NORM, [Measurement("normgrad", Role.OURS, None, math.inf, "wrong")], {"JAX": "absent"})
    results.write_json(tmp_path / "b.json", {"cores": 2}, [wrong], overhead=[])
    content = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    assert content["machine"] == {"cores": 2}
    assert content["results"][0]["error_of_bound"] == "inf"
    assert content["results"][0]["seconds"] is None
    assert content["skipped"][0]["contender"] == "JAX"


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


# The command


SMALLEST = ("bench", "--grid", "--largest", "0.00005", "--budget", "0.001", "--dtypes", "float32", "--layouts")


def test_command(capsys, tmp_path):
    paths = {kind: tmp_path / f"b.{kind}" for kind in ("csv", "json")}
    files = [text for kind, path in paths.items() for text in (f"--{kind}", str(path))]
    assert main([*SMALLEST, "contiguous", *files]) == 0
    out = capsys.readouterr().out
    for text in ("backend reference", "layer_norm_backward", "A whole call on small data", "Largest error: "):
        assert text in out
    assert "\x1b" not in out
    content = json.loads(paths["json"].read_text(encoding="utf-8"))
    assert {"date", "processor", "cores", "threads", "versions", "backend"} <= set(content["machine"])
    assert {row["operator"] for row in content["results"]} >= {"layer_norm_backward", "batch_norm_stats"}
    assert content["overhead"][0]["seconds"]["plan.run"] > 0
    assert len(paths["csv"].read_text(encoding="utf-8").splitlines()) == len(content["results"]) + 1


def test_command_with_neither_pytorch_nor_jax(capsys, monkeypatch):
    for module in ("runner", "overhead"):
        monkeypatch.setattr(f"normgrad.bench.{module}.find_spec", lambda name: None)
    monkeypatch.setattr("normgrad.cli.bench.find_spec", lambda name: None)
    assert main([*SMALLEST, "contiguous", "--operators", "layer_norm_backward"]) == 0
    out = capsys.readouterr().out
    assert "layer_norm_backward" in out
    assert "Slower than" not in out


def test_command_fails_where_ours_is_wrong(capsys, monkeypatch):
    def scaled(made):
        made[0] *= 2

    monkeypatch.setattr(runner, "libraries", lambda settings: [Altered(scaled, Role.OURS)])
    assert main([*SMALLEST, "contiguous", "--operators", "layer_norm"]) == 1
    assert "WRONG: altered, layer_norm 2×2 float32: output: " in capsys.readouterr().out


def test_what_was_measured_before_an_interruption_is_written(capsys, monkeypatch, tmp_path):
    right = runner.run_case
    done = []

    def interrupted(case, *rest):
        if done:
            raise KeyboardInterrupt
        done.append(case)
        return right(case, *rest)

    monkeypatch.setattr(runner, "run_case", interrupted)
    assert main([*SMALLEST, "contiguous", "--csv", str(tmp_path / "b.csv")]) == 130
    assert done[0].operator in (tmp_path / "b.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--operators", "fly"), "invalid choice: 'fly'"),
        (("--grid", "--quick"), "not allowed with argument"),
        (("--largest", "0"), "0 is not above 0"),
        (("--quick", "--largest", "0.001"), "nothing is left to measure"),
        (("--csv", "no_such_folder/b.csv"), "no_such_folder/b.csv: cannot be written"),
        (("--plot", "b.txt"), "must end in .png, .svg, .pdf"),
        (("--threads", "0"), "must be a whole number of at least 1"),
    ],
)
def test_command_refuses(capsys, argv, text):
    if "--plot" in argv:
        pytest.importorskip("matplotlib")
    assert main(["bench", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("normgrad: ")
    assert err.count("\n") == 1
    assert text in err


def test_overhead():
    found = list(overhead.overheads(1e-3))
    assert [each.case.shape for each in found] == [(2, 2), (128, 768)]
    assert all(seconds > 0 for each in found for seconds in each.seconds.values())


def test_startup():
    found = startup.measure_startup("layer_norm", "bfloat16")
    assert found.first_import > 0
    assert found.cached_total == found.cached_import + found.cached_call
    assert startup.record([found])[0]["dtype"] == "bfloat16"


def test_the_package_does_not_load_the_benchmark():
    program = "import sys, normgrad; print(*(name for name in sys.modules if name.startswith('normgrad.bench')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
