"""Kernels on PyTorch's threads: who may use them and how many, the same bits on them as on ours, and after fork."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import normgrad
from normgrad.cpu.threads import pool, torch_pool
from support.processes import run_python

LENT = torch_pool.found()
lends = pytest.mark.skipif(LENT is None, reason="this PyTorch lends no threads")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
COUNTS = (1, 2, 3, 8)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NORMGRAD_BACKEND", "cpu")
    monkeypatch.setattr(pool, "usable_cores", lambda: max(COUNTS))  # so many threads a kernel has room for
    before = normgrad.get_num_threads(), torch.get_num_threads()
    yield
    normgrad.set_num_threads(before[0])
    torch.set_num_threads(before[1])


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every call that PyTorch's threads serve, how many of them may."""
    counts: list[int] = []
    run = torch_pool.TorchThreads.run

    def noted(self: torch_pool.TorchThreads, entry: Any, threads: int, descriptor: int) -> int:
        counts.append(threads)
        return run(self, entry, threads, descriptor)

    monkeypatch.setattr(torch_pool.TorchThreads, "run", noted)
    return counts


def _bits() -> list[bytes]:
    """Of calls large enough for several threads."""
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(17, 32, 1024, generator=generator) for _ in range(2))
    weight = torch.randn(32, generator=generator)
    output, mean, rstd = normgrad.group_norm(x, weight, None, 17, 32, 1024, 4)
    rows = normgrad.layer_norm_backward(dy, x, [1024], *(torch.ones(17, 32, 1) for _ in range(2)))
    gradients = normgrad.group_norm_backward(dy, x, mean, rstd, weight, 17, 32, 1024, 4)
    return [result.numpy().tobytes() for result in (output, mean, rstd, *gradients, *rows)]


@pytest.fixture
def alone() -> list[bytes]:
    """The bits on one thread."""
    before = normgrad.get_num_threads()
    normgrad.set_num_threads(1)
    bits = _bits()
    normgrad.set_num_threads(before)
    return bits


@lends
@pytest.mark.parametrize("theirs", COUNTS)
@pytest.mark.parametrize("ours", COUNTS)
def test_the_smaller_number_of_threads_and_the_same_bits(
    ours: int, theirs: int, used: list[int], alone: list[bytes]
) -> None:
    normgrad.set_num_threads(ours)
    torch.set_num_threads(theirs)
    assert all(_bits() == alone for _ in range(5))
    assert set(used) == ({min(ours, theirs)} if min(ours, theirs) > 1 else set())


def test_the_same_bits_on_our_own_threads(alone: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_pool, "found", lambda: None)
    normgrad.set_num_threads(3)
    assert all(_bits() == alone for _ in range(5))


@lends
def test_small_calls_wake_nobody(used: list[int]) -> None:
    normgrad.set_num_threads(2)
    torch.set_num_threads(2)
    x = torch.ones(64, 64)
    normgrad.layer_norm(x, [64])
    assert not used


@lends
def test_other_threads_than_the_main_one_have_our_helpers(used: list[int], alone: list[bytes]) -> None:
    normgrad.set_num_threads(2)
    torch.set_num_threads(2)
    _bits()
    del used[:]
    right: list[bool] = []
    workers = [threading.Thread(target=lambda: right.append(_bits() == alone)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert right == [True] * 8
    assert not used, "each of them would get PyTorch threads of its own"


@lends
def test_inside_a_parallel_region_of_pytorchs(alone: list[bytes]) -> None:
    normgrad.set_num_threads(2)
    torch.set_num_threads(2)
    found: list[bool] = []
    assert LENT is not None
    callback = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    region = callback(lambda begin, end, context: found.append(_bits() == alone))
    assert LENT._share(0, 2, 1, ctypes.cast(region, ctypes.c_void_p), None) == 0
    assert found == [True, True]


@lends
def test_a_kernel_that_gives_up_is_heard_of() -> None:
    torch.set_num_threads(2)
    entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(lambda descriptor: 7)
    job: Any = SimpleNamespace(address=ctypes.cast(entry, ctypes.c_void_p).value)
    assert LENT is not None
    assert LENT.run(job, 2, 0) == 7


@lends
def test_every_thread_is_called_once_and_in_order() -> None:
    torch.set_num_threads(2)
    seen: list[int] = []
    entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(lambda descriptor: seen.append(descriptor) or 0)
    job: Any = SimpleNamespace(address=ctypes.cast(entry, ctypes.c_void_p).value)
    assert LENT is not None
    assert LENT.run(job, 2, 64) == 0
    assert seen == [64, 64]


_PREAMBLE = """
import os, sys
import numpy as np
import normgrad
from normgrad.cpu.threads import torch_pool
normgrad.set_num_threads(2)
x = np.random.default_rng(0).normal(size=(16, 32, 1024)).astype(np.float32)
statistics = np.ones((16, 4), np.float32)
def call():
    return normgrad.group_norm_backward(x, x, statistics, statistics, None, 16, 32, 1024, 4)[0].tobytes()
expected = call()
"""


def test_without_pytorch_nothing_is_looked_for() -> None:
    code = "assert 'torch' not in sys.modules and torch_pool.found() is None\nprint('fine')"
    assert run_python(_PREAMBLE + code, NORMGRAD_BACKEND="cpu").strip() == "fine"


@lends
@pytest.mark.parametrize("policy", ["active", "passive"])
def test_pytorch_may_come_later_and_its_threads_may_sleep(policy: str) -> None:
    code = """
import torch
torch.set_num_threads(2)
assert call() == expected and torch_pool.found() is not None
torch.ones(1 << 20).add_(1)
assert all(call() == expected for _ in range(20))
print("fine")
"""
    assert run_python(_PREAMBLE + code, NORMGRAD_BACKEND="cpu", OMP_WAIT_POLICY=policy).strip() == "fine"


@forks
def test_children_made_by_fork_have_helpers_of_their_own() -> None:
    code = """
import torch
torch.set_num_threads(2)
torch.ones(1 << 20).add_(1)
assert call() == expected
children = []
for threads in (1, 2, 3):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(threads)
        lent = torch_pool.found()
        right = all(call() == expected for _ in range(5)) and (lent is None or not lent.are_here())
        os._exit(0 if right else 1)
    children.append(child)
assert call() == expected
print([os.waitpid(child, 0)[1] for child in children])
"""
    assert run_python(_PREAMBLE + code, NORMGRAD_BACKEND="cpu").strip() == "[0, 0, 0]"


@forks
def test_children_that_bring_pytorch_themselves() -> None:
    code = """
child = os.fork()
if child == 0:
    import torch
    torch.set_num_threads(2)
    os._exit(0 if all(call() == expected for _ in range(5)) else 1)
print(os.waitpid(child, 0)[1])
"""
    assert run_python(_PREAMBLE + code, NORMGRAD_BACKEND="cpu").strip() == "0"


@forks
def test_workers_that_load_data() -> None:
    code = """
import torch
torch.ones(1 << 20).add_(1)
call()
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, number):
        return call() == expected
loader = torch.utils.data.DataLoader(Data(), num_workers=2, batch_size=2, multiprocessing_context="fork")
print(all(bool(batch.all()) for batch in loader))
"""
    assert run_python(_PREAMBLE + code, NORMGRAD_BACKEND="cpu").strip() == "True"
