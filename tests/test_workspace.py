"""The caller's workspace: as large as was said, no byte more, wherever it lies and whatever it holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import normgrad
from normgrad import ContractError, Plan
from normgrad.contract.view import Memory
from support.dtypes import FLOATS
from support.refusals import OUTPUTS, base_call, planned
from support.six_channels import SIX_CHANNELS, six_channels

GUARD = 64


def _needing_workspace(**changes: Any) -> tuple[Plan, dict[str, Any]]:
    call = base_call("group_norm_backward") | changes
    plan = planned("group_norm_backward", call)
    if plan.workspace_size == 0:
        pytest.skip("this backend needs no workspace for the call")
    return plan, call


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("operator", OUTPUTS)
@pytest.mark.parametrize(("offset", "fill"), [(0, 0xFF), (1, 0x00), (3, 0xFF), (20, 0x7F)])
def test_workspace_size_is_the_truth(backend: str, operator: str, dtype: str, offset: int, fill: int) -> None:
    by_library, by_us = base_call(operator, dtype), base_call(operator, dtype)
    planned(operator, by_library).run()
    plan = planned(operator, by_us)
    size = plan.workspace_size
    assert isinstance(size, int)
    memory = np.full(GUARD + offset + size + GUARD, 0xA5, np.uint8)
    workspace = memory[GUARD + offset : GUARD + offset + size]
    workspace[...] = fill
    plan.run(workspace)
    assert (memory[: GUARD + offset] == 0xA5).all()
    assert (memory[GUARD + offset + size :] == 0xA5).all()
    for name, value in by_us.items():
        if isinstance(value, np.ndarray):
            assert value.tobytes() == by_library[name].tobytes(), name


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("operator", sorted(SIX_CHANNELS))
def test_what_a_workspace_holds_decides_nothing(backend: str, operator: str, dtype: str, channels_last: bool) -> None:
    """Six channels leave most of a vector empty: no number, subnormal, NaN or huge, may reach a result from there."""
    call = six_channels(operator, dtype, channels_last)
    found = []
    for number in (0, 1, 0x7FC00000, 0x7F000000):
        plan = planned(operator, call)
        workspace = np.full(plan.workspace_size // 4 + 1, number, np.int32).view(np.uint8)[: plan.workspace_size]
        plan.run(workspace)
        found.append([call[name].tobytes() for name in OUTPUTS[operator]])
    assert all(these == found[0] for these in found)


def test_one_byte_short(backend: str) -> None:
    plan, call = _needing_workspace()
    before = call["grad_input"].tobytes()
    with pytest.raises(ContractError, match=f"has {plan.workspace_size - 1} bytes, and must have") as caught:
        plan.run(np.empty(plan.workspace_size - 1, np.uint8))
    assert (caught.value.status, caught.value.parameter) == (161002, "workspace")
    assert call["grad_input"].tobytes() == before
    plan.run(np.empty(plan.workspace_size, np.uint8))  # a refused run does not spend the plan


def test_none_at_all(backend: str) -> None:
    plan, _ = _needing_workspace()
    with pytest.raises(ContractError, match="workspace is null") as caught:
        plan.run(Memory(0, plan.workspace_size))
    assert (caught.value.status, caught.value.parameter) == (161001, "workspace")


def test_more_than_needed_and_other_kinds(backend: str) -> None:
    plan, _ = _needing_workspace()
    plan.repeatable = True
    size = plan.workspace_size
    buffer = np.empty(size, np.uint8)
    for workspace in (
        np.empty(size + 1000, np.uint8),
        np.empty(size, np.float32),
        np.empty((2, size), np.uint8).T,
        torch.empty(size, dtype=torch.uint8),
        Memory(buffer.ctypes.data, size, owner=buffer),
    ):
        plan.run(workspace)


def test_of_a_wrong_kind(backend: str) -> None:
    plan, _ = _needing_workspace()
    size = plan.workspace_size
    fixed = np.empty(size, np.uint8)
    fixed.flags.writeable = False
    past = np.lib.stride_tricks.as_strided(np.empty(size - 1, np.uint8), (size,), (1,))
    spread, repeated = np.empty(2 * size, np.uint8)[::2], np.broadcast_to(np.uint8(0), (size,))
    for workspace in (fixed, past, spread, repeated, [0] * size, "bytes", torch.empty(size, device="meta")):
        with pytest.raises(ContractError) as caught:
            plan.run(workspace)
        assert (caught.value.status, caught.value.parameter) == (161002, "workspace")
    with pytest.raises(ContractError, match="is on cuda:0, and must be on cpu"):
        plan.run(Memory(4096, size, "cuda:0"))
    plan.run()


@pytest.mark.parametrize("name", ["input", "weight", "grad_input", "grad_bias"])
def test_shared_with_a_tensor(backend: str, name: str) -> None:
    """One byte in common at either end is enough."""
    plan, call = _needing_workspace()
    size, itemsize = plan.workspace_size, 4
    for at_end in (False, True):
        array = call[name]
        memory = np.full(size + array.nbytes + 2 * itemsize, 1, np.uint8)
        start = 0 if not at_end else (size - 1) // itemsize * itemsize
        tensor = np.ndarray(array.shape, np.float32, memory, start)
        tensor[...] = 1
        workspace = memory[:size] if at_end else memory[array.nbytes - 1 :]
        plan.rebind(**{name: tensor})
        before = memory.tobytes()
        with pytest.raises(ContractError, match=f"workspace shares memory with {name}") as caught:
            plan.run(workspace)
        assert caught.value.status == 161002
        assert memory.tobytes() == before


def test_after_a_rebind_the_size_holds(backend: str) -> None:
    plan, call = _needing_workspace()
    size = plan.workspace_size
    plan.rebind(input=call["input"].copy())
    assert plan.workspace_size == size


def test_a_refusal_says_what_the_workspace_is(backend: str) -> None:
    plan, _ = _needing_workspace()
    size = plan.workspace_size
    with pytest.raises(ContractError, match=rf"workspace is of shape \({size},\) with strides \(2,\), and must be"):
        plan.run(np.empty(2 * size, np.uint8)[::2])
    with pytest.raises(ContractError, match="workspace is read-only, of shape "):
        plan.run(np.frombuffer(bytes(size), np.uint8))


def test_a_workspace_that_overlaps_itself_is_refused(backend: str) -> None:
    """It reaches over as many bytes as it has elements: only a closer look tells that some are the same, some gaps."""
    plan, _ = _needing_workspace()
    quarter = plan.workspace_size
    shape, strides = (2, quarter, 2), (1, 1, 3 * quarter - 1)
    assert sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) == 4 * quarter - 1
    workspace = np.lib.stride_tricks.as_strided(np.zeros(4 * quarter, np.uint8), shape, strides)
    with pytest.raises(ContractError, match="must be contiguous and writable"):
        plan.run(workspace)


def _workspace(operator: str, grad_out: torch.Tensor, x: torch.Tensor) -> int:
    """Return the workspace of a backward pass whose result is laid out as x."""
    N, C, H, W = x.shape
    per_channel = torch.ones(C)
    out = torch.empty_like(x)
    if operator == "layer_norm_backward":
        rows = torch.ones(N, 1)
        return normgrad.layer_norm_backward.plan(
            grad_out, x, [C, H, W], rows, rows, None, None, (True, False, False), out=(out, None, None)
        ).workspace_size
    if operator == "group_norm_backward":
        groups = torch.ones(N, 1)
        return normgrad.group_norm_backward.plan(
            grad_out, x, groups, groups, per_channel, N, C, H * W, 1, (True, False, False), out=(out, None, None)
        ).workspace_size
    return normgrad.batch_norm_elemt_backward.plan(
        grad_out, x, *[per_channel] * 5, torch.ones(1, dtype=torch.int32), out=out
    ).workspace_size


LAST = torch.channels_last


@pytest.mark.parametrize(
    ("operator", "form"),
    [
        ("layer_norm_backward", torch.contiguous_format),
        *(("group_norm_backward", form) for form in (torch.contiguous_format, LAST)),
        *(("batch_norm_elemt_backward", form) for form in (torch.contiguous_format, LAST)),
    ],
)
def test_an_expanded_gradient_is_copied_no_further_than_a_row(operator: str, form: torch.memory_format) -> None:
    """As the gradient of a sum or a mean is; a whole copy would be read and written once more than the data itself."""
    x = torch.zeros(4, 64, 32, 32).contiguous(memory_format=form)
    usual = _workspace(operator, torch.zeros_like(x), x)
    assert _workspace(operator, torch.zeros(()).expand(x.shape), x) - usual <= x[0].nbytes + 64


@pytest.mark.parametrize("operator", ["group_norm_backward", "batch_norm_elemt_backward"])
@pytest.mark.parametrize("form", [torch.contiguous_format, LAST])
def test_a_gradient_of_another_layout_is_all_that_is_copied(operator: str, form: torch.memory_format) -> None:
    x = torch.zeros(4, 64, 32, 32).contiguous(memory_format=form)
    other = torch.zeros(4, 64, 32, 32).contiguous(memory_format=torch.contiguous_format if form is LAST else LAST)
    assert _workspace(operator, other, x) - _workspace(operator, torch.zeros_like(x), x) <= x.nbytes + 64


@pytest.mark.parametrize("form", [torch.contiguous_format, LAST])
def test_mixed_dtypes_are_copied_in_the_layout_of_the_data(form: torch.memory_format) -> None:
    """float32 copies of the bfloat16 data and result, and none of the float32 gradient."""
    x = torch.zeros(4, 64, 32, 32).contiguous(memory_format=form)
    usual = _workspace("batch_norm_elemt_backward", x, x)
    assert _workspace("batch_norm_elemt_backward", x, x.bfloat16()) - usual <= 2 * x.nbytes + 64
