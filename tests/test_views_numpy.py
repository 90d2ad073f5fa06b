"""NumPy arrays as views: no copy, and everything that must be refused."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import normgrad
from normgrad import ContractError
from normgrad.contract.arrays import as_numpy, as_view
from normgrad.contract.dtypes import from_numpy_dtype
from normgrad.contract.formats import Format

_VECTOR = np.ones(3, np.float32)


def _statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return normgrad.batch_norm_stats(x)


def _refusal(x: np.ndarray, out: np.ndarray | None = None) -> ContractError:
    with pytest.raises(ContractError) as caught:
        normgrad.batch_norm_elemt(x, None, None, _VECTOR, _VECTOR, out=out)
    assert caught.value.status == 161002
    return caught.value


BASE = np.arange(4 * 3 * 10, dtype=np.float32).reshape(4, 3, 10)
SOUND = {
    "whole": BASE,
    "transposed": BASE.transpose(2, 1, 0),
    "sliced": BASE[1::2, :, ::3],
    "reversed": BASE[::-1, ::-1, ::-1],
    "offset": BASE[2:, :, 5:],
    "fortran": np.asfortranarray(BASE),
    "broadcast": np.broadcast_to(BASE[:1, :, :1], (4, 3, 10)),
    "read-only": np.frombuffer(BASE.tobytes(), np.float32).reshape(4, 3, 10),
    "of a bytearray": np.frombuffer(bytearray(BASE.tobytes()), np.float32).reshape(4, 3, 10),
    "window": as_strided(BASE, (4, 3, 5), (120, 40, 8)),
    "subclass": BASE.view(np.recarray),
    "empty": BASE[:0],
    "strange strides of length 1": as_strided(BASE, (1, 3, 1), (1 << 40, 40, 1 << 50)),
    "field of a structure": np.zeros((4, 3, 10), [("a", np.float32), ("b", np.float32)])["b"],
}


@pytest.mark.parametrize("x", SOUND.values(), ids=SOUND)
def test_a_sound_array_is_seen_as_it_is(backend: str, x: np.ndarray) -> None:
    view = as_view(x)
    assert view.shape == x.shape
    assert np.shares_memory(as_numpy(view), x) or x.size == 0
    np.testing.assert_array_equal(as_numpy(view), x)
    expected = normgrad.batch_norm_elemt(np.array(x), None, None, _VECTOR, _VECTOR)
    np.testing.assert_array_equal(normgrad.batch_norm_elemt(x, None, None, _VECTOR, _VECTOR), expected)


def test_memory_of_a_file(backend: str, tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(4, 3))
    mapped[...] = 2
    assert (_statistics(mapped)[0] == 2).all()
    anonymous = np.frombuffer(mmap.mmap(-1, 48), np.float32).reshape(4, 3)
    assert (_statistics(anonymous)[0] == 0).all()


def test_one_element_past_the_storage() -> None:
    storage = np.zeros(11, np.float32)
    assert "elements 0 to 11 of 11" in str(_refusal(as_strided(storage, (4, 3), (12, 4))))
    assert "elements -1 to 10 of 11" in str(_refusal(as_strided(storage[10:], (4, 3), (-12, -4))))


def test_the_storage_is_that_of_the_array_at_the_bottom(backend: str) -> None:
    storage = np.zeros(12, np.float32)
    window = storage[4:8]
    widened = as_strided(window[:1], (4, 3), (12, 4))  # from element 4 on: 4 past the end
    assert "outside its storage" in str(_refusal(widened))
    normgrad.batch_norm_elemt(as_strided(window[:1], (2, 3), (12, 4)), None, None, _VECTOR, _VECTOR)


def test_memory_that_no_array_holds(backend: str) -> None:
    buffer = (ctypes.c_float * 12)()
    array = np.ctypeslib.as_array(buffer).reshape(4, 3)
    np.testing.assert_array_equal(_statistics(array)[0], np.zeros(3))
    assert "outside its storage" in str(_refusal(as_strided(array, (5, 3), (12, 4))))


def test_misaligned() -> None:
    crooked = np.ndarray((4, 3), np.float32, bytearray(64), 2)
    assert "must be aligned to its elements of 4 bytes" in str(_refusal(crooked))


def test_strides_of_part_of_an_element() -> None:
    packed = np.zeros((4, 3), [("a", np.uint8), ("b", np.float32)])["b"]  # 5 bytes apart
    error = _refusal(packed)
    assert (error.parameter, "strides of whole elements" in str(error)) == ("input", True)


DTYPES = ["float64", "int64", "int8", "uint8", "bool", "complex64", "S4", "U1", "datetime64[s]", "object", "V4", "V0"]


@pytest.mark.parametrize("dtype", [*map(np.dtype, DTYPES), np.dtype(ml_dtypes.float8_e4m3fn)], ids=str)
def test_dtypes_outside_the_contract(dtype: np.dtype) -> None:
    error = _refusal(np.empty((4, 3), dtype))
    assert error.parameter == "input"
    assert "must be float32, float16 or bfloat16" in str(error)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_byte_swapped(dtype: type) -> None:
    assert "is byte-swapped float" in str(_refusal(np.zeros((4, 3), np.dtype(dtype).newbyteorder())))


def test_structured_dtype() -> None:
    assert _refusal(np.zeros((4, 3), [("a", np.float32)])).parameter == "input"


def test_masked_arrays_are_data_without_their_mask(backend: str) -> None:
    masked = np.ma.masked_array(np.ones((4, 3), np.float32), np.eye(4, 3))
    got = normgrad.batch_norm_elemt(masked, None, None, _VECTOR, _VECTOR)
    assert type(got) is np.ndarray
    np.testing.assert_array_equal(got, np.zeros((4, 3)))


def test_a_read_only_output() -> None:
    out = np.zeros((4, 3), np.float32)
    out.flags.writeable = False
    error = _refusal(np.ones((4, 3), np.float32), out)
    assert (error.parameter, "read-only" in str(error)) == ("output", True)


@pytest.mark.parametrize("strides", [(0, 4), (12, 0), (0, 0), (4, 4), (8, 4), (-4, 4)])
def test_an_output_that_overlaps_itself(strides: tuple[int, int]) -> None:
    storage = np.full(40, 7, np.float32)
    error = _refusal(np.ones((4, 3), np.float32), as_strided(storage[20:], (4, 3), strides))
    assert (error.parameter, "overlaps itself" in str(error)) == ("output", True)
    assert (storage == 7).all()


def test_an_input_may_overlap_itself(backend: str) -> None:
    line = np.arange(6, dtype=np.float32)
    windows = as_strided(line, (4, 3), (4, 4))
    np.testing.assert_array_equal(_statistics(windows)[0], [1.5, 2.5, 3.5])


def test_results_follow_the_inputs_order_in_memory(backend: str) -> None:
    channels_last = np.ones((4, 5, 6, 3), np.float32).transpose(0, 3, 1, 2)
    got = normgrad.batch_norm_elemt(channels_last, None, None, _VECTOR, _VECTOR)
    assert got.strides == channels_last.strides


def test_names_of_dtypes() -> None:
    assert from_numpy_dtype(np.dtype(ml_dtypes.bfloat16)).name == "bfloat16"
    assert from_numpy_dtype(np.dtype(np.float64)).name == "float64"


def test_a_view_says_what_it_is() -> None:
    x = np.zeros((3, 4), np.float32)
    assert repr(as_view(x)) == f"<View float32 (3, 4), cpu, at {x.ctypes.data:#x}>"
    x.flags.writeable = False
    assert repr(as_view(x.T)) == f"<View float32 (4, 3), strides (1, 4), cpu, at {x.ctypes.data:#x}, read-only>"
    assert "format NCHW" in repr(replace(as_view(x), format=Format.NCHW))
