"""Known calls of kernels that are a series of launches: from Python to a driver that writes them down."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch

import normgrad
from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.plan import Problem, allocate_host
from normgrad.contract.view import Memory
from normgrad.cuda import series
from normgrad.cuda.launch import ALIGNMENT, Given, Scratch
from normgrad.cuda.series import Series
from support.driver import Driver, current_stream, kernel, step

DEVICE, GIVEN_STREAM = 3, 5
OFFSET = 512  # in the workspace
COLUMNS = 8


class Backend:
    """Prepares two launches with all tensors and a place in the workspace, whatever the problem."""

    name = "series"
    workspace_size = 4096

    def __init__(self) -> None:
        self.driver = Driver(*[8] * 9)
        self.prepared = 0

    def prepare(self, problem: Problem) -> Any:
        self.prepared += 1
        names = list(problem.views)
        arguments = [*(Given(name, FLOAT32, True) for name in names), Scratch(OFFSET, FLOAT32)]
        signature = {f"argument{place}": "*fp32" for place in range(len(arguments))}
        steps, kernels = [step(arguments, {})] * 2, [kernel(signature)] * 2
        return Kernel(
            Series(steps, kernels, names, DEVICE, self.workspace_size, self.driver, current_stream),
            counted_on=[15 & ~address for address in problem.addresses],
        )

    def allocate(self, nbytes: int, device: str, stream: Any = None) -> Memory:
        return allocate_host(nbytes)


class Kernel:
    workspace_size = Backend.workspace_size

    def __init__(self, one_step: Series, counted_on: list[int]) -> None:
        self.one_step = one_step
        self.counted_on = counted_on

    def launch(self, addresses: list[int], workspace: int, stream: Any) -> None:
        self.one_step.launch(addresses, workspace, GIVEN_STREAM)


class Bytes:
    """Makes workspaces so many bytes after a multiple of the alignment, and remembers them as long as they live."""

    def __init__(self) -> None:
        self.shift = 0
        self.made: list[weakref.ref[Any]] = []

    def __call__(self, shape: tuple[int], strides: tuple[int], dtype: Any) -> Any:
        (size,) = shape
        whole = torch.empty(size + 2 * ALIGNMENT, dtype=dtype)
        start = -whole.data_ptr() % ALIGNMENT + self.shift
        part = whole[start : start + size]
        self.made.append(weakref.ref(part))
        return part


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> Bytes:
    found = Bytes()
    monkeypatch.setattr(series, "_quick_bytes", found)
    return found


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, workspaces: Bytes) -> Iterator[Backend]:
    found = Backend()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("normgrad.operators.calls.backend_for", lambda problem: found)
    recipes = normgrad.layer_norm_backward._calls.recipes
    recipes.forget()
    yield found
    recipes.forget()


def arguments(rows: int = 4) -> tuple[Any, ...]:
    x, grad_out = torch.randn(rows, COLUMNS), torch.randn(rows, COLUMNS)
    return grad_out, x, [COLUMNS], torch.randn(rows, 1), torch.rand(rows, 1), torch.randn(COLUMNS)


def known_call(backend: Backend) -> tuple[Any, ...]:
    """A call that native code finishes from the third time on: a first launch, and one that has it made."""
    for _ in range(2):
        normgrad.layer_norm_backward(*arguments())
    del backend.driver.launches[:]
    return arguments()


def addresses(*tensors: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)]


def test_every_launch_has_the_tensors_the_workspace_and_the_current_stream(backend: Backend, workspaces: Bytes) -> None:
    for _ in range(3):
        args = known_call(backend)
        made = len(workspaces.made)
        results = normgrad.layer_norm_backward(*args)
        one, two = backend.driver.launches
        assert one == two
        *places, scratch = one["values"]
        assert places == addresses(*args, *results)
        assert (scratch - OFFSET) % ALIGNMENT == 0
        assert one["stream"] == 1000 + DEVICE
        assert [workspace() for workspace in workspaces.made[made:]] == [None]
        shapes = [(4, COLUMNS), (COLUMNS,), (COLUMNS,)]
        assert [tuple(result.shape) for result in results] == shapes
    assert backend.prepared == 1


def test_the_workspace_lives_until_everything_is_launched(backend: Backend, workspaces: Bytes) -> None:
    args = known_call(backend)
    alive: list[bool] = []
    launched = Driver._launched

    class Watching(Driver):
        def _launched(self, *given: Any) -> int:
            alive.append(workspaces.made[-1]() is not None)
            return launched(self, *given)

    normgrad.layer_norm_backward._calls.recipes.forget()
    backend.driver = Watching(*[8] * 9)
    known_call(backend)
    del alive[:]
    normgrad.layer_norm_backward(*args)
    assert alive == [True, True]


def test_a_result_that_is_not_wanted(backend: Backend) -> None:
    backend.driver = Driver(*[8] * 8)
    args = (*arguments(), None, [True, False, True])
    for _ in range(3):
        del backend.driver.launches[:]
        grad_input, grad_weight, grad_bias = normgrad.layer_norm_backward(*args)
        assert grad_weight is None
        assert backend.driver.launches[1]["values"][:-1] == addresses(*args, grad_input, grad_bias)
    assert backend.driver.launches[0]["stream"] == 1000 + DEVICE


def test_a_thread_without_a_context_gets_one(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    args = known_call(backend)
    chosen: list[int] = []

    def set_device(device: int) -> None:
        chosen.append(device)
        backend.driver.status = 0

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    backend.driver.status = 201
    results = normgrad.layer_norm_backward(*args)
    assert chosen == [DEVICE]
    assert [launch["values"][:-1] for launch in backend.driver.launches] == [addresses(*args, *results)] * 3
    backend.driver.status = 201
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(series, "_words", lambda status: f"words for {status}")
    with pytest.raises(normgrad.ContractError, match="words for 201"):
        normgrad.layer_norm_backward(*args)


def test_a_refusal_is_the_contracts_error(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    args = known_call(backend)
    monkeypatch.setattr(series, "_words", lambda status: f"words for {status}")
    backend.driver.status = 1
    with pytest.raises(normgrad.ContractError, match="refused a launch: words for 1") as raised:
        normgrad.layer_norm_backward(*args)
    assert raised.value.status == 361001
    assert len(backend.driver.launches) == 1
    backend.driver.status = 0
    normgrad.layer_norm_backward(*args)


def test_no_memory_for_the_workspace_is_the_contracts_error(
    backend: Backend, workspaces: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = known_call(backend)

    def fails(self: Bytes, *layout: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(Bytes, "__call__", fails)
    with pytest.raises(normgrad.ContractError, match="the work failed: MemoryError: no room") as raised:
        normgrad.layer_norm_backward(*args)
    assert raised.value.status == 361001
    assert backend.driver.launches == []


def test_memory_that_lies_otherwise_is_left_to_python(backend: Backend, workspaces: Bytes) -> None:
    args = known_call(backend)
    workspaces.shift = 64
    results = normgrad.layer_norm_backward(*args)
    one, two = backend.driver.launches
    assert one == two
    assert one["stream"] == GIVEN_STREAM
    assert (one["values"][-1] - OFFSET) % ALIGNMENT == 0
    assert one["values"][:-1] == addresses(*args, *results)
    assert backend.prepared == 1
    workspaces.shift = 0
    odd = torch.zeros(4 * COLUMNS + 1)[1:].view(4, COLUMNS)
    for grad_out in (odd, args[0], odd):
        normgrad.layer_norm_backward(grad_out, *args[1:])
        assert backend.prepared == 2  # for memory without the alignment that the code counts on


def test_another_device_is_left_to_python(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: DEVICE, raising=False)
    args = known_call(backend)
    for current, stream in ((DEVICE, 1000 + DEVICE), (0, GIVEN_STREAM), (DEVICE, 1000 + DEVICE)):
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda device=current: device, raising=False)
        del backend.driver.launches[:]
        normgrad.layer_norm_backward(*args)
        assert [launch["stream"] for launch in backend.driver.launches] == [stream] * 2
    assert backend.prepared == 1
