"""PyTorch tensors as views: no copy, and everything that must be refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import normgrad
from normgrad import ContractError
from normgrad.contract.arrays import as_view
from support.dtypes import FLOATS, TORCH

_VECTOR = torch.ones(3)


def _elemt(x: Any, **more: Any) -> Any:
    return normgrad.batch_norm_elemt(x, None, None, _VECTOR, _VECTOR, **more)


def _refusal(x: Any, **more: Any) -> ContractError:
    with pytest.raises(ContractError) as caught:
        _elemt(x, **more)
    assert caught.value.status == 161002
    return caught.value


BASE = torch.arange(120, dtype=torch.float32).reshape(4, 3, 10)
SOUND = {
    "whole": BASE,
    "transposed": BASE.permute(2, 1, 0),
    "sliced": BASE[1::2, :, ::3],
    "offset": BASE[2:, :, 5:],
    "channels last": BASE.reshape(4, 3, 2, 5).to(memory_format=torch.channels_last),
    "expanded": BASE[:1, :, :1].expand(4, 3, 10),
    "overlapping windows": BASE.as_strided((4, 3, 10), (10, 3, 1)),
    "empty": BASE[:0],
    "parameter": torch.nn.Parameter(BASE.clone()),
    "needs a gradient": BASE.clone().requires_grad_(),
    "of NumPy": torch.from_numpy(np.arange(12, dtype=np.float32).reshape(4, 3)),
}


@pytest.mark.parametrize("x", SOUND.values(), ids=SOUND)
def test_a_sound_tensor_is_seen_as_it_is(backend: str, x: torch.Tensor) -> None:
    view = as_view(x)
    assert (view.shape, view.strides) == (tuple(x.shape), x.stride())
    assert view.address == x.data_ptr()
    got = _elemt(x)
    assert isinstance(got, torch.Tensor)
    assert not got.requires_grad
    np.testing.assert_array_equal(got.numpy(), _elemt(x.detach().numpy().copy()))


@pytest.mark.parametrize("dtype", FLOATS)
def test_torch_in_torch_out(backend: str, dtype: str) -> None:
    x = torch.randn(4, 8).to(TORCH[dtype])
    y, mean, rstd = normgrad.layer_norm(x, [8])
    assert (y.dtype, mean.dtype, rstd.dtype) == (x.dtype, torch.float32, torch.float32)
    grads = normgrad.layer_norm_backward(y, x, [8], mean, rstd, x[0])
    assert [g.dtype for g in grads] == [x.dtype] * 3
    assert all(isinstance(g, torch.Tensor) for g in grads)


def test_channels_last_stays(backend: str) -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert _elemt(x).is_contiguous(memory_format=torch.channels_last)


def test_the_negative_bit_is_read(backend: str) -> None:
    x = torch.view_as_complex(torch.randn(4, 3, 2)).conj().imag
    assert x.is_neg()
    np.testing.assert_array_equal(_elemt(x).numpy(), _elemt(x.resolve_neg()).numpy())


def test_an_output_with_the_negative_bit_is_not_written_beside() -> None:
    """What such a tensor holds is minus its memory: written as it is, it would read back with the wrong sign."""
    out = torch.view_as_complex(torch.zeros(4, 3, 2)).conj().imag
    error = _refusal(torch.ones(4, 3), out=out)
    assert error.parameter == "output"


def test_a_storage_that_was_shrunk() -> None:
    x = torch.ones(4, 3)
    x.untyped_storage().resize_(44)
    assert "elements 0 to 11 of 11" in str(_refusal(x))
    x.untyped_storage().resize_(0)
    _refusal(x)


def test_an_expanded_output() -> None:
    storage = torch.full((3,), 7.0)
    error = _refusal(torch.ones(4, 3), out=storage.expand(4, 3))
    assert (error.parameter, "overlaps itself" in str(error)) == ("output", True)
    assert (storage == 7).all()


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.ones(4, 3).to_sparse(), "must be strided"),
        (torch.ones(4, 3, device="meta"), "is on the device meta, and must be on the CPU or a CUDA GPU"),
        (
            torch.ones(4, 3).to_mkldnn() if torch.backends.mkldnn.is_available() else torch.ones(2).to_sparse(),
            "strided",
        ),
    ],
    ids=["sparse", "meta", "mkldnn"],
)
def test_tensors_without_a_plain_memory(x: torch.Tensor, words: str) -> None:
    assert words in str(_refusal(x))


def test_tensors_that_only_stand_for_one() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(4, 3)
    assert _refusal(fake).parameter == "input"
    with pytest.raises(ContractError):
        torch.func.vmap(_elemt)(torch.ones(2, 4, 3))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_dtypes_outside_the_contract(dtype: torch.dtype) -> None:
    error = _refusal(torch.zeros(4, 3).to(dtype))
    assert f"is {str(dtype).removeprefix('torch.')}, and must be float32, float16 or bfloat16" in str(error)


def test_kinds_may_be_mixed_and_input_decides(backend: str) -> None:
    ours = normgrad.batch_norm_elemt_backward(
        *(torch.ones(4, 3), np.ones((4, 3), np.float32), _VECTOR, np.ones(3, np.float32), None),
        *(_VECTOR, _VECTOR, np.array([4], np.int32)),
    )
    assert isinstance(ours, np.ndarray)
    out = torch.empty(4, 3)
    assert normgrad.batch_norm_elemt(np.ones((4, 3), np.float32), None, None, _VECTOR, _VECTOR, out=out) is out
    assert (out == 0).all()


def test_a_leaf_that_needs_a_gradient_can_be_written(backend: str) -> None:
    out = torch.full((4, 3), 7.0, requires_grad=True)
    _elemt(torch.ones(4, 3), out=out)
    assert (out == 0).all()


def _replace_data(x: torch.Tensor) -> None:
    x.data = torch.ones(2, 3)


MOVES = {
    "data": _replace_data,
    "set": lambda x: x.set_(torch.ones(2, 3)),
    "resize": lambda x: x.resize_(1000, 1000),
    "offset": lambda x: x.set_(x.untyped_storage(), 3, (1, 3)),
    "shrunk storage": lambda x: x.untyped_storage().resize_(12),
    "freed storage": lambda x: x.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("argument", ["input", "output"])
@pytest.mark.parametrize("move", MOVES.values(), ids=list(MOVES))
def test_a_plan_does_not_touch_memory_that_a_tensor_no_longer_has(move: Any, argument: str) -> None:
    tensors = {"input": torch.ones(2, 3), "output": torch.zeros(2, 3)}
    plan = normgrad.batch_norm_elemt.plan(tensors["input"], None, None, _VECTOR, _VECTOR, out=tensors["output"])
    plan.repeatable = True
    plan.run()
    move(tensors[argument])
    with pytest.raises(ContractError, match=f"{argument} has other memory than it had") as caught:
        plan.run()
    assert caught.value.status == 161002
    tensors["output"] = torch.full((2, 3), 7.0)
    plan.rebind(input=torch.full((2, 3), 5.0), output=tensors["output"])
    plan.run()
    assert (tensors["output"] == 4).all()
