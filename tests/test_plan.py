"""Plans: checked first, run after; once, or as often as wanted, on other memory too."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad import ContractError, Plan, backends
from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.view import Memory, View
from support.failing import failing_plan
from support.processes import run_python
from support.refusals import OUTPUTS, a, base_call, planned

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
STATISTICS = np.ones((3, 1), np.float32)


def _plan(out: np.ndarray, x: np.ndarray = ROWS) -> Plan:
    return normgrad.layer_norm_backward.plan(
        x, x, [4], STATISTICS, STATISTICS, output_mask=(True, False, False), out=(out, None, None)
    )


def _result(x: np.ndarray = ROWS) -> np.ndarray:
    return normgrad.layer_norm_backward(x, x, [4], STATISTICS, STATISTICS)[0]


def _spent() -> Any:
    return pytest.raises(ContractError, match="the plan has run, and runs once")


def test_a_plan_says_what_it_is() -> None:
    plan = _plan(np.empty((3, 4), np.float32))
    tensors = "grad_out float32 (3, 4), input float32 (3, 4), mean float32 (3, 1), rstd float32 (3, 1)"
    head = f"<Plan layer_norm_backward({tensors}, grad_input float32 (3, 4)) on cpu by the backend cpu, workspace "
    assert repr(plan) == f"{head}{plan.workspace_size} bytes, runs once>"
    plan.run()
    assert repr(plan).endswith("bytes, has run>")
    plan = _plan(np.empty((3, 4), np.float32))
    plan.repeatable = True
    assert repr(plan).endswith("bytes, repeatable>")


def test_a_misspelt_attribute_is_an_error() -> None:
    plan = _plan(np.empty((3, 4), np.float32))
    with pytest.raises(AttributeError, match="repeatabel"):
        plan.repeatabel = True  # type: ignore[attr-defined]


def test_a_plan_without_outputs_is_told_of_out() -> None:
    with pytest.raises(
        ContractError, match=r"grad_input is null, .* out=\(grad_input, grad_weight, grad_bias\)$"
    ) as error:
        normgrad.layer_norm_backward.plan(ROWS, ROWS, [4], STATISTICS, STATISTICS)
    assert error.value.status == 161001
    out = (np.empty((3, 4), np.float32), np.empty(4, np.float32), None)
    with pytest.raises(ContractError, match="grad_bias is null, and is a requested output: it must be given"):
        normgrad.layer_norm_backward.plan(ROWS, ROWS, [4], STATISTICS, STATISTICS, out=out)


def test_planning_computes_nothing(backend: str) -> None:
    out = np.full((3, 4), 7, np.float32)
    plan = _plan(out)
    assert (out == 7).all()
    assert plan.run() is None
    np.testing.assert_array_equal(out, _result())


@pytest.mark.parametrize("operator", OUTPUTS)
def test_planning_allocates_no_tensor_memory(backend: str, operator: str) -> None:
    call = base_call(operator)
    large = {"layer_norm": (2**20, 4), "group_norm": (2, 6, 2**19), "batch_norm": (4, 3, 2**19)}
    shape = next(shape for name, shape in large.items() if operator.startswith(name))
    for name in ("grad_out", "input", "grad_input", "output"):
        if name in call:
            call[name] = np.zeros(shape, np.float32)
    if operator.startswith("layer"):
        call.update({name: np.zeros((2**20, 1), np.float32) for name in ("mean", "rstd")})
    if "HxW" in call:
        call["HxW"] = 2**19
    planned(operator, call)  # modules are loaded by now
    tracemalloc.start()
    try:
        planned(operator, call)
        assert tracemalloc.get_traced_memory()[1] < 2**18
    finally:
        tracemalloc.stop()


def test_a_plan_runs_once(backend: str) -> None:
    out = np.zeros((3, 4), np.float32)
    plan = _plan(out)
    assert not plan.repeatable
    plan.run()
    out[...] = 7
    with _spent() as caught:
        plan.run()
    assert (caught.value.status, caught.value.parameter) == (161002, None)
    with _spent():
        plan.repeatable = True
    with _spent():
        plan.rebind(grad_input=np.zeros((3, 4), np.float32))
    assert (out == 7).all()


def test_a_repeatable_plan_runs_often(backend: str) -> None:
    x, out = ROWS.copy(), np.zeros((3, 4), np.float32)
    plan = _plan(out, x)
    plan.repeatable = True
    for shift in range(20):
        x[...] = np.sin(ROWS + shift)
        out[...] = np.nan
        plan.run()
        np.testing.assert_array_equal(out, _result(x))
    plan.repeatable = False
    plan.run()
    with _spent():
        plan.run()


def test_one_of_many_threads_gets_a_single_use_plan(backend: str) -> None:
    for _ in range(20):
        plan = _plan(np.zeros((3, 4), np.float32))
        start, answers = threading.Barrier(8), []

        def run(plan: Plan = plan, start: threading.Barrier = start, answers: list[int] = answers) -> None:
            start.wait()
            try:
                plan.run()
                answers.append(0)
            except ContractError as error:
                answers.append(error.status)

        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers) == [0] + [161002] * 7


def test_a_repeatable_plan_runs_from_many_threads(backend: str) -> None:
    plans = [(_plan(out := np.zeros((3, 4), np.float32)), out) for _ in range(4)]
    errors: list[Exception] = []

    def run(plan: Plan) -> None:
        try:
            for _ in range(50):
                plan.run()
        except Exception as error:
            errors.append(error)

    for plan, _ in plans:
        plan.repeatable = True
    threads = [threading.Thread(target=run, args=(plan,)) for plan, _ in plans for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(np.array_equal(out, _result()) for _, out in plans)


_FORK = """
import os, threading, warnings
import numpy as np, normgrad
warnings.simplefilter("ignore")  # newer Pythons warn of any fork beside threads
x, outputs = np.ones((2, 4), np.float32), [np.zeros(s, np.float32) for s in ((2, 4), (2, 1), (2, 1))]
plan = normgrad.layer_norm.plan(x, [4], out=tuple(outputs))
plan.repeatable = True
reading, go_on = threading.Event(), threading.Event()
class Workspace:
    def __dlpack__(self, **_):
        reading.set()
        go_on.wait()
        return np.empty(max(plan.workspace_size, 1), np.uint8).__dlpack__()
