"""No memory for the compiler, the workspace, the results or a thread: one clear error, nothing written, and the next
call works.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad.contract.view import Memory
from normgrad.cpu import backend as cpu_backend
from normgrad.cpu.compile import kernel_lookup
from support.processes import run_python


@pytest.fixture
def backend() -> str:
    return "cpu"


def _call(arguments: Any, out: Any) -> None:
    normgrad.layer_norm_backward(*arguments, out=out)


def _planned(arguments: Any, out: Any) -> None:
    normgrad.layer_norm_backward.plan(*arguments, out=out).run()


def _on_a_stream(arguments: Any, out: Any) -> None:
    stream = normgrad.Stream()
    normgrad.layer_norm_backward.plan(*arguments, out=out).run(stream=stream)
    stream.synchronize()


_EVERY_WAY = pytest.mark.parametrize("call", [_call, _planned, _on_a_stream])


_Run = Callable[[Any, Any], None]


def _arrays() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return arguments and outputs. grad_input overlaps the data by all rows but one, so that a step copies it."""
    rows, statistics = np.full((65, 512), 7, np.float32), np.ones((64, 1), np.float32)
    arguments = rows[1:], rows[:64], [512], statistics, statistics
    return arguments, (rows[:64], np.full(512, 7, np.float32), np.full(512, 7, np.float32))


def _check_refused(call: _Run, text: str) -> None:
    arguments, out = _arrays()
    with pytest.raises(normgrad.ContractError, match=text) as raised:
        call(arguments, out)
    assert raised.value.status == 361001
    assert all((array == 7).all() for array in (*arguments[:2], *out))


@_EVERY_WAY
def test_no_memory_for_the_workspace(call: _Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(nbytes: int, device: str, stream: Any = None) -> Memory:
        raise MemoryError(f"no {nbytes} bytes")

    with monkeypatch.context() as patch:
        patch.setattr(cpu_backend.backend, "allocate", allocate, raising=False)
        _check_refused(call, r"layer_norm_backward: the work failed: MemoryError: no \d+ bytes")
    call(*_arrays())


@_EVERY_WAY
@pytest.mark.parametrize("kernel", ["layer_norm_backward", "copy"])  # copy is the last of the steps
def test_no_memory_for_the_compiler(kernel: str, call: _Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernel_lookup._load

    def load(wanted: kernel_lookup.Kernel, tags: Any) -> Any:
        if wanted.name == kernel:
            raise MemoryError("none for the compiler")
        return real(wanted, tags)

    normgrad.layer_norm_backward.dispatch.clear()
    with monkeypatch.context() as patch:
        patch.setattr(kernel_lookup, "_load", load)
        patch.setattr(kernel_lookup, "_entries", {})
        _check_refused(call, "layer_norm_backward: the work failed: MemoryError: none for the compiler")
    call(*_arrays())


_FOR_THREADS = """
import numpy as np, normgrad
LIBRARY
from normgrad.cpu.compile import kernel_lookup
real = kernel_lookup._load
def load(kernel, tags):
    if kernel.name in ("serve", "take_part"):
        raise MemoryError("none for the compiler")
    return real(kernel, tags)
kernel_lookup._load = load
x = np.ones((1024, 1024), np.float32)
print(normgrad.layer_norm(x, [1024])[1].sum())
"""


@pytest.mark.parametrize("library", ["", "import torch"])
def test_no_memory_for_threads(library: str) -> None:
    """The caller's thread does the work."""
    code = _FOR_THREADS.replace("LIBRARY", library)
    assert run_python(code, NORMGRAD_NUM_THREADS="2", NORMGRAD_BACKEND="cpu") == "1024.0\n"


_LIMITED = """
import resource
import numpy as np, torch, normgrad, normgrad.torch
from normgrad.contract.status import ContractError
columns = 1 << 10
x = np.ones((1 << 16, columns), np.float32)  # 256 MiB
tensor, norm = torch.from_numpy(x), normgrad.torch.LayerNorm(columns)
calls = {
    "arrays": lambda x, tensor: normgrad.layer_norm(x, [columns]),
    "tensors": lambda x, tensor: normgrad.layer_norm(tensor, [columns]),
    "torch.ops": lambda x, tensor: torch.ops.normgrad.layer_norm(tensor, [columns]),
    "module": lambda x, tensor: norm(tensor),
}
for call in calls.values():
    call(x[:8192], tensor[:8192])
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), resource.RLIM_INFINITY))
for name, call in calls.items():
    try:
        call(x, tensor)
    except (ContractError, RuntimeError) as error:
        print(name, getattr(error, "status", None), "allocate" in str(error), len(str(error).splitlines()))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for call in calls.values():
    call(x, tensor)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space, reads /proc")
def test_no_memory_for_the_results() -> None:
    """In PyTorch it is PyTorch's own error, which training loops know."""
    told = run_python(_LIMITED, NORMGRAD_BACKEND="cpu", NORMGRAD_NUM_THREADS="1").splitlines()
    assert told == ["arrays 361001 True 1", "tensors 361001 True 1", "torch.ops None True 1", "module None True 1"]
