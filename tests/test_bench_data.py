"""The benchmark on patterns of values. Nothing here depends on speed."""

import csv
import io
import json
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from normgrad.bench import cases as bench_cases
from normgrad.bench import pattern_report, pattern_runner
from normgrad.bench.cases import CHANNELS_LAST, GATHER, PATTERN_SETS, QUICK_PATTERN_SETS, Case, Shapes, cases
from normgrad.bench.clock import rounds_of_blocks
from normgrad.bench.implementations.implementation import Role
from normgrad.bench.implementations.ours import Normgrad
from normgrad.bench.pattern_runner import CONTROL, PatternCase, PatternResult, run_patterns
from normgrad.bench.patterns import NORMAL, PATTERNS
from normgrad.bench.verification import Claim, verify
from normgrad.bench.workload import tensor_of, workload
from normgrad.cli import main
from normgrad.operators import OPERATORS
from normgrad.testing.host import on_host
from support.bench import LAYER_NORM, TINY, Altered

BACKWARD = {"layer_norm_backward", "group_norm_backward", "batch_norm_elemt_backward", "batch_norm_reduce_backward"}
GRADIENTS_ALONE = {"× 1e-3", "× 1e-6", "× 1e-9", "× 1e-12", "× 1e-16", "× 1e-20", "× 1e-30"}
# PyTorch's tensors without a GPU: what is generated on a device goes the same way.
pytestmark = pytest.mark.usefixtures("one_thread", "on_the_reference")

TENSORS = "cpu:0"


@pytest.fixture(params=["cpu", TENSORS])
def device(request):
    if request.param == TENSORS:
        pytest.importorskip("torch")
    return request.param


def patterns_of(operator):
    return [pattern for pattern in PATTERNS if tensor_of(pattern, operator) is not None]


# Patterns


def test_forward_operators_skip_what_concerns_gradients():
    for operator in OPERATORS:
        names = {pattern.name for pattern in patterns_of(operator)}
        assert (names >= GRADIENTS_ALONE) == (operator in BACKWARD)
        assert {"all zero", "99 % zeros", "× 1e4", "+ 100", "one NaN", "one Inf"} <= names
        if operator not in BACKWARD:
            tensors = {tensor_of(pattern, operator) for pattern in patterns_of(operator)}
            assert tensors == {"mean" if operator == GATHER else "input"}


SHAPED = [
    Case("layer_norm_backward", (6, 500), "float32"),
    Case("group_norm_backward", (4, 6, 20, 11), "bfloat16", CHANNELS_LAST, 3),
    Case("batch_norm_reduce_backward", (4, 6, 20, 11), "float16"),
    Case("batch_norm_elemt_backward", (4, 6, 20, 11), "float32", CHANNELS_LAST),
]


def rows_of(case, array):
    """One row of the matrix per set of elements that shares statistics."""
    if case.operator.startswith("layer"):
        return array
    if case.operator.startswith("group"):
        return array.reshape(case.shape[0] * case.group, -1)
    return np.moveaxis(array, 1, 0).reshape(case.shape[1], -1)


def changed(case, name, device, tensor=None):
    """The rows of the tensor that a pattern changes, and those of the same tensor in normal data; both float32."""
    (pattern,) = (p for p in PATTERNS if p.name == name and tensor in (None, tensor_of(p, case.operator)))
    where = tensor_of(pattern, case.operator)
    given = [workload(case, device=device, pattern=p).arguments[where] for p in (pattern, NORMAL)]
    return [rows_of(case, on_host(array).astype(np.float32)) for array in given]