thread = threading.Thread(target=plan.run, args=(Workspace(),))
thread.start()
reading.wait()
child = os.fork()
if child == 0:
    runner = threading.Thread(target=plan.run, daemon=True)
    runner.start()
    runner.join(20)
    os._exit(int(runner.is_alive() or outputs[1][0, 0] != 1))
go_on.set()
thread.join()
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_while_another_thread_is_in_the_plan() -> None:
    assert run_python(_FORK) == "0\n"


def test_a_plan_keeps_its_arrays(backend: str) -> None:
    out = np.zeros((3, 4), np.float32)
    plan = _plan(out, ROWS * 2)
    _ = [np.full((3, 4), 9, np.float32) for _ in range(100)]  # would lie where freed memory was
    plan.run()
    np.testing.assert_array_equal(out, _result(ROWS * 2))


def test_layer_norms_statistics_may_be_left_out_of_a_plan(backend: str) -> None:
    out = np.zeros((3, 4), np.float32)
    normgrad.layer_norm.plan(ROWS, [4], out=(out, None, None)).run()
    np.testing.assert_array_equal(out, normgrad.layer_norm(ROWS, [4])[0])


# Other memory under the same plan


def test_rebind(backend: str) -> None:
    old, new, other = np.full((3, 4), 7, np.float32), np.zeros((3, 4), np.float32), np.cos(ROWS)
    plan = _plan(old)
    plan.repeatable = True
    plan.rebind(grad_out=other, input=other, grad_input=new)
    plan.run()
    np.testing.assert_array_equal(new, _result(other))
    assert (old == 7).all()
    plan.rebind(grad_input=old)
    plan.run()
    np.testing.assert_array_equal(old, new)


def test_rebind_onto_an_input(backend: str) -> None:
    x = np.cos(ROWS)
    expected = _result(x)
    plan = _plan(np.zeros((3, 4), np.float32))
    plan.rebind(grad_out=x, input=x, grad_input=x)
    plan.run()
    np.testing.assert_array_equal(x, expected)


_READ_ONLY = np.zeros((3, 4), np.float32)
_READ_ONLY.flags.writeable = False
REBINDS = {
    "shape": ({"grad_out": a(4, 3)}, "grad_out", r"\(4, 3\).*must be as planned: float32 \(3, 4\)", 161002),
    "strides": ({"input": a(4, 3).T}, "input", r"strides \(1, 3\).*strides \(4, 1\)", 161002),
    "dtype": (
        {"grad_input": a(3, 4, dtype="float16")},
        "grad_input",
        "is float16.*must be as planned: float32",
        161002,
    ),
    "unknown": ({"gradient": a(3, 4)}, "gradient", "is not a tensor of this plan, which has grad_out, input", 161002),
    "absent": ({"weight": a(4)}, "weight", "is not a tensor of this plan", 161002),
    "not wanted": ({"grad_weight": a(4)}, "grad_weight", "is not a tensor of this plan", 161002),
    "attribute": ({"normalized_shape": [4]}, "normalized_shape", "is not a tensor of this plan", 161002),
    "null": ({"mean": None}, "mean", "is null", 161001),
    "no array": ({"mean": [1.0]}, "mean", "must be a NumPy array", 161002),
    "read-only": ({"grad_input": _READ_ONLY}, "grad_input", "read-only", 161002),
    "past its storage": (
        {"input": np.lib.stride_tricks.as_strided(a(11), (3, 4), (16, 4))},
        "input",
        "outside its storage",
        161002,
    ),
    "misaligned": ({"input": np.ndarray((3, 4), np.float32, bytearray(64), 2)}, "input", "aligned", 161002),
    "no name": ({"grad.out": STATISTICS}, "grad.out", "grad.out is not a tensor of this plan", 161002),
}


