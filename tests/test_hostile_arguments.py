"""Arguments that lie, fail, change while they are read, or never end: one clear error, and nothing written."""

from __future__ import annotations

import copy
import fractions
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

import normgrad
from normgrad import ContractError
from support.processes import run_python

X = np.ones((2, 4), np.float32)
STATISTICS = np.ones((2, 1), np.float32)


class FailingRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class FailingIndex:
    def __index__(self) -> int:
        raise ZeroDivisionError("no index")


class FailingFloat(fractions.Fraction):
    def __float__(self) -> float:
        raise ZeroDivisionError("no float")


class FailingIterator:
    def __iter__(self) -> FailingIterator:
        return self

    def __next__(self) -> int:
        raise KeyError("no item")


class FailingText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Exporter:
    """An exporter whose ``__dlpack__`` is a function."""

    def __init__(self, export: Callable[[], Any]) -> None:
        self._export = export

    def __dlpack__(self, **options: Any) -> Any:
        return self._export()


def _raise(error: Exception) -> Any:
    raise error


def _refused(call: Callable[[], Any]) -> ContractError:
    with pytest.raises(ContractError) as caught:
        call()
    assert caught.value.status == 161002
    assert len(str(caught.value)) < 1000
    return caught.value


def _layer_norm(shape: Any = (4,), eps: Any = 1e-5, input: Any = X) -> Any:
    return normgrad.layer_norm(input, shape, eps=eps)


def _group_norm(N: Any = 2, group: Any = 2) -> Any:
    return normgrad.group_norm(X, None, None, N, 4, 1, group)


def _backward(mask: Any) -> Any:
    return normgrad.layer_norm_backward(X, X, [4], STATISTICS, STATISTICS, output_mask=mask)


# Attributes


ATTRIBUTES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "eps=10**400": (lambda: _layer_norm(eps=10**400), "eps", "must be a real number within float64's range"),
    "eps=Fraction(10**400)": (lambda: _layer_norm(eps=fractions.Fraction(10**400)), "eps", "real number"),
    "eps, no float": (lambda: _layer_norm(eps=FailingFloat(1, 2)), "eps", "real number"),
    "eps, no repr": (lambda: _layer_norm(eps=FailingRepr()), "eps", "real number"),
    "shape of a huge integer": (lambda: _layer_norm([10**5000]), "normalized_shape", "signed 64-bit"),
    "N huge": (lambda: _group_norm(N=10**5000), "N", "an integer of 16610 bits, and must fit in a signed 64-bit"),
    "N of 20 digits": (lambda: _group_norm(N=10**19), "N", f"is {10**19}, and must fit in a signed 64-bit"),
    "group, no index": (lambda: _group_norm(group=FailingIndex()), "group", "must be an integer"),
    "shape, no repr": (lambda: _layer_norm([FailingRepr()]), "normalized_shape", "must be an integer"),
    "shape, no index": (lambda: _layer_norm([FailingIndex()]), "normalized_shape", "must be an integer"),
    "shape, no items": (lambda: _layer_norm(FailingIterator()), "normalized_shape", "cannot be read: KeyError"),
    "shape without end": (lambda: _layer_norm(itertools.repeat(4)), "normalized_shape", "more than 64 elements"),
    "shape, a set": (lambda: _layer_norm({4}), "normalized_shape", "in order"),
    "shape, a dict": (lambda: _layer_norm({4: 1}), "normalized_shape", "in order"),
    "mask without end": (lambda: _backward(itertools.repeat(True)), "output_mask", "more than 64 elements"),
    "mask, no items": (lambda: _backward(FailingIterator()), "output_mask", "cannot be read: KeyError"),
    "mask, a set": (lambda: _backward({True, False}), "output_mask", "in order"),
    "mask of 2": (lambda: _backward([2, 0, 1]), "output_mask", "is 2, and must be True or False"),
    "mask of -1": (lambda: _backward([True, -1, True]), "output_mask", "is -1, and must be True or False"),
    "mask, no repr": (lambda: _backward([FailingRepr(), True, True]), "output_mask", "must be True or False"),
    "mask of one": (lambda: _backward(FailingRepr()), "output_mask", "must be 3 booleans"),
    "long values": (lambda: _layer_norm("x" * 10_000), "normalized_shape", "more than 64 elements"),
}


