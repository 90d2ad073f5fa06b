"""The library inside a Python process: the same interpreter, and numbers against other implementations."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cffi import FFI

import normgrad
from conftest import environment
from normgrad import reference
from normgrad.sdk import native

PACKAGES = str(Path(normgrad.__file__).parents[1])


@pytest.fixture(scope="session")
def library(home: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(home / "lib64" / "libascendcl.so"))


def test_it_is_the_same_interpreter(library: ctypes.CDLL) -> None:
    count = ctypes.c_uint32()
    assert library.aclrtGetDeviceCount(ctypes.byref(count)) == 0
    assert count.value == 1
    assert "normgrad.sdk.entry" in sys.modules


def test_a_python_process_of_its_own_ends_well(home: Path) -> None:
    script = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
assert library.aclrtSetDevice(0) == 0
data = ctypes.c_void_p()
assert library.aclrtMalloc(ctypes.byref(data), ctypes.c_size_t(1 << 24), 0) == 0
for value in range(30):
    assert library.aclrtMemsetAsync(data, ctypes.c_size_t(1 << 24), value, ctypes.c_size_t(1 << 24), None) == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", script, home / "lib64" / "libopapi.so"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(home, PYTHONPATH=PACKAGES),
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_million_dimensions_are_refused_at_once(home: Path) -> None:
    script = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.aclCreateTensor.restype = ctypes.c_void_p
assert library.aclrtSetDevice(0) == 0
rank = ctypes.c_uint64(1 << 20)
dims = (ctypes.c_int64 * rank.value)(*[1 << 62] * rank.value)
tensor = ctypes.c_void_p(library.aclCreateTensor(dims, rank, 0, None, ctypes.c_int64(0), 2, dims, rank, None))
size, executor = ctypes.c_uint64(), ctypes.c_void_p()
results = (ctypes.byref(size), ctypes.byref(executor))
assert library.aclnnBatchNormStatsGetWorkspaceSize(tensor, ctypes.c_double(1), tensor, tensor, *results) == 161002
"""
    done = subprocess.run(
        [sys.executable, "-c", script, home / "lib64" / "libopapi.so"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(home, PYTHONPATH=PACKAGES),
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_float16_both_ways(library: ctypes.CDLL) -> None:
    library.aclFloat16ToFloat.restype = ctypes.c_float
    library.aclFloatToFloat16.restype = ctypes.c_uint16
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide = np.array([library.aclFloat16ToFloat(int(bits)) for bits in every.view(np.uint16)], np.float32)
    np.testing.assert_array_equal(wide, every.astype(np.float32))
    back = np.array([library.aclFloatToFloat16(ctypes.c_float(float(value))) for value in wide], np.uint16)
    finite = ~np.isnan(every)
    np.testing.assert_array_equal(back[finite], every.view(np.uint16)[finite])
    assert np.isnan(back[~finite].view(np.float16)).all()


def test_floats_round_to_the_nearest_float16(library: ctypes.CDLL) -> None:
    library.aclFloatToFloat16.restype = ctypes.c_uint16
    middles = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middles = ((middles[1:] + middles[:-1]) / 2).astype(np.float32)  # between two neighbours: to the even one
    around = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    special = np.array([65519.99, 65520, 65536, 3.4e38, np.inf, 1e-45, 2.0**-25, 2.0**-24, 0], np.float32)
    values = np.concatenate([middles, *around, special])
    values = np.concatenate([values, -values])[::3]
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).view(np.uint16)
    actual = [library.aclFloatToFloat16(ctypes.c_float(float(value))) for value in values]
    np.testing.assert_array_equal(np.array(actual, np.uint16), expected)


def test_sizes_of_element_types(library: ctypes.CDLL) -> None:
    library.aclDataTypeSize.restype = ctypes.c_size_t
    sizes = {0: 4, 1: 2, 2: 1, 3: 4, 4: 1, 6: 2, 7: 2, 8: 4, 9: 8, 10: 8, 11: 8, 12: 1, 16: 8, 17: 16, 27: 2, 33: 4}
    assert {number: library.aclDataTypeSize(number) for number in sizes} == sizes
    assert library.aclDataTypeSize(-1) == library.aclDataTypeSize(99) == 0


@pytest.mark.parametrize(
    ("product", "name"),
    [(None, None), ("Atlas A2", "Ascend910B1"), ("atlas a3", "Ascend910_93"), ("Ascend 950", "Ascend950")],
)
def test_soc_name(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, product: str | None, name: str | None) -> None:
    library.aclrtGetSocName.restype = ctypes.c_char_p
    if product is None:
        monkeypatch.delenv("NORMGRAD_PRODUCT", raising=False)
    else:
        monkeypatch.setenv("NORMGRAD_PRODUCT", product)
    given = library.aclrtGetSocName()
    assert (given and given.decode()) == name


def test_a_text_that_two_threads_ask_for_at_once_has_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that the first one gets stays good."""

    class Interrupted(FFI):  # type: ignore[misc]
        def new(self, *args: object) -> object:
            monkeypatch.setattr(native, "_ffi", FFI())
            addresses.append(native.lasting_text("a new text"))
            return super().new(*args)

    addresses: list[int] = []
    monkeypatch.setattr(native, "_ffi", Interrupted())
    addresses.append(native.lasting_text("a new text"))
    assert addresses[0] == addresses[1]
    assert ctypes.string_at(addresses[0]) == b"a new text"


def test_a_long_value_is_shortened_in_the_text(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMGRAD_PRODUCT", "é" * 5000)
    library.aclrtGetSocName.restype = ctypes.c_char_p
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    assert library.aclrtGetSocName() is None
    text = library.aclGetRecentErrMsg()
    assert len(text) < 4096
    assert "unknown product 'ééé" in text.decode()  # strict: no half character


class Caller:
    """The library as a program of a few lines uses it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name in ("aclCreateTensor", "aclCreateIntArray", "aclCreateBoolArray"):
            getattr(library, name).restype = ctypes.c_void_p
        assert library.aclrtSetDevice(0) == 0

    def allocate(self, nbytes: int) -> ctypes.c_void_p:
        data = ctypes.c_void_p()
        assert self.library.aclrtMalloc(ctypes.byref(data), ctypes.c_size_t(nbytes), 0) == 0
        return data

    def tensor(self, shape: tuple[int, ...], *values: float) -> ctypes.c_void_p:
        packed = struct.pack(f"{len(values)}f", *values)
        size = ctypes.c_size_t(len(packed))
        data = self.allocate(len(packed))
        assert self.library.aclrtMemcpy(data, size, packed, size, 1) == 0
        dims = (ctypes.c_int64 * len(shape))(*shape)
        rank = ctypes.c_uint64(len(shape))
        made = self.library.aclCreateTensor(dims, rank, 0, None, ctypes.c_int64(0), 2, dims, rank, data)
        return ctypes.c_void_p(made)

    def plan(self) -> tuple[ctypes.c_uint64, ctypes.c_void_p]:
        """LayerNorm backward of two rows of two elements."""
        x, result = self.tensor((2, 2), 2, 3, 4, 5), self.tensor((2, 2), 0, 0, 0, 0)
        mean, rstd = self.tensor((2, 1), 2, 3), self.tensor((2, 1), 4, 5)
        shape = ctypes.c_void_p(self.library.aclCreateIntArray((ctypes.c_int64 * 1)(2), ctypes.c_uint64(1)))
        mask = ctypes.c_void_p(self.library.aclCreateBoolArray((ctypes.c_bool * 3)(True), ctypes.c_uint64(3)))
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        results = (ctypes.byref(size), ctypes.byref(executor))
        plan = self.library.aclnnLayerNormBackwardGetWorkspaceSize
        assert plan(x, x, shape, mean, rstd, None, None, mask, result, None, None, *results) == 0
        return size, executor


@pytest.fixture
def caller(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Caller:
    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    return Caller(library)


def test_synchronise_tells_an_error_of_the_work_once(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ArithmeticError("it broke")

    library = caller.library
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    size, executor = caller.plan()
    with monkeypatch.context() as patch:
        patch.setattr(reference, "write", fail)
        assert library.aclnnLayerNormBackward(caller.allocate(size.value), size, executor, None) == 0
        assert library.aclrtSynchronizeStream(None) == 500000
    text = library.aclGetRecentErrMsg().decode()
    assert text.endswith("Acl_Error(500000): aclnnLayerNormBackward: the work failed: ArithmeticError: it broke")
    assert library.aclrtSynchronizeStream(None) == 0


def test_a_plan_tells_its_views() -> None:
    x = np.ones((2, 4), np.float32)
    statistics, out = np.ones((2, 1), np.float32), np.empty_like(x)
    plan = normgrad.layer_norm_backward.plan(
        x, x, [4], statistics, statistics, output_mask=(True, False, False), out=(out, None, None)
    )
    assert set(plan.views) == {"grad_out", "input", "mean", "rstd", "grad_input"}
    assert plan.views["grad_input"].address == out.ctypes.data
    other = np.empty_like(x)
    plan.rebind(grad_input=other)
    assert plan.views["grad_input"].address == other.ctypes.data


def test_the_given_workspace_is_used_and_no_more_of_it(caller: Caller) -> None:
    """The reference backend widens its inputs into the workspace: they are found there after the run."""
    library = caller.library
    size, executor = caller.plan()
    assert size.value >= 12 * 8
    guarded = ctypes.c_size_t(size.value + 64)
    workspace = caller.allocate(guarded.value)
    assert library.aclrtMemset(workspace, guarded, 0xAB, guarded) == 0
    assert library.aclnnLayerNormBackward(workspace, size, executor, None) == 0
    assert library.aclrtSynchronizeStream(None) == 0
    after = ctypes.string_at(workspace, guarded.value)
    assert struct.pack("4d", 2, 3, 4, 5) in after[: size.value]
    assert after[size.value :] == b"\xab" * 64
