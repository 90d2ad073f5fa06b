"""Ways to break exactly one rule of a valid call, each with the one right answer.

What is allowed is said here once more, read off the contract's tables, so that the package's own tables are
checked and not just repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from normgrad import Product
from normgrad.contract.arrays import as_view
from normgrad.contract.formats import Format
from support.case import Case
from support.dtypes import BF16, F32, FLOATS, NUMPY, TORCH, dtype_name

NULLPTR, INVALID, NO_KERNEL = 161001, 161002, 561003

ALL_DTYPES = tuple(NUMPY)
BLOCKED = [label for label in Format if label.name.startswith(("NC1", "NDC1", "FRACTAL"))]


@dataclass
class Break:
    """A broken call: what is put in place of what, and what must come of it."""

    rule: str
    parameter: str | None
    status: int = INVALID
    arguments: dict[str, Any] = field(default_factory=dict)
    out: tuple[Any, ...] | None = None
    product: Product | None = None
    only_plan: bool = False
    memory: list[np.ndarray] = field(default_factory=list)  # whose bytes are watched besides the arena's


def given_tensors(case: Case) -> list[str]:
    """The tensors of a call in the order of the C interface: inputs, then wanted outputs."""
    inputs = [name for name in case.arguments if name in case.places]
    return inputs + [o.name for o in case.outputs if o.wanted and o.name in case.places]


def tensor_of(case: Case, name: str) -> Any:
    for output, array in zip(case.outputs, case.out, strict=True):
        if output.name == name and output.wanted:
            return array
    return case.arguments[name]


def with_tensor(case: Case, rule: str, name: str, array: Any, *memory: np.ndarray, blame: str | None = None) -> Break:
    """A call with another array for one of its tensors."""
    broken = Break(rule, blame or name, memory=list(memory))
    if name in case.arguments and not any(o.name == name for o in case.outputs):
        broken.arguments = {name: array}
    else:
        broken.out = tuple(array if o.name == name else old for o, old in zip(case.outputs, case.out, strict=True))
    return broken


# Dtypes: what is allowed in a call, tensor by tensor


def _dtype(case: Case, name: str) -> str | None:
    return case.places[name].dtype if name in given_tensors(case) else None


def _not_narrower(dtype: str | None) -> set[str]:
    return {F32} if dtype == F32 else set(FLOATS)


def allowed_dtypes(case: Case, name: str) -> set[str]:
    """The dtypes that a tensor may have beside the others of the call."""
    family = case.operator.partition("_norm")[0]
    data = _dtype(case, "grad_out") or _dtype(case, "input")
    weight, mean = _dtype(case, "weight"), _dtype(case, "mean")
    backward = case.operator.endswith("backward")
    if name in ("counter", "counts"):
        return {"int32", "float16", "float32"}
    if family == "batch" or name == "grad_out" or (name == "input" and not backward):
        return set(FLOATS)
    if name in ("input", "output", "grad_input"):
        return {data}
    if name == "mean":
        return _not_narrower(data) if family == "layer" else {data, F32}
    if name == "rstd":
        return {mean} if mean else allowed_dtypes(case, "mean")
    if name == "weight":
        return {mean, data} if family == "group" and backward else {data, F32}
    if name == "bias":
        return {weight} if weight else {data, F32}
    return {weight} if weight else {data if family == "layer" else mean}  # grad_weight, grad_bias


def wrong_dtypes(case: Case, rng: random.Random) -> Iterator[Break]:
    for name in given_tensors(case):
        wrong = rng.choice([dtype for dtype in ALL_DTYPES if dtype not in allowed_dtypes(case, name)])
        shape = case.places[name].shape
        if rng.random() < 0.5:
            array: Any = np.zeros(shape, NUMPY[wrong])
            yield with_tensor(case, f"dtype {wrong}", name, array, array)
        else:
            array = torch.zeros(shape, dtype=TORCH[wrong])
            yield with_tensor(case, f"dtype {wrong}", name, array)
        swapped = np.zeros(shape, np.dtype(np.float32).newbyteorder())
        yield with_tensor(case, "byte order", name, swapped, swapped)


# What is no array at all, or one of a kind that has no memory


def no_arrays(case: Case, rng: random.Random) -> Iterator[Break]:
    for name in given_tensors(case):
        yield with_tensor(case, "no array", name, rng.choice(([1.0], "text", 3.5, object(), {"{odd}": 1}, b"bytes")))
        shape, dtype = case.places[name].shape, TORCH[case.places[name].dtype]
        yield with_tensor(case, "meta tensor", name, torch.empty(shape, dtype=dtype, device="meta"))
        yield with_tensor(case, "sparse tensor", name, torch.zeros(shape, dtype=dtype).to_sparse())


def nulls(case: Case, rng: random.Random) -> Iterator[Break]:
    optional = {"weight", "bias", "running_mean", "running_var"}
    required = [name for name in case.arguments if name in case.places and name not in optional]
    for name in [*required, *({"normalized_shape", "output_mask"} & case.arguments.keys())]:
        yield Break("null", name, NULLPTR, {name: None})
    may_miss = {"mean", "rstd"} if case.operator == "layer_norm" else set()
    missing = [
        o.name for o, a in zip(case.outputs, case.out, strict=True) if o.wanted and a is None and o.name not in may_miss
    ]
    if missing:
        yield Break("null output", missing[0], NULLPTR, only_plan=True)


# Formats, ranks and shapes


def formats(case: Case, rng: random.Random) -> Iterator[Break]:
    for name in given_tensors(case):
        view = replace(as_view(tensor_of(case, name)), format=rng.choice([*BLOCKED, Format.UNDEFINED, 999]))
        yield with_tensor(case, "format", name, view)


def _like(case: Case, rule: str, name: str, shape: tuple[int, ...], blame: str | None = None) -> Break:
    array = np.zeros(shape, NUMPY[case.places[name].dtype])
    return with_tensor(case, rule, name, array, array, blame=blame)


def _is_vector(case: Case, name: str) -> bool:
    data = ("grad_out", "input", "grad_input", "output", "counter", "counts")
    return case.operator.startswith("batch") and name not in data


def ranks(case: Case, rng: random.Random) -> Iterator[Break]:
    gathering = "gather" in case.operator
    for name in given_tensors(case):
        shape = case.places[name].shape
        if gathering and name in ("mean", "invstd"):
            yield _like(case, "rank", name, (1, *shape))
        elif _is_vector(case, name):
            yield _like(case, "rank", name, rng.choice(((1, *shape), (), (*shape, 1))))
        else:
            yield _like(case, "rank 9", name, (1,) * (9 - len(shape)) + shape)
            if case.operator.startswith("batch") and name not in ("counter", "counts"):
                yield _like(case, "rank 1", name, shape[1:2])
            if case.operator.startswith("layer") and name != "input":
                yield _like(case, "rank 0", name, ())


def _other_size(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of the same rank (1 for none) with another number of elements."""
    if not shape:
        return (2,)
    return (*shape[:-1], shape[-1] + 1) if 0 not in shape[:-1] else (1,) * len(shape)


