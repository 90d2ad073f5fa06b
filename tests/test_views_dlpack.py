"""Anything with __dlpack__: read in place, written in place, results handed back in its own kind."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

import normgrad
from normgrad import ContractError
from normgrad.contract import dlpack
from normgrad.contract.arrays import as_view

_VECTOR = np.ones(3, np.float32)


class Exporter:
    """An array that says nothing of itself but __dlpack__."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class OldExporter(Exporter):
    """One from before version 1, which knows no options."""

    def __dlpack__(self) -> Any:
        return self.array.__dlpack__()


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __dlpack__(self, **options: Any) -> Any:
        raise self.error


class Forged(Exporter):
    """One whose structure does not describe its array."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(np.ones((4, 3), np.float32))
        self.fields = fields

    def __dlpack__(self) -> Any:
        capsule = self.array.__dlpack__()
        tensor = dlpack._Tensor.from_address(dlpack._pointer(capsule, b"dltensor"))
        for name, value in self.fields.items():
            setattr(tensor, name, value)
        return capsule


def _elemt(x: Any, **more: Any) -> Any:
    return normgrad.batch_norm_elemt(x, None, None, _VECTOR, _VECTOR, **more)


def _refusal(x: Any, **more: Any) -> ContractError:
    with pytest.raises(ContractError) as caught:
        _elemt(x, **more)
    assert caught.value.status == 161002
    return caught.value


def test_other_libraries_may_declare_the_same_functions_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ctypes.pythonapi`` is one object for all of them, and a pointer is cut off where an int is declared."""
    for name in ("PyCapsule_GetPointer", "PyCapsule_IsValid"):
        monkeypatch.setattr(getattr(ctypes.pythonapi, name), "argtypes", (ctypes.c_int,))
    assert _elemt(Exporter(np.ones((4, 3), np.float32))).shape == (4, 3)


SOURCES = {
    "numpy": np.arange(12, dtype=np.float32).reshape(4, 3),
    "numpy reversed": np.arange(12, dtype=np.float32).reshape(4, 3)[::-1, ::-1],
    "numpy float16": np.arange(12, dtype=np.float16).reshape(3, 4).T,
    "torch": torch.arange(12, dtype=torch.float32).reshape(4, 3),
    "torch offset": torch.arange(24, dtype=torch.float32).reshape(8, 3)[3:7],
    "torch bfloat16": torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)[:, ::2],
    "empty": np.zeros((0, 3), np.float32),
}


@pytest.mark.parametrize("exporter", [Exporter, OldExporter])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_read_in_place(backend: str, exporter: type[Exporter], source: Any) -> None:
    view, direct = as_view(exporter(source)), as_view(source)
    if direct.numel:
        assert (view.address, view.strides) == (direct.address, direct.strides)
    assert (view.shape, view.dtype) == (direct.shape, direct.dtype)
    np.testing.assert_array_equal(
        np.asarray(_elemt(exporter(source)), np.float64),
        np.asarray(torch.as_tensor(_elemt(source)).double())
        if isinstance(source, torch.Tensor)
        else np.asarray(_elemt(source), np.float64),
    )


@pytest.mark.parametrize("exporter", [Exporter, OldExporter])
def test_written_in_place(backend: str, exporter: type[Exporter]) -> None:
    out = np.full((4, 6), 7, np.float32)
    given = exporter(out[:, ::2])
    assert _elemt(np.ones((4, 3), np.float32), out=given) is given
    assert (out[:, ::2] == 0).all()
    assert (out[:, 1::2] == 7).all()


def test_the_exporter_is_kept_alive_by_a_plan(backend: str) -> None:
    out = np.zeros((4, 3), np.float32)
    plan = normgrad.batch_norm_elemt.plan(
        Exporter(np.full((4, 3), 5, np.float32)), None, None, Exporter(_VECTOR), Exporter(_VECTOR), out=out
    )
    _ = [np.full((4, 3), 9, np.float32) for _ in range(50)]  # would lie where freed memory was
    plan.run()
    assert (out == 4).all()


def test_a_read_only_output() -> None:
    out = np.zeros((4, 3), np.float32)
    out.flags.writeable = False
    assert _refusal(np.ones((4, 3), np.float32), out=Exporter(out)).parameter == "output"


def test_float64_and_odd_types() -> None:
    assert "is float64, and must be" in str(_refusal(Exporter(np.zeros((4, 3)))))
    assert "is complex64, and must be" in str(_refusal(Exporter(np.zeros((4, 3), np.complex64))))
    assert "is bool8, and must be" in str(_refusal(Exporter(np.zeros((4, 3), np.bool_))))
    assert "is float32x4, and must be" in str(_refusal(Forged(lanes=4)))


@pytest.mark.parametrize("error", [BufferError("no export"), RuntimeError("{broken}")], ids=repr)
def test_an_export_that_fails(error: Exception) -> None:
    refusal = _refusal(Failing(error))
    assert str(error) in str(refusal)
    assert refusal.__cause__ is error


@pytest.mark.parametrize("fields", [{"ndim": -1}, {"ndim": 1 << 30}, {"shape": None}], ids=repr)
def test_an_export_without_a_shape(fields: dict[str, Any]) -> None:
    assert f"{fields.get('ndim', 2)} dimensions and no shape" in str(_refusal(Forged(**fields)))


def test_an_export_beyond_all_memory() -> None:
    assert "where no memory can be" in str(_refusal(Forged(byte_offset=1 << 63)))
    strides = (ctypes.c_int64 * 2)(-(1 << 62), 1)
    assert "where no memory can be" in str(_refusal(Forged(strides=strides)))


def test_a_device_without_a_backend() -> None:
    for device_type in (7, 10, 0):
        with pytest.raises(ContractError, match=f"there is no backend for DLPack device {device_type}:0") as caught:
            normgrad.batch_norm_stats(Forged(device_type=device_type))
        assert caught.value.status == 561003


def test_an_empty_export_whose_other_sizes_are_too_large_for_numpy() -> None:
    shape = (ctypes.c_int64 * 4)(0, 1 << 40, 1 << 40, 3)
    with pytest.raises(ContractError, match="there is no memory for the results") as caught:
        normgrad.layer_norm(Forged(ndim=4, shape=shape, strides=None), [3])
    assert caught.value.status == 361001


def test_a_result_of_the_inputs_kind(backend: str) -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.arange(12, dtype=jax.numpy.float32).reshape(4, 3)
    got = _elemt(x)
    assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(x) - 1)
    assert "read-only" in str(_refusal(np.ones((4, 3), np.float32), out=x))
    bfloat16 = _elemt(x.astype(jax.numpy.bfloat16))
    assert bfloat16.dtype == jax.numpy.bfloat16