@pytest.mark.parametrize(("arrays", "parameter", "words", "status"), REBINDS.values(), ids=REBINDS)
def test_a_wrong_rebind_changes_nothing(
    backend: str, arrays: Mapping[str, Any], parameter: str, words: str, status: int
) -> None:
    out = np.zeros((3, 4), np.float32)
    plan = _plan(out)
    with pytest.raises(ContractError, match=words) as caught:
        plan.rebind(rstd=STATISTICS * 5, **arrays)
    assert (caught.value.status, caught.value.parameter) == (status, parameter)
    plan.run()
    np.testing.assert_array_equal(out, _result())


def test_why_a_backend_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "reference", ("normgrad.no {such} module", "cpu"))
    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    with pytest.raises(ContractError, match=r"cannot be loaded: .*no {such} module") as caught:
        _plan(np.zeros((3, 4), np.float32))
    assert caught.value.status == 561003


def test_rebind_keeps_outputs_apart(backend: str) -> None:
    call = base_call("layer_norm_backward")
    plan = planned("layer_norm_backward", call)
    with pytest.raises(ContractError, match="grad_bias shares memory with grad_weight"):
        plan.rebind(grad_bias=call["grad_weight"])
    plan.rebind(grad_bias=call["grad_weight"], grad_weight=call["grad_bias"])
    plan.run()


def test_two_outputs_that_share_memory() -> None:
    storage = np.zeros(7, np.float32)
    call = base_call("layer_norm_backward") | {"grad_weight": storage[:4], "grad_bias": storage[3:]}
    with pytest.raises(ContractError, match="grad_bias shares memory with grad_weight") as caught:
        planned("layer_norm_backward", call)
    assert caught.value.status == 161002
    planned("layer_norm_backward", call | {"grad_bias": np.zeros(8, np.float32)[4:]})


# Sizes and devices that no array here has: views say them


def _view(*shape: int, device: str = "cpu", nbytes: int = 0) -> View:
    strides = tuple(int(np.prod(shape[axis + 1 :], dtype=object)) for axis in range(len(shape)))
    return View(4096, shape, strides, FLOAT32, Memory(4096, nbytes, device))


def test_more_bytes_than_a_signed_64_bit_integer_counts() -> None:
    call = base_call("batch_norm_stats") | {"input": _view(2**31, 3, 2**31, nbytes=2**70)}
    with pytest.raises(ContractError, match="its bytes must fit in a signed 64-bit integer") as caught:
        planned("batch_norm_stats", call)
    assert (caught.value.status, caught.value.parameter) == (161002, "input")


def test_negative_sizes() -> None:
    with pytest.raises(ContractError, match="no dimension may be negative"):
        planned("batch_norm_stats", base_call("batch_norm_stats") | {"input": _view(-4, 3)})


def test_a_null_address() -> None:
    view = View(0, (4, 3, 5), (15, 5, 1), FLOAT32, Memory(0, 240))
    with pytest.raises(ContractError, match="has no memory") as caught:
        planned("batch_norm_stats", base_call("batch_norm_stats") | {"input": view})
    assert caught.value.status == 161002


def test_two_devices() -> None:
    call = base_call("batch_norm_stats") | {"mean": _view(3, device="cuda:0", nbytes=12)}
    with pytest.raises(ContractError, match="is on cuda:0, and must be on cpu") as caught:
        planned("batch_norm_stats", call)
    assert (caught.value.status, caught.value.parameter) == (161002, "mean")


def test_a_device_without_a_backend(backend: str) -> None:
    call = {
        "input": _view(4, 3, device="cuda:0", nbytes=48),
        "eps": 1e-5,
        **{name: _view(3, device="cuda:0", nbytes=12) for name in ("mean", "invstd")},
    }
    call["invstd"] = replace(call["invstd"], address=8192, storage=Memory(8192, 12, "cuda:0"))
    with pytest.raises(ContractError, match=f"no backend for cuda:0 with NORMGRAD_BACKEND={backend}") as caught:
        planned("batch_norm_stats", call)
    assert caught.value.status == 561003


def test_an_unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMGRAD_BACKEND", "abacus")
    with pytest.raises(ValueError, match=r"NORMGRAD_BACKEND is 'abacus', and must be one of .*reference"):
        _plan(np.zeros((3, 4), np.float32))


def test_an_error_of_the_work_is_a_runtime_error() -> None:
    with pytest.raises(ContractError, match=r"the work failed: ArithmeticError: {lost} a digit") as caught:
        failing_plan().run()
    assert (caught.value.status, caught.value.status_name) == (361001, "ACLNN_ERR_RUNTIME_ERROR")
    assert isinstance(caught.value.__cause__, ArithmeticError)