def shapes(case: Case, rng: random.Random) -> Iterator[Break]:
    layer, batch = case.operator.startswith("layer"), case.operator.startswith("batch")
    backward = case.operator.endswith("backward")
    for name in given_tensors(case):
        blame = name
        if name == "counter" or (name == "input" and batch and not backward):
            continue  # no rule of their own
        if name == "grad_out" and (layer or batch):
            blame = "input"  # which must have grad_out's shape
        shape = case.places[name].shape
        # The rows of mean are the ranks, of which there may be any number; its columns are not.
        per_rank = "gather" in case.operator and name == "mean"
        wrong = (shape[0], shape[1] + 1) if per_rank else _other_size(shape)
        if name == "input" and layer:
            normalized = tuple(case.arguments["normalized_shape"])
            if wrong[len(wrong) - len(normalized) :] != normalized:
                blame = "normalized_shape"  # an attribute, and those come before shapes
            elif not backward:
                continue  # another shape that is as good
        yield _like(case, "shape", name, wrong, blame)
    first = "grad_out" if backward else "input"
    if batch:
        shape = case.places[first].shape
        yield _like(case, "no channels", first, (shape[0], 0, *shape[2:]))


# Memory


def memories(case: Case, rng: random.Random) -> Iterator[Break]:
    for name in given_tensors(case):
        place = case.places[name]
        dtype, elements = NUMPY[place.dtype], int(np.prod(place.shape, dtype=int))
        if elements == 0:
            continue
        short = np.zeros(elements - 1, dtype)
        strides = np.empty(place.shape, dtype).strides
        past = np.lib.stride_tricks.as_strided(short, place.shape, strides)
        yield with_tensor(case, "past its storage", name, past, short)
        tensor = torch.zeros(place.shape, dtype=TORCH[place.dtype])
        tensor.untyped_storage().resize_((elements - 1) * dtype.itemsize)
        yield with_tensor(case, "storage shrunk", name, tensor)
        raw = np.zeros((elements + 1) * dtype.itemsize, np.uint8)
        crooked = np.ndarray(place.shape, dtype, raw, 1)
        yield with_tensor(case, "misaligned", name, crooked, raw)


