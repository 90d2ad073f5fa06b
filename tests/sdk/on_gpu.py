"""``python tests/sdk/on_gpu.py [--ends] [WHEELS]``: the SDK on a machine with a GPU.

It needs no more than PyTorch and a compiler; where cffi is not installed, it is taken from a folder of wheels. Every
part runs, whatever becomes of those before it, and ends in a line ``ok`` or ``FAILED``; the exit status counts the
failures. With ``--ends`` only the ways in which programs end.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS, SAMPLES = ROOT / "tests" / "sdk" / "programs", ROOT / "examples" / "cpp"
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "sdk")]

SECONDS = 100  # for one program


def take_wheels(folder: Path, target: Path) -> None:
    """Unpack the wheels of a folder, and let Python find them; programs find what this process finds."""
    for wheel in sorted(folder.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(target)
    sys.path.insert(0, str(target))
    importlib.invalidate_caches()


def say_what_there_is() -> None:
    import torch

    print(f"Python {platform.python_version()} at {sys.executable}, PyTorch {torch.__version__}, {platform.release()}")
    print(f"GPU: {torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'none'}")
    for name in ("cffi", "triton", "numba", "ml_dtypes", "rich"):
        print(f"{name}: {'there' if importlib.util.find_spec(name) else 'not installed'}")
    for name in ("cc", "gcc", "g++", "clang"):
        print(f"{name}: {shutil.which(name) or 'not installed'}", flush=True)


class _Lib:
    """Stands for the native half, of which the devices use copies and fills only."""

    def normgrad_copy(self, to: int, source: int, nbytes: int) -> int:
        ctypes.memmove(to, source, nbytes)
        return 0

    def normgrad_fill(self, to: int, value: int, nbytes: int) -> None:
        ctypes.memset(to, value & 0xFF, nbytes)


def check_devices() -> None:
    """Memory, copies, streams and events of CudaDevices."""
    from normgrad.sdk import native
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


def compile_program(source: Path, home: Path, folder: Path) -> Path:
    """A program built against the tree, as the tests build it; where it crashes it says where."""
    program = folder / source.stem
    include = home / "include"
    command = [
        "g++",
        "-std=c++11",
        "-O1",
        "-g",
        "-rdynamic",
        source,
        PROGRAMS / "crash.cpp",
        f"-I{include}",
        f"-I{include}/aclnnop",
        f"-I{include}/aclnn",
    ]
    libraries = ["-lascendcl", "-lnnopbase", "-lopapi_nn", "-lopapi_math"]
    done = subprocess.run(
        [*command, f"-L{home}/lib64", *libraries, "-pthread", "-o", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"g++ failed:\n{done.stderr[-3000:]}"
    return program


def run_program(program: Path, home: Path, *arguments: str) -> str:
    """What a program prints on the GPU; AssertionError with everything that it said where it fails."""
    variables = os.environ | {"NORMGRAD_DEVICE": "cuda", "LD_LIBRARY_PATH": f"{home}/lib64"}
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, check=False, env=variables, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"still running after {SECONDS} s; so far: {late.stdout!r} {late.stderr!r}") from None
    said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, f"exit status {done.returncode} (negative: a signal)\n{said}"
    return done.stdout


class Verdicts:
    """Parts, one after another; none stops those after it."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def part(self, name: str, work: Callable[[], None]) -> bool:
        began = time.monotonic()
        try:
            work()
        except BaseException as error:
            self.failed.append(name)
            shown = str(error) if isinstance(error, AssertionError) and str(error) else traceback.format_exc()
            print(f"FAILED {name} ({time.monotonic() - began:.1f} s): {shown}", flush=True)
            return False
        print(f"ok {name} ({time.monotonic() - began:.1f} s)", flush=True)
        return True


def check_sample(name: str, expected: str, home: Path, folder: Path) -> None:
    printed = run_program(compile_program(SAMPLES / f"{name}.cpp", home, folder), home)
    assert printed == expected, f"it printed\n{printed}and must print\n{expected}"


def check_program(name: str, arguments: tuple[str, ...], home: Path, folder: Path) -> None:
    printed = run_program(compile_program(PROGRAMS / f"{name}.cpp", home, folder), home, *arguments)
    print(f"   {name}: {printed.strip().splitlines()[-1] if printed.strip() else ''}")


def check_fuzzed(home: Path) -> None:
    """Nonsense at every function, from a Python process, on the GPU."""
    variables = os.environ | {"NORMGRAD_DEVICE": "cuda", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    fuzzer = ROOT / "tests" / "sdk" / "fuzz.py"
    command = [sys.executable, "-X", "faulthandler", fuzzer, home / "lib64" / "libascendcl.so", "10000", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, timeout=SECONDS)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def check_ends(home: Path, folder: Path, verdicts: Verdicts) -> None:
    """The programs that use no operator, and every way a program may end."""
    from expected import WAYS_TO_END

    for name in ("gpu", "runtime"):
        verdicts.part(f"{name}.cpp", lambda n=name: check_program(n, (), home, folder))
    for way in WAYS_TO_END:
        verdicts.part(f"ends.cpp {way}", lambda w=way: check_program("ends", (w,), home, folder))


def check_use(home: Path, folder: Path, verdicts: Verdicts) -> None:
    """The samples and the programs of the tests, and the fuzzer."""
    from expected import EXPECTED

    for name, expected in EXPECTED.items():
        verdicts.part(f"sample {name}", lambda n=name, e=expected: check_sample(n, e, home, folder))
    for name, arguments in {"use": (), "errors": (), "rounds": ("500",), "threads": ()}.items():
        verdicts.part(f"{name}.cpp", lambda n=name, a=arguments: check_program(n, a, home, folder))
    verdicts.part("fuzzer", lambda: check_fuzzed(home))


def main(wheels: Path | None, *, only_ends: bool) -> int:
    verdicts = Verdicts()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if wheels is not None and importlib.util.find_spec("cffi") is None:
            verdicts.part("wheels", lambda: take_wheels(wheels, folder / "packages"))
        verdicts.part("what there is", say_what_there_is)
        if not only_ends:
            verdicts.part("devices from Python", check_devices)
        home = folder / "tree"

        def make() -> None:
            from normgrad import sdk

            sdk.build(home)

        if verdicts.part("the tree", make):
            check_ends(home, folder, verdicts)
            if not only_ends:
                check_use(home, folder, verdicts)
    print(f"{len(verdicts.failed)} failed{': ' if verdicts.failed else ''}{', '.join(verdicts.failed)}")
    return len(verdicts.failed)


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word != "--ends"]
    sys.exit(main(Path(given[0]) if given else None, only_ends="--ends" in sys.argv))
