"""The SDK on a GPU: ``python3 -m pytest -m gpu tests/sdk/test_sdk_cuda.py``."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expected import EXPECTED, WAYS_TO_END

import normgrad
from conftest import PROGRAMS, SAMPLES, environment
from normgrad.sdk import native

ON_GPU = {"NORMGRAD_DEVICE": "cuda"}


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs a GPU."""
    skipped = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
    return pytest.mark.gpu(skipped(test))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU")
def test_without_a_gpu_it_is_told(build, run) -> None:
    done = run(build(SAMPLES / "layer_norm_backward.cpp"), **ON_GPU)
    assert done.returncode == 1
    assert "NORMGRAD_DEVICE is cuda, and there is no GPU to use: PyTorch sees no CUDA GPU" in done.stdout


class MemoryFunctions:
    """Stands for the native half, of which the devices use copies and fills only."""

    def normgrad_copy(self, to: int, source: int, nbytes: int) -> int:
        ctypes.memmove(to, source, nbytes)
        return 0

    def normgrad_fill(self, to: int, value: int, nbytes: int) -> None:
        ctypes.memset(to, value & 0xFF, nbytes)


@on_gpu
def test_devices_memory_copies_streams_and_events() -> None:
    from normgrad.sdk.cuda import CudaDevices

    native.bind(None, MemoryFunctions())
    devices = CudaDevices()
    assert devices.count() >= 1
    assert devices.device_name(0) == "cuda:0"
    free, total = devices.memory_info(0)
    assert 0 < free <= total
    nbytes = 1 << 28
    a, b = devices.allocate(nbytes, 0), devices.allocate(nbytes, 0)
    assert a
    assert b
    assert devices.allocate(1 << 60, 0) == devices.allocate((1 << 64) - 1, 0) == 0
    given, back = ctypes.create_string_buffer(os.urandom(4096), 4096), ctypes.create_string_buffer(4096)
    devices.copy(a, ctypes.addressof(given), 4096, (True, False))
    devices.copy(b, a, 4096, (True, True))
    devices.copy(ctypes.addressof(back), b, 4096, (False, True))
    assert back.raw == given.raw
    devices.copy(b + 1, b, 4095, (True, True))
    devices.copy(ctypes.addressof(back), b, 4096, (False, True))
    assert back.raw == given.raw[:1] + given.raw[:4095]
    first, second = devices.stream(0), devices.stream(0)
    start = first.record()
    for value in range(1, 101):
        first.fill(a, value, nbytes, True, None)
    end = first.record()
    second.wait_for(end)
    second.copy(b, a, nbytes, (True, True), None)
    second.copy(ctypes.addressof(back), b, 4096, (False, True), None)
    second.synchronize()
    assert back.raw == bytes([100]) * 4096
    assert end.query()
    first.synchronize(10.0)
    assert end.milliseconds_since(start) > 0
    devices.release(a)
    devices.release(b)


PROGRAMS_TRIED = [("gpu",), ("runtime",), ("use",), ("errors",), ("rounds", "500"), ("threads",)]


@on_gpu
@pytest.mark.parametrize("command", [*PROGRAMS_TRIED, *(("ends", way) for way in WAYS_TO_END)], ids=" ".join)
def test_programs(build, run, command: tuple[str, ...]) -> None:
    name, *arguments = command
    done = run(build(PROGRAMS / f"{name}.cpp"), *arguments, **ON_GPU)
    assert done.returncode == 0, done.stdout + done.stderr


@on_gpu
@pytest.mark.parametrize("sample", EXPECTED)
def test_samples(build, run, sample: str) -> None:
    done = run(build(SAMPLES / f"{sample}.cpp"), **ON_GPU)
    assert (done.stdout, done.returncode) == (EXPECTED[sample], 0), done.stderr


@on_gpu
def test_statuses_only_for_nonsense_at_every_function(home: Path) -> None:
    variables = environment(home, PYTHONPATH=str(Path(normgrad.__file__).parents[1]), **ON_GPU)
    command = [sys.executable, "-X", "faulthandler", Path(__file__).with_name("fuzz.py")]
    done = subprocess.run(
        [*command, home / "lib64" / "libascendcl.so", "10000", "1"],
        capture_output=True,
        text=True,
        check=False,
        env=variables,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
