"""The benchmark: its cases, its verification and its implementations. Nothing here depends on speed."""

import numpy as np
import pytest

from normgrad.bench import results, runner
from normgrad.bench.cases import (
    BATCH_NORM,
    CHANNELS_LAST,
    DTYPES,
    GATHER,
    SETS,
    cases,
    selected,
)
from normgrad.bench.implementations import streaming
from normgrad.bench.implementations.gpu import Published
from normgrad.bench.implementations.implementation import Implementation, Role, Unavailable
from normgrad.bench.implementations.ours import CALL, NUMPY_CALL, PLAN, Normgrad
from normgrad.bench.implementations.pytorch import CompiledPyTorch, PyTorch
from normgrad.bench.verification import Claim, verify
from normgrad.bench.workload import TRAFFIC, workload
from normgrad.operators import OPERATORS
from support.bench import LAYER_NORM, QUICKLY, TINY, Altered

pytestmark = pytest.mark.usefixtures("one_thread", "on_the_reference")


# Cases


def test_the_default_sizes_are_those_of_models():
    default = list(cases(SETS["cpu"]["default"]))
    for operator in ("layer_norm_backward", "group_norm_backward", *BATCH_NORM):
        own = selected(default, [operator])
        assert {case.dtype for case in own} == set(DTYPES)
        assert sum(not case.is_small for case in own) >= 3 * 3
    shapes = {case.shape for case in selected(default, ["layer_norm_backward"])}
    assert {(8192, 1024), (4096, 4096), (65536, 256), (1024, 16384), (64, 262144)} <= shapes
    assert {case.layout for case in selected(default, ["group_norm_backward"])} == {"contiguous", CHANNELS_LAST}


def test_the_grid_goes_from_four_elements_to_256_megabytes():
    grid = list(cases(SETS["cpu"]["grid"]))
    assert {case.operator for case in grid} == set(OPERATORS)
    for operator in set(OPERATORS) - {GATHER}:
        sizes = [case.nbytes for case in selected(grid, [operator], ["float32"])]
        assert (min(sizes), max(sizes)) == (16, 256 << 20)
    assert len(set(grid)) == len(grid)


def test_selection():
    grid = list(cases(SETS["cpu"]["grid"]))
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
    for implementation in Normgrad().prepare(work):
        for strict in (True, False):
            claim = Claim(implementation.results(), strict)
            verify(work, [claim])
            assert claim.verdict.problem == ""
            assert 0 <= claim.verdict.worst <= 1


@pytest.mark.parametrize("case", TINY, ids=str)
@pytest.mark.parametrize("strict", [True, False])
def test_every_output_is_looked_at_to_its_last_element(case, strict, monkeypatch):
    monkeypatch.setattr("normgrad.bench.verification.PART", 8)
    work = workload(case)
    implementation = next(iter(Normgrad().prepare(work)))
    for position, name in enumerate(work.operator.signature.output_names):
        for wrong_value in (np.nan, 100.0):
            altered = [np.array(result) for result in implementation.results()]
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


# Implementations


@pytest.mark.parametrize("case", TINY, ids=str)
def test_other_libraries_compute_the_same(case):
    libraries = runner.libraries(runner.Settings())
    result = runner.run_case(case, libraries, QUICKLY)
    assert [m.problem for m in result.measurements] == [""] * len(result.measurements)
    assert all(m.timing.median > 0 for m in result.measurements)
    names = [m.implementation for m in result.measurements]
    assert names[:3] == [PLAN, CALL, NUMPY_CALL]
    assert "Numba stream" in names
    assert result.of(Role.PEER) or result.skipped


@pytest.mark.parametrize("operator", TRAFFIC)
@pytest.mark.parametrize("threads", [1, 2])
def test_streams_touch_every_word(operator, threads, monkeypatch):
    monkeypatch.setattr("normgrad.bench.implementations.streaming.get_num_threads", lambda: threads)
    traffic = TRAFFIC[operator]
    words = 3 * (1 << 15) + 5
    arrays = [np.arange(words, dtype=np.uint64) * (1 + number) for number in range(traffic.reads)]
    written = [np.zeros(words, np.uint64) for _ in range(traffic.writes)]
    total = streaming.Stream(traffic, arrays + written)()
    if written:
        assert (written[0] == sum(arrays)).all()
    elif traffic.reads == 1:
        assert total == words * (words - 1) // 2
    else:
        assert total == sum(int(a) ^ int(b) for a, b in zip(*arrays, strict=True))


def test_torch_compile_takes_part_where_it_is_to():
    pytest.importorskip("torch")
    library = CompiledPyTorch(cases=frozenset())
    with pytest.raises(Unavailable, match="only in the cases chosen"):
        list(library.prepare(workload(LAYER_NORM)))


