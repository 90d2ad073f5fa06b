"""Calls of the operators from XLA's programs: checked once for every layout, then launched on XLA's own buffers.

Data comes in the form that is simplest for an operator (rows × columns for LayerNorm, samples × channels × positions
for GroupNorm), and under ``jax.vmap`` with further dimensions in front.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normgrad.backends import backend_for, requested_backend
from normgrad.contract.check import check
from normgrad.contract.dtypes import DType, from_numpy_dtype
from normgrad.contract.plan import Backend, Kernel, Problem, launch, prepare
from normgrad.contract.view import Memory, Shape, View, contiguous_strides
from normgrad.jax.frame import Layout, handler
from normgrad.jax.platform import on_cpu
from normgrad.jax.sharding import as_varying, varying_axes
from normgrad.operators import OPERATORS

_TARGET = "normgrad"
_DATA = ("grad_out", "input", "output", "grad_input")
_STATISTICS = ("mean", "rstd")
_PAGE = 1 << 12

# NumPy 1 computes these when they are first asked for. Numba does that in its import, which may happen on a thread of
# XLA's; there subnormal numbers are flushed, and NumPy would keep 0 as the smallest one for the whole process.
for _dtype in (np.float16, np.float32, np.float64):
    np.finfo(_dtype)


def stand_ins(arrays: dict[str, Layout]) -> dict[str, View]:
    """Views with the layouts of arrays that have no memory yet, for the checks."""
    views, address = {}, _PAGE
    for name, (dtype, shape) in arrays.items():
        nbytes = math.prod(shape) * dtype.itemsize
        views[name] = View(address, shape, contiguous_strides(shape), dtype, Memory(address, nbytes))
        address += -(-max(nbytes, 1) // _PAGE) * _PAGE
    return views


def layout_of(array: Any) -> Layout:
    """The layout of an array of JAX's, also of a traced one."""
    dtype = array.dtype
    if not isinstance(dtype, np.dtype):  # JAX's own, such as that of random keys
        return DType(str(dtype), dtype.itemsize), tuple(array.shape)
    return from_numpy_dtype(dtype), tuple(array.shape)


def call(operator: str, arrays: dict[str, Any], results: dict[str, Any], **attributes: Any) -> list[Any]:
    """The results of an operator, whose dtypes and shapes are given, on traced arrays; None counts as absent."""
    given = {name: array for name, array in arrays.items() if array is not None}
    text = json.dumps({"operator": operator, "arrays": [*given, *results], "attributes": attributes})
    # Now, and not when the program runs: an error here is one of the caller's line.
    layouts = tuple(layout_of(array) for array in (*given.values(), *results.values()))
    _prepared(text.encode(), layouts, requested_backend())
    foreign = jax.ffi.ffi_call(_TARGET, list(results.values()), vmap_method="expand_dims")
    axes = varying_axes(*given.values())
    done = foreign(*(on_cpu(as_varying(array, axes)) for array in given.values()), call=text)
    return [as_varying(array, axes) for array in done]


def result(shape: Shape, dtype: Any = jnp.float32) -> Any:
    """What :func:`call` is to make."""
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclass(frozen=True)
class _Prepared:
    """A kernel, and where in the buffers each launch of it finds its tensors."""

    problem: Problem
    backend: Backend
    kernel: Kernel
    order: tuple[int, ...]  # of the kernel's tensors among the buffers
    offsets: tuple[tuple[int, ...], ...]  # one tuple of bytes per launch

    def run(self, addresses: list[int]) -> None:
        for offsets in self.offsets:
            tensors = [addresses[i] + offsets[i] for i in self.order]
            launch(self.problem, tensors, self.kernel, self.backend)


@lru_cache(maxsize=1024)
def _prepared(text: bytes, layouts: tuple[Layout, ...], backend_name: str | None) -> _Prepared:
    request = json.loads(text)
    operator, names = request["operator"], request["arrays"]
    signature = OPERATORS[operator].signature
    data_rank = 2 if operator.startswith("layer_norm") else 3
    ranks = [data_rank if name in _DATA else 2 if name in _STATISTICS else 1 for name in names]
    batches = [shape[: len(shape) - rank] for (_, shape), rank in zip(layouts, ranks, strict=True)]
    inner = [(dtype, shape[len(shape) - rank :]) for (dtype, shape), rank in zip(layouts, ranks, strict=True)]
    batch = batches[-1]  # a result's: those of arguments may be 1 where they do not differ
    if _is_one_call(operator, ranks, batches):
        folded = math.prod(batch)
        inner = [(d, (folded * s[0], *s[1:])) if r > 1 else (d, s) for (d, s), r in zip(inner, ranks, strict=True)]
        offsets: tuple[tuple[int, ...], ...] = ((0,) * len(names),)
    else:
        offsets = tuple(_offsets(batch, batches, inner))
    views = stand_ins(dict(zip(names, inner, strict=True)))
    arguments = views | request["attributes"] | _sizes(operator, views["input"].shape)
    checked = check(signature, arguments, None, outputs_needed=True)
    problem = Problem(signature, checked.views, checked.attributes)
    backend = backend_for(problem)
    order = tuple(names.index(name) for name in problem.views)
    return _Prepared(problem, backend, prepare(problem, backend), order, offsets)


def _is_one_call(operator: str, ranks: list[int], batches: list[Shape]) -> bool:
    """Whether samples of a forward pass share their weights, so that they are but more rows."""
    if operator.endswith("_backward"):
        return False  # whose sums go over the rows of one sample
    return all(
        batch == batches[-1] if rank > 1 else math.prod(batch) == 1 for rank, batch in zip(ranks, batches, strict=True)
    )


def _offsets(batch: Shape, batches: list[Shape], inner: list[Layout]) -> Iterator[tuple[int, ...]]:
    """Where each sample of a batch lies in every buffer, in bytes."""
    strides = []
    for own, (dtype, shape) in zip(batches, inner, strict=True):
        nbytes = math.prod(shape) * dtype.itemsize
        steps = zip(own, contiguous_strides(own), strict=True)
        strides.append([0 if size == 1 else stride * nbytes for size, stride in steps])
    for index in product(*(range(size) for size in batch)):
        yield tuple(sum(i * step for i, step in zip(index, own, strict=True)) for own in strides)


def _sizes(operator: str, shape: Shape) -> dict[str, Any]:
    if operator.startswith("layer_norm"):
        return {"normalized_shape": list(shape[1:])}
    return dict(zip(("N", "C", "HxW"), shape, strict=True))


def _serve(text: bytes, layouts: tuple[Layout, ...], addresses: list[int]) -> None:
    _prepared(text, layouts, requested_backend()).run(addresses)


_handler = handler(_serve, jax.ffi.include_dir())
jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_handler), platform="cpu")
