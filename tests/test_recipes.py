"""Calls of a layout that was seen before take a short way; it must end where the long one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import normgrad
from normgrad.operators.calls import Calls

SHAPE = (4, 6)


@pytest.fixture
def in_full(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that take the long way, by operator. All have forgotten what they saw before."""
    calls: list[str] = []
    original = Calls.in_full

    def counted(self: Calls, *args: Any) -> Any:
        calls.append(self._signature.name)
        return original(self, *args)

    monkeypatch.setattr(Calls, "in_full", counted)
    for name in ("layer_norm_backward", "batch_norm_gather_stats_with_counts"):
        getattr(normgrad, name)._calls.recipes.forget()
    return calls


def _numpy(values: np.ndarray) -> Any:
    return values.copy()


def _torch(values: np.ndarray) -> Any:
    return torch.from_numpy(values.copy())


KINDS = pytest.mark.parametrize("kind", [_numpy, _torch])
Kind = Callable[[np.ndarray], Any]


def _inputs(kind: Kind, seed: int = 0) -> tuple[Any, ...]:
    """grad_out, input, normalized_shape, mean, rstd and weight of a LayerNorm."""
    rng = np.random.default_rng(seed)
    data, statistics = rng.normal(size=(2, *SHAPE)), rng.uniform(0.5, 1.5, size=(2, SHAPE[0], 1))
    arrays = [kind(values.astype(np.float32)) for values in (*data, *statistics, rng.normal(size=SHAPE[1]))]
    return (*arrays[:2], SHAPE[1:], *arrays[2:])


def _outputs(kind: Kind) -> tuple[Any, ...]:
    return tuple(kind(np.full(shape, np.nan, np.float32)) for shape in (SHAPE, SHAPE[1:], SHAPE[1:]))


def _right(inputs: tuple[Any, ...]) -> list[np.ndarray]:
    return [np.asarray(result) for result in normgrad.layer_norm_backward(*map(_copied, inputs))]


def _copied(argument: Any) -> Any:
    return np.asarray(argument).copy() if isinstance(argument, np.ndarray | torch.Tensor) else argument


def _assert_right(results: Any, expected: list[np.ndarray]) -> None:
    for actual, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(actual), right)


@KINDS
def test_given_outputs_take_the_short_way(kind: Kind, in_full: list[str]) -> None:
    for seed in range(3):
        inputs, outputs = _inputs(kind, seed), _outputs(kind)
        expected = _right(inputs)
        del in_full[:]
        results = normgrad.layer_norm_backward(*inputs, out=outputs)
        assert all(result is output for result, output in zip(results, outputs, strict=True))
        _assert_right(results, expected)
        assert len(in_full) == (seed == 0)


@KINDS
def test_some_given_some_made_some_not_wanted(kind: Kind, in_full: list[str]) -> None:
    for seed in range(2):
        inputs, (grad_input, *_, grad_bias) = _inputs(kind, seed), _outputs(kind)
        expected = _right(inputs)
        del in_full[:]
        results = normgrad.layer_norm_backward(
            *inputs, output_mask=(True, True, False), out=(grad_input, None, grad_bias)
        )
        assert results[0] is grad_input
        assert results[2] is None
        _assert_right(results[:2], expected[:2])
        assert np.isnan(np.asarray(grad_bias)).all()
        assert len(in_full) == (seed == 0)


@KINDS
def test_an_output_on_an_input_is_another_recipe(kind: Kind, in_full: list[str]) -> None:
    """Apart, on the input, apart again: the kernel prepared for one is not taken for the other."""
    for number, on_input in enumerate((False, True, False, True)):
        inputs, (grad_input, *others) = _inputs(kind, number), _outputs(kind)
        expected = _right(inputs)
        del in_full[:]
        results = normgrad.layer_norm_backward(*inputs, out=(inputs[1] if on_input else grad_input, *others))
        _assert_right(results, expected)
        assert len(in_full) == (number < 2)


@KINDS
def test_an_output_partly_on_an_input_takes_the_long_way(kind: Kind, in_full: list[str]) -> None:
    for _ in range(2):
        normgrad.layer_norm_backward(*_inputs(kind), out=_outputs(kind))
    inputs = list(_inputs(kind))
    expected = _right(tuple(inputs))
    memory = kind(np.zeros(5 * SHAPE[1], np.float32))
    whole = memory.reshape(5, SHAPE[1])
    whole[1:] = inputs[1]
    inputs[1] = whole[1:]
    for _ in range(2):
        whole[1:] = kind(np.asarray(_inputs(kind)[1]))
        del in_full[:]
        results = normgrad.layer_norm_backward(*inputs, out=(whole[:4], *_outputs(kind)[1:]))
        _assert_right(results, expected)
        assert in_full == ["layer_norm_backward"]


