"""``python tests/sdk/on_gpu.py``: the SDK on a machine with a GPU, with no more than PyTorch, cffi and a compiler.

First the devices from Python, then, where the tree can be made, C++ programs with NORMGRAD_DEVICE=cuda.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from normgrad import backends, sdk  # noqa: E402
from normgrad.sdk import native  # noqa: E402

SAMPLES = ("layer_norm_backward", "group_norm_backward", "batch_norm_elemt_backward", "sync_batch_norm")


class _Lib:
    """Stands for the native half, of which the devices use copies and fills only."""

    def normgrad_copy(self, to: int, source: int, nbytes: int) -> int:
        ctypes.memmove(to, source, nbytes)
        return 0

    def normgrad_fill(self, to: int, value: int, nbytes: int) -> None:
        ctypes.memset(to, value & 0xFF, nbytes)


def check_devices() -> None:
    """Memory, copies, streams and events of CudaDevices."""
    from normgrad.sdk.cuda import CudaDevices

    native.bind(None, _Lib())
    devices = CudaDevices()
    assert devices.count() >= 1
    assert devices.place(0) == "cuda:0"
    free, total = devices.memory_info(0)
    assert 0 < free <= total
    nbytes = 1 << 28
    a, b = devices.allocate(nbytes, 0), devices.allocate(nbytes, 0)
    assert a
    assert b
    assert devices.allocate(1 << 60, 0) == 0
    given, back = ctypes.create_string_buffer(os.urandom(4096), 4096), ctypes.create_string_buffer(4096)
    devices.copy(a, ctypes.addressof(given), 4096, (True, False))
    devices.copy(b, a, 4096, (True, True))
    devices.copy(ctypes.addressof(back), b, 4096, (False, True))
    assert back.raw == given.raw
    first, second = devices.stream(0), devices.stream(0)
    start = first.record()
    for value in range(1, 101):
        first.fill(a, value, nbytes, True, None)
    end = first.record()
    busy = not first.query()
    second.wait_for(end)
    second.copy(b, a, nbytes, (True, True), None)
    second.copy(ctypes.addressof(back), b, 4096, (False, True), None)
    second.synchronize()
    assert back.raw == bytes([100]) * 4096
    assert end.query()
    first.synchronize(10.0)
    print(f"100 fills of {nbytes} bytes took {end.milliseconds_since(start):.3f} ms; asynchronous: {busy}")
    devices.release(a)
    devices.release(b)


def check_programs() -> None:
    """The C++ programs."""
    with tempfile.TemporaryDirectory() as folder:
        home = sdk.build(Path(folder) / "tree")
        sources = [ROOT / "tests" / "sdk" / "programs" / "gpu.cpp"]
        if "cuda" in {device for _, device in backends.BACKENDS.values()}:
            sources += [ROOT / "examples" / "cpp" / f"{name}.cpp" for name in SAMPLES]
        else:
            print("there is no backend for CUDA: the samples are left out")
        variables = os.environ | {"NORMGRAD_DEVICE": "cuda", "LD_LIBRARY_PATH": f"{home}/lib64"}
        for source in sources:
            program = Path(folder) / source.stem
            libraries = ["-lascendcl", "-lnnopbase", "-lopapi_nn", "-lopapi_math"]
            command = ["g++", "-std=c++11", source, f"-I{home}/include", f"-L{home}/lib64", *libraries, "-o", program]
            subprocess.run(command, check=True)
            print(f"== {source.stem}", flush=True)
            subprocess.run([program], check=True, env=variables)


if __name__ == "__main__":
    check_devices()
    check_programs()
    print("all good")