@pytest.mark.parametrize("case", SHAPED, ids=str)
def test_patterns_are_what_their_names_say(case, device):
    for name in GRADIENTS_ALONE:
        data, normal = changed(case, name, device)
        smallest = {"float32": 1e-37, "bfloat16": 1e-37, "float16": 6e-8}[case.dtype]
        np.testing.assert_allclose(data, normal * float(name.removeprefix("× ")), rtol=1e-2, atol=smallest)
    assert not changed(case, "all zero", device)[0].any()

    data, normal = changed(case, "all rows zero but one", device)
    (row,) = np.flatnonzero(data.any(1))
    np.testing.assert_array_equal(data[row], normal[row])

    data, normal = changed(case, "every other row zero", device)
    np.testing.assert_array_equal(data[::2], normal[::2])
    assert not data[1::2].any()

    data, normal = changed(case, "99 % zeros", device)
    assert 0.98 < np.mean(data == 0) < 1
    np.testing.assert_array_equal(data[data != 0], normal[data != 0])

    data, normal = changed(case, "ReLU of normal", device)
    np.testing.assert_array_equal(data, np.maximum(normal, 0))
    assert not np.signbit(data).any()

    data, normal = changed(case, "rows scaled from 1 to 1e-12", device)
    scales = np.logspace(0, -12, len(data))[:, None]
    np.testing.assert_allclose(data, normal * scales, rtol=1e-2, atol=6e-8 if case.dtype == "float16" else 0)

    for name, function in (("× 1e-4", lambda x: x * 1e-4), ("× 1e4", lambda x: x * 1e4), ("+ 100", lambda x: x + 100)):
        data, normal = changed(case, name, device)
        np.testing.assert_allclose(data, function(normal), rtol=1e-2, atol=6e-8)

    data, normal = changed(case, "every other row constant", device)
    np.testing.assert_array_equal(data[::2], normal[::2])
    assert (data[1::2] == 1).all()

    data, normal = changed(case, "every 997th element 30000", device)
    assert np.count_nonzero(data != normal) == len(range(0, case.elements, 997))
    assert (np.abs(data[data != normal] - 3e4) < 100).all()

    for value in ("NaN", "Inf"):
        for tensor in ("grad_out", "input"):
            data, normal = changed(case, f"one {value}", device, tensor)
            odd = ~np.isfinite(data)
            assert odd.sum() == 1
            np.testing.assert_array_equal(data[~odd], normal[~odd])


def test_statistics_and_sums_are_those_of_the_changed_data(device):
    (pattern,) = (p for p in PATTERNS if p.name == "+ 100")
    case = SHAPED[3]
    arguments = workload(case, device=device, pattern=pattern).arguments
    x, dy = (rows_of(case, on_host(arguments[name])).astype(np.float64) for name in ("input", "grad_out"))
    np.testing.assert_allclose(on_host(arguments["mean"]), x.mean(1), rtol=1e-6)
    np.testing.assert_allclose(on_host(arguments["invstd"]), 1 / np.sqrt(x.var(1) + 1e-5), rtol=1e-6)
    np.testing.assert_allclose(on_host(arguments["sum_dy"]), dy.sum(1), rtol=1e-5)
    centred = x - on_host(arguments["mean"]).astype(np.float64)[:, None]
    np.testing.assert_allclose(on_host(arguments["sum_dy_xmu"]), (dy * centred).sum(1), rtol=1e-5)


@pytest.mark.parametrize("case", TINY, ids=str)
def test_results_on_every_pattern_are_verified(case, device):
    for pattern in (NORMAL, *patterns_of(case.operator)):
        work = workload(case, device=device, pattern=pattern)
        for implementation in Normgrad().prepare(work):
            for strict in (True, False):
                claim = Claim(implementation.results(), strict)
                verify(work, [claim])
                assert claim.verdict.problem == "", pattern.name


@pytest.mark.parametrize("strict", [True, False])
def test_finite_values_in_place_of_nan_are_wrong(strict):
    (pattern,) = (p for p in PATTERNS if (p.name, tensor_of(p, LAYER_NORM.operator)) == ("one NaN", "input"))
    work = workload(LAYER_NORM, pattern=pattern)
    implementation = next(iter(Normgrad().prepare(work)))
    for index, name in enumerate(work.operator.signature.output_names[:2]):
        results = [np.array(result) for result in implementation.results()]
        assert np.isnan(results[index]).any()
        results[index] = np.nan_to_num(results[index])
        claim = Claim(results, strict)
        verify(work, [claim])
        assert claim.verdict.problem.startswith(name)