@KINDS
def test_outputs_that_share_memory_are_refused_after_others_were_taken(kind: Kind, in_full: list[str]) -> None:
    for _ in range(2):
        normgrad.layer_norm_backward(*_inputs(kind), out=_outputs(kind))
    grad_input, grad_weight, _ = _outputs(kind)
    for same in ((grad_input, grad_weight, grad_weight), (grad_input, grad_input[1], grad_weight)):
        with pytest.raises(normgrad.ContractError, match="shares memory with"):
            normgrad.layer_norm_backward(*_inputs(kind), out=same)


def test_a_read_only_output_is_refused_after_a_writable_one_was_taken(in_full: list[str]) -> None:
    for _ in range(2):
        normgrad.layer_norm_backward(*_inputs(_numpy), out=_outputs(_numpy))
    outputs = _outputs(_numpy)
    outputs[0].flags.writeable = False
    with pytest.raises(normgrad.ContractError, match="is read-only"):
        normgrad.layer_norm_backward(*_inputs(_numpy), out=outputs)


@KINDS
def test_running_statistics(kind: Kind, in_full: list[str]) -> None:
    ones = np.ones((2, 3), np.float32)
    expected = np.zeros(3, np.float32)
    for call in range(3):
        running = kind(expected), kind(expected)
        counts = kind(np.array([4, 4], np.int32))
        arguments = (kind(np.ones((4, 3, 2), np.float32)), kind(ones), kind(ones), *running, 0.5, 0.0, counts)
        normgrad.batch_norm_gather_stats_with_counts(*arguments)
        expected = expected + np.float32(0.5) * (1 - expected)
        np.testing.assert_array_equal(np.asarray(running[0]), expected)
        assert len(in_full) == 1, call
    shared = kind(expected)
    with pytest.raises(normgrad.ContractError, match="shares memory with"):
        normgrad.batch_norm_gather_stats_with_counts(*arguments[:3], shared, shared, *arguments[5:])


def test_autograd_hears_of_every_write(in_full: list[str]) -> None:
    outputs = _outputs(_torch)
    for _ in range(3):
        versions = [output._version for output in outputs]
        normgrad.layer_norm_backward(*_inputs(_torch), out=outputs)
        assert [output._version for output in outputs] == [version + 1 for version in versions]
    assert len(in_full) == 1


def test_one_tensor_for_several_arguments(in_full: list[str]) -> None:
    for seed in range(3):
        grad_out, other, shape, mean, _, weight = _inputs(_torch, seed)
        del in_full[:]
        same = normgrad.layer_norm_backward(grad_out, grad_out, shape, mean, mean, weight)
        assert len(in_full) == (seed == 0)
        apart = normgrad.layer_norm_backward(grad_out, grad_out.clone(), shape, mean, mean.clone(), weight)
        _assert_right(same, [result.numpy() for result in apart])
        del other


def test_a_tensor_beyond_its_storage_is_refused_after_a_sound_one_was_taken(in_full: list[str]) -> None:
    for _ in range(2):
        normgrad.layer_norm_backward(*_inputs(_torch))
    inputs = _inputs(_torch)
    grown = torch.zeros(SHAPE)
    grown.untyped_storage().resize_(8)
    with pytest.raises(normgrad.ContractError, match="reaches outside its storage"):
        normgrad.layer_norm_backward(grown, *inputs[1:])


def test_a_negated_tensor_is_read_as_what_it_says(in_full: list[str]) -> None:
    for seed in range(2):
        inputs = _inputs(_torch, seed)
        plain = normgrad.layer_norm_backward(inputs[0].neg(), *inputs[1:])
        negated = normgrad.layer_norm_backward(torch._neg_view(inputs[0]), *inputs[1:])
        _assert_right(negated, [result.numpy() for result in plain])


def test_arrays_over_memory_of_something_else(in_full: list[str]) -> None:
    """Read from a buffer, or shared with a tensor: not every array owns its memory or is a view of one that does."""
    for seed in range(3):
        inputs = _inputs(_numpy, seed)
        expected = _right(inputs)
        del in_full[:]
        x = np.frombuffer(inputs[0].tobytes(), np.float32).reshape(SHAPE)
        results = normgrad.layer_norm_backward(x, torch.from_numpy(inputs[1]).numpy(), *inputs[2:])
        _assert_right(results, expected)
        assert len(in_full) == (seed == 0)