def test_a_library_that_cannot_is_left_out_with_its_reason():
    class Absent:
        name = "absent"

        def prepare(self, work):
            raise Unavailable("it has no such thing")

    result = runner.run_case(LAYER_NORM, [Normgrad(), Absent()], QUICKLY)
    assert result.skipped == {"absent": "it has no such thing"}


def _fail():
    raise AssertionError("rows too long")


@pytest.mark.parametrize("fails_at_once", [False, True])
def test_a_peer_that_fails_is_left_out_with_what_it_said(fails_at_once):
    class Failing:
        name = "failing"

        def prepare(self, work):
            yield _fail() if fails_at_once else Implementation("failing", Role.PEER, _fail, _fail)

    result = runner.run_case(LAYER_NORM, [Normgrad(), Failing()], QUICKLY)
    assert result.skipped == {"failing": "AssertionError: rows too long"}
    assert {m.implementation for m in result.measurements} == {PLAN, CALL, NUMPY_CALL}


def test_an_error_of_our_own_is_raised(monkeypatch):
    monkeypatch.setattr(Normgrad, "prepare", lambda self, work: _fail())
    with pytest.raises(AssertionError, match="rows too long"):
        runner.run_case(LAYER_NORM, [Normgrad()], QUICKLY)


def test_without_pytorch_the_call_is_one_with_numpy_arrays(monkeypatch):
    monkeypatch.setattr("normgrad.bench.implementations.ours.find_spec", lambda name: None)
    assert [c.name for c in Normgrad().prepare(workload(LAYER_NORM))] == [PLAN, NUMPY_CALL]


def test_the_plain_call_is_measured_on_small_data_alone(monkeypatch):
    monkeypatch.setattr("normgrad.bench.cases.SMALL", 10)
    assert [c.name for c in Normgrad().prepare(workload(LAYER_NORM))] == [PLAN]


# On a GPU, for which tensors of the CPU stand in

TENSORS = "cpu:0"


def gradients(name, arguments):
    return OPERATORS[name](*(arguments[parameter] for parameter in OPERATORS[name].names if parameter in arguments))


@pytest.fixture
def clocks(monkeypatch):
    """Clocks that show the same for every call."""
    pytest.importorskip("torch")

    def showing(seconds):
        return lambda run, calls: (run(), seconds)[1]

    monkeypatch.setattr(runner, "host_clock", showing(2e-6))
    monkeypatch.setattr(runner, "captured", lambda run, calls: run)
    monkeypatch.setattr(runner, "device_clock", lambda cold=True: showing(5e-6 if cold else 3e-5))


def test_a_case_on_a_gpu(clocks):
    libraries = [Normgrad(), streaming.DeviceCopy(), PyTorch(), Published("Liger", gradients)]
    settings = runner.Settings(TENSORS, 1e-3, graph=True)
    found = {m.implementation: m for m in runner.run_case(LAYER_NORM, libraries, settings).measurements}
    assert list(found) == [PLAN, CALL, "copy", "PyTorch", "Liger"]
    for name, m in found.items():
        assert (m.problem, m.timing.median, m.growth) == ("", 5e-6, None)
        assert m.host == (2e-6 if name in (PLAN, CALL, "PyTorch") else None)
        assert m.graph == (3e-6 if name in (PLAN, "PyTorch") else None)
    (row, *_) = results.rows([runner.run_case(LAYER_NORM, libraries[:1], settings)])
    assert (row["host_seconds"], row["graph_seconds"]) == (2e-6, 3e-6)


def test_only_small_calls_are_timed_on_the_host_and_in_a_graph(clocks, monkeypatch):
    monkeypatch.setattr(runner, "_HOST_BOUND", 3 * LAYER_NORM.nbytes - 1)
    result = runner.run_case(LAYER_NORM, [Normgrad()], runner.Settings(TENSORS, 1e-3, graph=True))
    assert [(m.host, m.graph) for m in result.measurements] == [(None, None)] * 2


def test_the_copy_moves_the_bytes_of_the_operator():
    torch = pytest.importorskip("torch")
    (implementation,) = streaming.DeviceCopy().prepare(workload(LAYER_NORM, device=TENSORS))
    target = implementation.run()
    assert 2 * target.nbytes == pytest.approx(3 * LAYER_NORM.nbytes, abs=1)
    assert torch.equal(target, torch.ones_like(target))


def test_published_kernels_take_contiguous_tensors_alone():
    library = Published("Liger", gradients)
    with pytest.raises(Unavailable, match="Liger takes contiguous tensors"):
        list(library.prepare(workload(TINY[1])))


@pytest.mark.parametrize("name", sorted(SETS["cuda"]))
def test_the_sets_of_a_gpu_hold_no_case_twice(name):
    every = list(cases(SETS["cuda"][name]))
    assert len(set(every)) == len(every)
    assert {case.operator for case in every} >= set(OPERATORS) - {GATHER}
