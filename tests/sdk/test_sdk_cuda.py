"""The SDK on a GPU."""

from __future__ import annotations

import pytest
import torch
from expected import EXPECTED

from conftest import PROGRAMS, SAMPLES
from normgrad import backends

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
ON_GPU = {"NORMGRAD_DEVICE": "cuda"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU")
def test_without_a_gpu_it_is_told(build, run) -> None:
    done = run(build(SAMPLES / "layer_norm_backward.cpp"), **ON_GPU)
    assert done.returncode == 1
    assert "NORMGRAD_DEVICE is cuda, and there is no GPU to use: PyTorch sees no CUDA GPU" in done.stdout


@needs_gpu
def test_memory_streams_and_events(build, run) -> None:
    done = run(build(PROGRAMS / "gpu.cpp"), **ON_GPU)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_gpu
@pytest.mark.parametrize("sample", EXPECTED)
def test_samples(build, run, sample: str) -> None:
    if "cuda" not in {device for _, device in backends.BACKENDS.values()}:
        pytest.skip("there is no backend for CUDA")
    done = run(build(SAMPLES / f"{sample}.cpp"), **ON_GPU)
    assert (done.stdout, done.returncode) == (EXPECTED[sample], 0), done.stderr