@pytest.mark.parametrize(("call", "parameter", "text"), ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_attributes(call: Callable[[], Any], parameter: str, text: str) -> None:
    error = _refused(call)
    assert (error.parameter, text in str(error)) == (parameter, True), error


@pytest.mark.parametrize("mask", [(1, 0, 1), (True, np.False_, np.int64(1)), iter([1, 0, 1]), np.array([1, 0, 1])])
def test_masks_of_ones_and_zeros(mask: Any) -> None:
    assert [result is not None for result in _backward(mask)] == [True, False, True]


@pytest.mark.parametrize("shape", [4, np.int64(4), [4], np.array([4]), iter([4]), range(4, 5), torch.Size([4])])
def test_shapes_of_one_size(shape: Any) -> None:
    np.testing.assert_array_equal(_layer_norm(shape)[0], np.zeros((2, 4)))


# Arrays


ARRAYS: dict[str, tuple[Callable[[], Any], str]] = {
    "the class of NumPy's arrays": (lambda: np.ndarray, "is the class ndarray, and must be an array"),
    "the class of PyTorch's tensors": (lambda: torch.Tensor, "is the class Tensor, and must be an array"),
    "no capsule": (lambda: Exporter(lambda: None), "returned an object of type NoneType"),
    "an export that fails": (lambda: Exporter(lambda: _raise(ValueError("no {export}"))), "ValueError: no {export}"),
    "an error without text": (lambda: Exporter(lambda: _raise(FailingText())), "cannot be read: FailingText"),
    "a parameter without data": (torch.nn.parameter.UninitializedParameter, "uninitialized parameter"),
    "a thing": (FailingRepr, "is of type FailingRepr"),
}


def _plan() -> normgrad.Plan:
    out = tuple(np.full(shape, 7, np.float32) for shape in ((2, 4), 4, 4))
    return normgrad.layer_norm_backward.plan(X, X, [4], STATISTICS, STATISTICS, out=out)


@pytest.mark.parametrize(("make", "text"), ARRAYS.values(), ids=ARRAYS)
def test_arrays(make: Callable[[], Any], text: str) -> None:
    error = _refused(lambda: _layer_norm(input=make()))
    assert (error.parameter, text in str(error)) == ("input", True), error
    plan = _plan()
    assert _refused(lambda: plan.rebind(input=make())).parameter == "input"
    assert _refused(lambda: plan.run(workspace=make())).parameter == "workspace"


def test_a_traced_array_of_jax() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(ContractError, match="layer_norm: input cannot be read: ConcretizationTypeError"):
        jax.jit(lambda x: normgrad.layer_norm(x, [4])[0])(jax.numpy.ones((2, 4)))


class _LargerShape(np.ndarray):
    @property
    def shape(self) -> Any:
        return (1 << 26, 4)


class _OtherStrides(np.ndarray):
    @property
    def strides(self) -> Any:
        return (1 << 40, 4)


class _OtherBase(np.ndarray):
    @property
    def base(self) -> Any:
        return self


class _OtherDtype(np.ndarray):
    @property
    def dtype(self) -> Any:
        return np.dtype(np.float16)


@pytest.mark.parametrize("lying", [_LargerShape, _OtherStrides, _OtherBase, _OtherDtype])
@pytest.mark.parametrize("owns", [True, False])
def test_a_subclass_of_ndarray_that_lies(lying: type[np.ndarray], owns: bool, backend: str) -> None:
    """NumPy's own functions read the array, not the attributes of the subclass; so do we."""
    x = np.ndarray.__new__(lying, (2, 4), np.float32)
    np.ndarray.fill(x, 3)
    if not owns:
        x = np.full((2, 4), 3, np.float32).view(lying)
    output, mean, _ = normgrad.layer_norm(x, [4])
    assert (output.shape, mean.tolist()) == ((2, 4), [[3], [3]])


class _Holder:
    """Hands out another array's memory; its ``base`` is whatever it is given."""

    def __init__(self, array: np.ndarray, base: Any) -> None:
        self.array, self.__array_interface__ = array, array.__array_interface__
        self.base = self if base is None else base


@pytest.mark.parametrize("base", [None, np.zeros(3)], ids=["itself", "an unrelated array"])
def test_the_base_of_a_foreign_holder_says_nothing(base: Any, backend: str) -> None:
    x = np.asarray(_Holder(np.full((2, 4), 3, np.float32), base))
    assert normgrad.layer_norm(x, [4])[1].tolist() == [[3], [3]]


def test_bases_in_a_circle(backend: str) -> None:
    memory = np.full((2, 4), 3, np.float32)  # held here, since nothing else does once the bases lead nowhere
    x = as_strided(memory, (2, 4))
    if not isinstance(x.base, np.ndarray):
        x.base.base = x
    assert normgrad.layer_norm(x, [4])[1].tolist() == [[3], [3]]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("where", ["shape", "mask"])
def test_memory_that_an_attribute_takes_away(library: str, where: str) -> None:
    """Attributes are read before the arrays are. A process of its own: a use after free would end it."""
    code = f"""
import numpy as np, torch, normgrad
class Index:
    def __index__(self):
        x.resize(1, refcheck=False) if {library!r} == "numpy" else x.untyped_storage().resize_(0)
        return 2048
class Mask:
    def __iter__(self):
        Index().__index__()
        return iter((True, True, True))
x = np.ones((4096, 2048), np.float32)
statistics = x[:, :1].copy()
if {library!r} == "torch":
    x, statistics = torch.from_numpy(x).clone(), torch.from_numpy(statistics)
shape, mask = ([Index()], [True] * 3) if {where!r} == "shape" else ([2048], Mask())
try:
    normgrad.layer_norm_backward(x, x, shape, statistics, statistics, output_mask=mask)
except normgrad.ContractError as error:
    print(error.parameter)
"""
    assert run_python(code).split() == ["normalized_shape" if library == "numpy" else "grad_out"]


# Workspaces and streams


@pytest.mark.parametrize("dtype", [object, [("a", object)]])
def test_a_workspace_of_python_objects(dtype: Any) -> None:
    plan = _plan()
    workspace = np.zeros(plan.workspace_size // 8 + 16, dtype)
    error = _refused(lambda: plan.run(workspace=workspace))
    assert (error.parameter, "Python objects" in str(error)) == ("workspace", True)


@pytest.mark.parametrize("stream", ["abc", 1, True, object(), normgrad.Stream])
def test_a_stream_that_is_none(stream: Any) -> None:
    out = np.full((2, 4), 7, np.float32)
    plan = normgrad.layer_norm_backward.plan(
        X, X, [4], STATISTICS, STATISTICS, output_mask=(True, False, False), out=(out, None, None)
    )
    error = _refused(lambda: plan.run(stream=stream))
    assert (error.parameter, "must be a normgrad.Stream or None" in str(error)) == ("stream", True)
    assert (out == 7).all()
    plan.run()  # the plan is not spent
    assert (out != 7).all()


@pytest.mark.parametrize("columns", [1 << 40, 1 << 50, 1 << 58, 1 << 60])
def test_results_that_no_memory_holds(columns: int, backend: str) -> None:
    """Without rows the data has no bytes, and the sums over the rows have terabytes."""
    x, statistics = np.empty((0, columns), np.float32), np.empty((0, 1), np.float32)
    with pytest.raises(ContractError, match="there is no memory for") as caught:
        normgrad.layer_norm_backward(x, x, [columns], statistics, statistics)
    assert caught.value.status == 361001
    x, statistics = torch.empty(0, columns), torch.empty(0, 1)
    with pytest.raises(ContractError, match="there is no memory for") as caught:
        normgrad.layer_norm_backward(x, x, [columns], statistics, statistics)
    assert caught.value.status == 361001


@pytest.mark.parametrize("shape", [(1 << 20, 1 << 18), (1 << 30, 1 << 30)])
def test_broadcast_data_whose_results_no_memory_holds(shape: tuple[int, int], backend: str) -> None:
    for x in (np.broadcast_to(np.float32(1), shape), torch.ones(1, 1).expand(shape)):
        with pytest.raises(ContractError, match="there is no memory for") as caught:
            normgrad.layer_norm(x, [shape[1]])
        assert caught.value.status == 361001


@pytest.mark.parametrize("columns", [1 << 45, 1 << 58, 1 << 60])
def test_empty_data_of_huge_dimensions(columns: int, backend: str) -> None:
    x, statistics = np.empty((0, columns), np.float32), np.empty((0, 1), np.float32)
    assert [array.shape for array in normgrad.layer_norm(x, [columns])] == [(0, columns), (0, 1), (0, 1)]
    mask = [True, False, False]
    assert normgrad.layer_norm_backward(x, x, [columns], statistics, statistics, None, None, mask)[0].size == 0
    assert normgrad.group_norm(x, None, None, 0, columns, 1, 1)[1].shape == (0, 1)
    assert normgrad.group_norm_backward(x, x, x[:, :1], x[:, :1], None, 0, columns, 1, 1, mask)[0].size == 0


@pytest.mark.parametrize("library", [np, torch])
def test_a_product_of_attributes_that_overflows_where_there_is_no_data(library: Any, backend: str) -> None:
    x = library.empty((6, 0), dtype=library.float32)
    with pytest.raises(ContractError, match="the product must fit in a signed 64-bit integer") as caught:
        normgrad.group_norm(x, None, None, 6, 0, 1, 1 << 62)
    assert caught.value.status == 161002


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("make", [_plan, normgrad.Stream], ids=["Plan", "Stream"])
def test_plans_and_streams_belong_to_their_process(make: Callable[[], Any], copied: Callable[[Any], Any]) -> None:
    thing = make()
    with pytest.raises(TypeError, match=f"^a {type(thing).__name__} cannot be copied or pickled: "):
        copied(thing)


@pytest.mark.parametrize("work", [None, 3, "work"])
def test_work_that_is_no_function(work: Any) -> None:
    stream = normgrad.Stream()
    with pytest.raises(TypeError, match=r"the work is .*, and must be a function without arguments"):
        stream.submit(work)
    stream.synchronize()


def test_a_real_tensor_while_pytorch_fakes_its_results() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = torch.ones(2, 4)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ContractError, match="FakeTensor"):
        normgrad.layer_norm(real, [4])