@pytest.mark.parametrize("case", [case for case in TINY if case.operator != GATHER], ids=str)
@pytest.mark.parametrize("strict", [True, False])
def test_a_sample_has_the_middle_element_in_it(case, strict, monkeypatch):
    monkeypatch.setattr("normgrad.bench.verification.PART", 1)
    work = workload(case)
    implementation = next(iter(Normgrad().prepare(work)))
    right = Claim(implementation.results(), strict)
    verify(work, [right], sampled=True)
    assert right.verdict.problem == ""
    for index, name in enumerate(work.operator.signature.output_names):
        altered = [np.array(result) for result in implementation.results()]
        middle = altered[index]
        middle[tuple(size // 2 for size in middle.shape)] = 100.0
        claim = Claim(altered, strict)
        verify(work, [claim], sampled=True)
        assert claim.verdict.problem.startswith(name)


# Timing


def test_blocks_are_timed_in_turns():
    called = []
    runs = {name: (lambda name=name: called.append(name)) for name in "abcd"}
    blocks = [{name: runs[name] for name in names} for names in ("abc", "d")]
    times = rounds_of_blocks(blocks, 4, clock=lambda run, calls: run() or 0.5)
    assert times == {name: [0.5] * 4 for name in "abcd"}
    assert called == [*"abcd", *"dacb", *"cabd", *"dcba"]


def test_blocks_are_timed_on_the_host():
    times = rounds_of_blocks([{"a": lambda: None}, {"b": lambda: None}], 2)
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2}
    assert all(seconds > 0 for each in times.values() for seconds in each)


def test_a_ratio_is_the_median_of_the_rounds(monkeypatch):
    # Normal data takes 1 s and the pattern 3 s, in a first half of the rounds on a machine that is 10 times slower.
    def slow_at_first(blocks, rounds, clock):
        speed = [10.0, 10.0, 1.0, 1.0, 1.0]
        seconds = {"normal": 1.0, "ours": 3.0, "PyTorch": 6.0}
        return {key: [seconds[key[0]] * s for s in speed] for block in blocks for key in block}

    monkeypatch.setattr(pattern_runner, "rounds_of_blocks", slow_at_first)
    found = run_patterns(LAYER_NORM, "cpu", pattern_runner.libraries())
    for result in found.results:
        assert result.over_normal == 3.0
        assert result.seconds == 3.0
        if not found.skipped:
            assert (result.over_pytorch, result.pytorch_over_normal) == (0.5, 1.0)


# What is found


@pytest.mark.parametrize("case", TINY, ids=str)
def test_every_pattern_of_a_case_is_timed(case):
    found = run_patterns(case, "cpu", pattern_runner.libraries(), rounds=1)
    names = [result.pattern for result in found.results]
    expected = [f"{tensor_of(p, case.operator)}: {p.name}" for p in patterns_of(case.operator)]
    assert names == [NORMAL.name, CONTROL, *expected]
    assert [result.is_pattern for result in found.results] == [False, False, *[True] * len(expected)]
    for result in found.results:
        assert result.problem == ""
        assert min(result.seconds, result.normal_seconds, result.over_normal) > 0
        assert (result.pytorch_seconds is None) == ("PyTorch" in found.skipped or not _has_torch())


def _has_torch():
    return len(pattern_runner.libraries()) > 1


def test_tensors_on_a_device_are_timed_with_its_clock(monkeypatch):
    pytest.importorskip("torch")
    clocked = []

    def clock(run, calls):
        clocked.append(run())
        return 1e-3

    monkeypatch.setattr(pattern_runner, "device_clock", lambda: clock)
    found = run_patterns(LAYER_NORM, TENSORS, pattern_runner.libraries(), rounds=2)
    assert len(clocked) == 2 * 3 * len(found.results)
    for result in found.results:
        assert (result.problem, result.pytorch_problem) == ("", "")
        assert (result.seconds, result.over_normal, result.over_pytorch) == (1e-3, 1.0, 1.0)


def test_a_wrong_result_gets_no_time():
    def without_nan(results):
        results[0] = np.nan_to_num(results[0])

    found = run_patterns(LAYER_NORM, "cpu", [Altered(without_nan, Role.OURS)], rounds=1)
    wrong = {result.pattern for result in found.results if result.problem}
    assert {"grad_out: one NaN", "input: one NaN"} <= wrong
    assert NORMAL.name not in wrong
    for result in found.results:
        assert (result.seconds is None) == (result.over_normal is None) == (result.pattern in wrong)


def test_nothing_is_timed_where_normal_data_gives_a_wrong_result():
    def doubled(results):
        results[0] *= 2

    found = run_patterns(LAYER_NORM, "cpu", [Altered(doubled, Role.OURS)], rounds=1)
    assert found.results[0].problem
    assert all(result.seconds is None and result.over_normal is None for result in found.results)


def test_a_peer_that_deviates_on_a_pattern_is_timed_and_named():
    def zeroed(results):
        if not np.isfinite(results[0]).all():
            results[0] = np.zeros_like(results[0])

    found = run_patterns(LAYER_NORM, "cpu", [Normgrad(), Altered(zeroed)], rounds=1)
    by_name = {result.pattern: result for result in found.results}
    assert by_name["grad_out: one NaN"].pytorch_problem
    assert by_name["grad_out: one NaN"].pytorch_seconds > 0
    assert not by_name["grad_out: × 1e-3"].pytorch_problem

    def doubled(results):
        results[0] *= 2

    found = run_patterns(LAYER_NORM, "cpu", [Normgrad(), Altered(doubled)], rounds=1)
    assert all(result.pytorch_seconds is None and result.seconds > 0 for result in found.results)


def _result(pattern, over_normal, over_pytorch, operator="layer_norm_backward", **more):
    case = Case(operator, (5, 7), "float32")
    return PatternResult(case, pattern, over_normal, 1.0, 2.0, over_normal, over_pytorch, 1.0, 0.5, **more)


def shown(results, device="cpu", subnormal_cost=None):
    console = Console(width=80, record=True, file=io.StringIO())
    by_case = {}
    for result in results:
        by_case.setdefault(result.case, []).append(result)
    found = [PatternCase(case, group, {}) for case, group in by_case.items()]
    pattern_report.show(console, found, device, subnormal_cost or {})
    return console.export_text()


def test_the_report_names_the_worst_first():
    text = shown(
        [
            _result("normal", 1.0, 0.4),
            _result(CONTROL, 1.02, 0.4),
            _result("grad_out: all zero", 1.5, 0.7),
            _result("grad_out: × 1e-30", 2.25, 0.9),
            _result("input: + 100", 1.75, 1.3, "layer_norm"),
        ],
        subnormal_cost={"in the cache": 1.75},
    )
    lines = text.splitlines()
    assert lines[0] == (
        "Worst: layer_norm_backward 5×7 float32, grad_out: × 1e-30: 2.25 of the time on normal data, 0.90 of PyTorch's."
    )
    assert lines[1] == "3 of 3 measurements take more than 1.25 of the time on normal data."
    assert "1 of 3 take longer than PyTorch; worst: layer_norm 5×7 float32, input: + 100: 1.30 of its time." in text
    patterns = ["grad_out: × 1e-30", "input: + 100", "grad_out: all zero"]
    table = text[text.index("The worst ten") : text.index("The worst pattern")]
    assert [table.index(name) for name in patterns] == sorted(table.index(name) for name in patterns)
    summary = text[text.index("The worst pattern") : text.index("Control")]
    assert [name in summary for name in patterns] == [True, True, False]
    assert "normal data against other normal data: 1.02 to 1.02" in text
    assert "a plain multiply-add in the cache: subnormal operands take 1.75 of the time" in " ".join(text.split())


def test_the_report_says_what_is_wrong():
    text = shown([_result("normal", 1.0, None), _result("input: one NaN", None, None, problem="grad_input: all wrong")])
    assert "WRONG: layer_norm_backward 5×7 float32, input: one NaN: grad_input: all wrong" in text


# The command


TINY_SHAPES = Shapes([(5, 7)], [((3, 4, 2, 3), 2)], [(3, 4, 2, 3)], [(3, 4)], True, True, dtypes=("float32",))


def test_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(QUICK_PATTERN_SETS, "cpu", TINY_SHAPES)
    monkeypatch.setattr("normgrad.cli.bench._QUICK_ROUNDS", 1)
    monkeypatch.setattr("normgrad.cli.bench._SUBNORMAL_BUDGET", 1e-3)
    paths = {suffix: tmp_path / f"b.{suffix}" for suffix in ("csv", "json")}
    files = [text for suffix, path in paths.items() for text in (f"--{suffix}", str(path))]
    assert main(["bench", "--data", "--quick", *files]) == 0
    out = capsys.readouterr().out
    assert out.index("Worst: ") < out.index("The worst ten") < out.index("Control, ")
    content = json.loads(paths["json"].read_text(encoding="utf-8"))
    assert {"machine", "results", "skipped", "subnormal_cost"} == set(content)
    assert set(content["subnormal_cost"]) == {"in the cache", "from memory"}
    expected = {
        (case.operator, case.dtype, case.layout, name)
        for case in cases(TINY_SHAPES)
        for name in (
            *(NORMAL.name, CONTROL),
            *(f"{tensor_of(p, case.operator)}: {p.name}" for p in patterns_of(case.operator)),
        )
    }
    found = [(row["operator"], row["dtype"], row["layout"], row["pattern"]) for row in content["results"]]
    assert set(found) == expected
    assert len(found) == len(expected)
    assert {row["operator"] for row in content["results"]} == set(OPERATORS)
    with paths["csv"].open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(found)
    assert all(float(row["time_over_normal"]) > 0 and row["problem"] == "" for row in rows)


def test_command_fails_where_ours_is_wrong(capsys, monkeypatch):
    def without_inf(results):
        results[0] = np.where(np.isfinite(results[0]), results[0], 0)

    monkeypatch.setitem(QUICK_PATTERN_SETS, "cpu", TINY_SHAPES)
    monkeypatch.setattr(pattern_runner, "libraries", lambda: [Altered(without_inf, Role.OURS)])
    assert main(["bench", "--data", "--quick", "--operators", "layer_norm", "--dtypes", "float32"]) == 1
    assert "WRONG: layer_norm 5×7 float32, input: one Inf: output: " in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--grid"], ["--compile"], ["--startup"], ["--budget", "1"]])
def test_command_refuses_what_has_no_meaning(capsys, option):
    assert main(["bench", "--data", *option]) == 2
    assert f"{option[0]} has no meaning with --data" in capsys.readouterr().err


@pytest.mark.parametrize("sets", [PATTERN_SETS, QUICK_PATTERN_SETS])
def test_the_sets_have_every_operator_dtype_and_memory_format(sets):
    for shapes in sets.values():
        every = list(cases(shapes))
        assert {case.operator for case in every} == set(OPERATORS)
        for operator in set(OPERATORS) - {GATHER}:
            own = {(case.dtype, case.layout) for case in every if case.operator == operator}
            layouts = ["contiguous"] if operator.startswith("layer") else ["contiguous", CHANNELS_LAST]
            assert own == {(dtype, layout) for dtype in shapes.dtypes for layout in layouts}
    assert PATTERN_SETS["cpu"].dtypes == bench_cases.DTYPES


def test_patterns_on_a_gpu_need_no_numba_of_the_benchmark():
    program = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from normgrad import cli
from normgrad.bench import machine, pattern_report, pattern_runner, results, subnormals
print(len(pattern_runner.libraries()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 1