def output_memories(case: Case, rng: random.Random) -> Iterator[Break]:
    written = [name for name in given_tensors(case) if name in case.in_place or name not in case.arguments]
    for name in written:
        place = case.places[name]
        dtype = NUMPY[place.dtype]
        fixed = np.zeros(place.shape, dtype)
        fixed.flags.writeable = False
        if fixed.size:
            yield with_tensor(case, "read-only", name, fixed, fixed)
        wide = [axis for axis, size in enumerate(place.shape) if size > 1]
        if wide and fixed.size:
            strides = list(fixed.strides)
            strides[rng.choice(wide)] = 0
            storage = np.zeros(place.shape, dtype)
            yield with_tensor(
                case, "stride 0", name, np.lib.stride_tricks.as_strided(storage, place.shape, strides), storage
            )
    for name, other in zip(written[1:], written, strict=False):
        place = case.places[name]
        if place.shape == case.places[other].shape and 0 not in place.shape:
            shared = as_view(tensor_of(case, other))
            if dtype_name(tensor_of(case, name)) == dtype_name(tensor_of(case, other)):
                yield with_tensor(case, "shared outputs", name, shared)


# Attributes and products


def attributes(case: Case, rng: random.Random) -> Iterator[Break]:
    bad: dict[str, list[Any]] = {
        "output_mask": [(True, True), (True,) * 4, (), True, ("x", True, True), (None, True, True)],
        "N": [-1, 1.5, "2", None, 2**63, -(2**70), [1]],
        "C": [-1, 1.5, "{C}", None],
        "HxW": [-1, 0.0, None],
        "group": [0, -1, 1.5, None, 2**64],
        "eps": ["x", None, 1j, [1e-5]],
        "momentum": ["x", None, 1j],
        "input_g": ["yes", None, 1.0],
        "weight_g": ["yes", None],
        "bias_g": ["yes", None],
    }
    if "normalized_shape" in case.arguments:
        normalized = tuple(case.arguments["normalized_shape"])
        rank = len(case.places["input"].shape)
        bad["normalized_shape"] = [
            (),
            (*normalized[:-1], normalized[-1] + 1),
            (1,) * (rank + 1 - len(normalized)) + normalized,
            (*normalized[:-1], -1),
            (*normalized[:-1], 1.5),
            "{x}",
        ]
    if case.arguments.get("C"):
        bad["group"].append(case.arguments["C"] + 1)
    for name, values in bad.items():
        if name in case.arguments:
            yield Break("attribute", name, arguments={name: rng.choice(values)})
    if "N" in case.arguments:
        yield Break("overflow", "N", arguments={"N": 2**62, "C": 4 * case.arguments["group"]})


def outs(case: Case, rng: random.Random) -> Iterator[Break]:
    yield Break("length of out", "out", out=rng.choice(((), (*case.out, None))))


#: The products that lack an operator, where they are not those that lack most.
LACKING = {
    "layer_norm": (Product.ATLAS_INFERENCE,),
    "layer_norm_backward": (Product.ATLAS_200I_500_A2,),
    "group_norm": (Product.ATLAS_200I_500_A2,),
}
_LACK_MOST = (Product.ATLAS_200I_500_A2, Product.ATLAS_INFERENCE)


def products(case: Case, rng: random.Random) -> Iterator[Break]:
    yield Break("product without it", None, NO_KERNEL, product=rng.choice(LACKING.get(case.operator, _LACK_MOST)))
    narrow = [name for name in given_tensors(case) if case.places[name].dtype == BF16]
    if narrow:
        yield Break("no bfloat16", narrow[0], product=Product.ATLAS_TRAINING)


#: Every kind of break, each giving those that the call allows.
KINDS: tuple[Callable[[Case, random.Random], Iterator[Break]], ...] = (
    wrong_dtypes,
    no_arrays,
    nulls,
    formats,
    ranks,
    shapes,
    memories,
    output_memories,
    attributes,
    outs,
    products,
)
