"""torch.ops.normgrad: the same numbers as the plain functions, and all that PyTorch asks of an operator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import normgrad
import normgrad.torch
from normgrad.operators import OPERATORS
from normgrad.testing.expected import as_tuple
from support.torch_samples import copied, differentiable, random, samples

ops = torch.ops.normgrad
CALLS = [(name, number) for name, calls in samples().items() for number in range(len(calls))]
every_call = pytest.mark.parametrize(("name", "number"), CALLS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def call(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return as_tuple(getattr(ops, name)(*args))


def assert_equal(actual: Any, expected: Any) -> None:
    """The same bits, dtypes and shapes; None for None."""
    assert len(actual) == len(expected)
    for mine, other in zip(actual, expected, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


def test_every_operator_is_there() -> None:
    assert set(samples()) == set(OPERATORS)
    for name, operator in OPERATORS.items():
        arguments = [argument.name for argument in getattr(ops, name).default._schema.arguments]
        plain = [p for p in operator.__signature__.parameters if p not in ("out", "product")]
        assert arguments == plain


@every_call
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_as_the_plain_function(name: str, number: int, dtype: torch.dtype) -> None:
    args = samples(dtype)[name][number]
    plain_args = copied(args)
    plain = getattr(normgrad, name)(*plain_args)
    plain = plain if isinstance(plain, tuple) else (plain,)
    for _ in range(2):  # checked in full, then by the recipe
        ours = copied(args)
        assert_equal(call(name, ours), plain)
        tensors = [number for number, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        assert_equal([ours[number] for number in tensors], [plain_args[number] for number in tensors])


@every_call
def test_opcheck(name: str, number: int) -> None:
    args = samples()[name][number]
    running = {3, 4} if name == "batch_norm_gather_stats_with_counts" else set()
    leaves = tuple(
        arg if place in running else leaf
        for place, (arg, leaf) in enumerate(zip(args, differentiable(*args), strict=True))
    )
    found = torch.library.opcheck(getattr(ops, name).default, leaves)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", samples())
def test_fake_kernels_of_16_bit_calls(name: str, dtype: torch.dtype) -> None:
    for args in samples(dtype)[name]:
        torch.library.opcheck(getattr(ops, name).default, args, test_utils="test_faketensor")


@pytest.mark.parametrize("mask", list(itertools.product((False, True), repeat=3)))
def test_results_that_are_not_wanted(mask: tuple[bool, ...]) -> None:
    for name in ("layer_norm_backward", "group_norm_backward"):
        args = (*samples()[name][0][:-1], list(mask))
        assert [result is not None for result in getattr(ops, name)(*args)] == list(mask)
        torch.library.opcheck(getattr(ops, name).default, args, test_utils="test_faketensor")
    flags = samples()["batch_norm_reduce_backward"][0][:-3]
    found = [result is not None for result in ops.batch_norm_reduce_backward(*flags, *mask)]
    assert found == [mask[0], mask[0], mask[1], mask[2]]


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "sliced", "expanded"])
def test_strided_data(layout: str) -> None:
    def laid(tensor: torch.Tensor) -> torch.Tensor:
        match layout:
            case "channels_last":
                return tensor.contiguous(memory_format=torch.channels_last)
            case "transposed":
                return tensor.transpose(0, 3).contiguous().transpose(0, 3)
            case "sliced":
                return torch.stack([tensor, tensor], -1)[..., 0]
        return tensor[:1].expand(tensor.shape)

    x, grad, weight = laid(random(4, 6, 5, 5)), laid(random(4, 6, 5, 5, seed=1)), random(6)
    args = (x, weight, weight, 4, 6, 25, 3)
    _, mean, rstd = ops.group_norm(*args)
    torch.library.opcheck(ops.group_norm.default, args, test_utils="test_faketensor")
    backward = (grad, x, mean, rstd, weight, 4, 6, 25, 3)
    torch.library.opcheck(ops.group_norm_backward.default, backward, test_utils="test_faketensor")
    assert_equal(ops.group_norm_backward(*backward), normgrad.group_norm_backward(*backward))
    if layout == "channels_last":
        assert ops.group_norm(*args)[0].is_contiguous(memory_format=torch.channels_last)
        assert ops.group_norm_backward(*backward)[0].is_contiguous(memory_format=torch.channels_last)


def test_errors_are_the_contracts() -> None:
    x = random(4, 8)
    with pytest.raises(normgrad.ContractError, match="input is float64, and must be float32") as raised:
        ops.layer_norm(x.double(), [8])
    assert raised.value.status == 161002
    ops.layer_norm(x, [8])
    with pytest.raises(normgrad.ContractError, match="must equal the last dimensions"):
        ops.layer_norm(x, [4])


def test_a_product_is_kept_to() -> None:
    x = random(4, 8, dtype=torch.bfloat16)
    ops.layer_norm(x, [8])
    with (
        normgrad.use_product("Atlas inference"),
        pytest.raises(normgrad.ContractError, match="Atlas inference has no aclnnLayerNorm"),
    ):
        ops.layer_norm(x, [8])


def test_memory_that_was_given_back_is_not_read() -> None:
    x = random(4, 8)
    ops.layer_norm(x, [8])
    x.untyped_storage().resize_(64)
    with pytest.raises(normgrad.ContractError, match="reaches outside its storage"):
        ops.layer_norm(x, [8])


def test_a_negated_view_is_read_as_negated() -> None:
    x = torch.view_as_complex(random(4, 8, 2)).conj().imag
    assert x.is_neg()
    expected = ops.layer_norm(x.resolve_neg().contiguous(), [8])
    for _ in range(2):
        assert_equal(ops.layer_norm(x, [8]), expected)


def test_running_statistics_move_and_are_counted() -> None:
    input, mean, invstd, running_mean, running_var, momentum, eps, counts = samples()[
        "batch_norm_gather_stats_with_counts"
    ][0]
    expected = [running_mean.clone(), running_var.clone()]
    for calls in range(1, 4):
        normgrad.batch_norm_gather_stats_with_counts(input, mean, invstd, *expected, momentum, eps, counts)
        ops.batch_norm_gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts)
        assert_equal([running_mean, running_var], expected)
        assert (running_mean._version, running_var._version) == (calls, calls)


def test_running_statistics_that_share_memory_with_an_input() -> None:
    """As if they did not: what is read is what was there before the call."""
    input, mean, invstd, _, running_var, momentum, eps, counts = samples()["batch_norm_gather_stats_with_counts"][0]
    apart = (input, mean.clone(), invstd, mean[0].clone(), running_var.clone(), momentum, eps, counts)
    expected = ops.batch_norm_gather_stats_with_counts(*apart)
    shared = mean.clone()
    together = (input, shared, invstd, shared[0], running_var.clone(), momentum, eps, counts)
    assert_equal(ops.batch_norm_gather_stats_with_counts(*together), expected)
    assert_equal([shared[0]], [apart[3]])


def test_inference_mode() -> None:
    with torch.inference_mode():
        x = random(4, 8)
        assert_equal(ops.layer_norm(x, [8]), normgrad.layer_norm(x, [8]))


def test_meta_tensors() -> None:
    output, mean, rstd = ops.layer_norm(torch.empty(4, 6, 8, device="meta", dtype=torch.float16), [6, 8])
    assert (output.shape, output.dtype) == ((4, 6, 8), torch.float16)
    assert (mean.shape, rstd.shape, mean.dtype, rstd.dtype) == ((4, 1, 1), (4, 1, 1), torch.float32, torch.float32)


@every_call
def test_tensors_on_two_devices_are_refused(name: str, number: int) -> None:
    """The dispatcher takes a call with one tensor on meta for one of meta tensors: results would have no elements."""
    args = samples()[name][number]
    tensors = [position for position, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    for moved in tensors if len(tensors) > 1 else []:
        mixed = [arg.to("meta") if position == moved else arg for position, arg in enumerate(args)]
        late = tensors[1] if moved == 0 else moved  # the first that is not where those before it are
        parameter = OPERATORS[name].names[late]
        with pytest.raises(normgrad.ContractError, match=f"^{name}: {parameter} is on .* and must be on") as error:
            call(name, tuple(mixed))
        assert error.value.parameter == parameter


def test_a_mode_sees_the_call() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = random(4, 8)
    for leaf in (x, x.clone().requires_grad_()):
        ops.layer_norm(leaf, [8])
        with Watch():
            ops.layer_norm(leaf, [8])
        assert ops.layer_norm.default in seen
        seen.clear()
