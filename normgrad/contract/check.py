"""The order in which a call is checked, the same for every operator.

Null inputs, length of the mask, null outputs that are wanted, an operator that the product lacks, dtypes,
attributes, formats, shapes; in each, the parameters in the order of the C interface. The first failure is the one
reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from normgrad.contract.arrays import NotAnArray, as_view
from normgrad.contract.dtypes import listed
from normgrad.contract.formats import PLAIN_FORMATS, format_name
from normgrad.contract.overlap import overlap, overlaps_itself
from normgrad.contract.parameters import Attribute, Broken, Call, Mask, Parameter, Role, Tensor
from normgrad.contract.products import Family, Product
from normgrad.contract.rules import INT64_MAX, flag, items_of
from normgrad.contract.status import INVALID, NO_KERNEL, NULLPTR, ContractError, Status, counted, quote, shown
from normgrad.contract.view import View


@dataclass(frozen=True)
class Signature:
    """An operator's names and its table of parameters, in the order of the C interface."""

    name: str
    c_name: str
    family: Family
    parameters: tuple[Parameter, ...]

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(p for p in self.parameters if isinstance(p, Tensor))

    @cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        return tuple(p for p in self.tensors if p.role is Role.OUTPUT)

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        return tuple(output.name for output in self.outputs)

    def is_output(self, name: str) -> bool:
        """Whether the tensor of that name is a result, and not read."""
        return name in self.output_names

    def is_written(self, name: str) -> bool:
        """Whether calls write to the tensor of that name."""
        return any(tensor.name == name and tensor.is_written for tensor in self.tensors)

    def error(self, parameter: str | None, problem: str, status: Status = INVALID) -> ContractError:
        """The error of a parameter; the problem goes on from the parameter's name."""
        text = problem if parameter is None else f"{{{parameter}}} {problem}"
        return ContractError(status, self.name, parameter, text)


def check(signature: Signature, arguments: Mapping[str, Any], product: Product | None, *, outputs_needed: bool) -> Call:
    """Check a call against its table and return it with views and attributes.

    With ``outputs_needed`` a wanted output must be there; otherwise one that is not there is not checked.
    """
    call = Call(arguments, product)
    _check_null_inputs(signature, call)
    _read_masks(signature, call)
    if outputs_needed:
        _check_null_outputs(signature, call)
    _check_product(signature, call)
    # Attributes may run the caller's code, which could take an array's memory away: they are read first.
    broken = _read_attributes(signature, call)
    tensors = tuple(_tensors_given(signature, call))
    views = _views(call, tensors)
    for parameter in tensors:
        _check_dtype(signature, call, parameter, views[parameter.name])
    _check_attributes(signature, call, broken)
    for parameter in tensors:
        _check_format(signature, parameter, call.views[parameter.name])
    for parameter in tensors:
        _check_shape(signature, call, parameter)
    check_memory(signature, call.views)
    return call


def _check_null_inputs(signature: Signature, call: Call) -> None:
    for parameter in signature.parameters:
        match parameter:
            case Tensor(role=Role.OUTPUT) | Tensor(optional=True) | Attribute(nullable=False):
                continue
        if call.arguments.get(parameter.name) is None:
            raise signature.error(parameter.name, "is null, and must be given", NULLPTR)


def _read_masks(signature: Signature, call: Call) -> None:
    for parameter in signature.parameters:
        if isinstance(parameter, Mask):
            try:
                call.attributes[parameter.name] = _flags(call.arguments[parameter.name], parameter.length)
            except Broken as broken:
                raise signature.error(parameter.name, str(broken)) from None
        elif isinstance(parameter, Attribute) and parameter.read is flag:
            _read(signature, call, parameter)  # flags choose outputs as masks do


def _flags(given: Any, length: int) -> tuple[bool, ...]:
    try:
        items = items_of(given)
    except TypeError:
        raise Broken(f"is {quote(shown(given))}, and must be {length} booleans") from None
    try:
        flags = tuple(flag(item) for item in items)
    except Broken as broken:
        raise Broken(f"is {quote(shown(given))}: an element {broken}") from None
    if len(flags) != length:
        raise Broken(f"has {counted(len(flags), 'element')}, and must have {length}")
    return flags


def _check_null_outputs(signature: Signature, call: Call) -> None:
    for parameter in signature.outputs:
        if call.arguments.get(parameter.name) is None and not parameter.optional and parameter.wanted(call):
            raise signature.error(parameter.name, "is null, and is a requested output: it must be given", NULLPTR)


def _check_product(signature: Signature, call: Call) -> None:
    if call.product is not None and not call.product.has(signature.family):
        raise signature.error(
            None,
            f"{call.product.label} has no {signature.c_name}; choose another product, or none",
            NO_KERNEL,
        )


def _tensors_given(signature: Signature, call: Call) -> Iterator[Tensor]:
    for parameter in signature.tensors:
        if call.arguments.get(parameter.name) is not None and parameter.wanted(call):
            yield parameter


def _views(call: Call, tensors: Sequence[Tensor]) -> dict[str, View | NotAnArray]:
    """The tensors' views, or why they have none. NumPy's arrays come last: all others may run the caller's code."""
    given = {tensor.name: call.arguments[tensor.name] for tensor in tensors}
    order = sorted(given, key=lambda name: isinstance(given[name], np.ndarray))
    return {name: _view_or_problem(given[name]) for name in order}


def _view_or_problem(array: Any) -> View | NotAnArray:
    try:
        return as_view(array)
    except NotAnArray as problem:
        return problem


def _check_dtype(signature: Signature, call: Call, parameter: Tensor, view: View | NotAnArray) -> None:
    if isinstance(view, NotAnArray):
        raise signature.error(parameter.name, quote(view)) from view.__cause__
    expected = parameter.dtype(call)
    if view.dtype not in expected.allowed:
        why = f" ({expected.why})" if expected.why else ""
        raise signature.error(parameter.name, f"is {view.dtype}, and must be {listed(expected.allowed)}{why}")
    call.views[parameter.name] = view


def _read(signature: Signature, call: Call, parameter: Attribute) -> None:
    try:
        call.attributes[parameter.name] = parameter.read(call.arguments.get(parameter.name))
    except Broken as broken:
        raise signature.error(parameter.name, str(broken)) from None


def _read_attributes(signature: Signature, call: Call) -> ContractError | None:
    """Read the attributes up to the first that is broken; return its error, which others come before."""
    try:
        for parameter in signature.parameters:
            if isinstance(parameter, Attribute) and parameter.name not in call.attributes:
                _read(signature, call, parameter)
    except ContractError as error:
        return error
    return None


def _check_attributes(signature: Signature, call: Call, error: ContractError | None) -> None:
    if error is not None:
        raise error
    for parameter in signature.parameters:
        if isinstance(parameter, Attribute) and parameter.follows is not None:
            try:
                parameter.follows(call)
            except Broken as broken:
                raise signature.error(parameter.name, str(broken)) from None


def _check_format(signature: Signature, parameter: Tensor, view: View) -> None:
    if view.format not in PLAIN_FORMATS:
        plain = ", ".join(label.name for label in PLAIN_FORMATS)
        text = f"has the format {format_name(view.format)}, and must have one of {plain}"
        raise signature.error(parameter.name, text)


def _check_shape(signature: Signature, call: Call, parameter: Tensor) -> None:
    view = call.views[parameter.name]
    lowest, highest = parameter.ranks
    if not lowest <= view.rank <= highest:
        ranks = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
        rank = counted(view.rank, "dimension")
        raise signature.error(parameter.name, f"has {rank} (shape {view.shape}), and must have {ranks}")
    if any(size < 0 for size in view.shape):
        raise signature.error(parameter.name, f"has the shape {view.shape}, and no dimension may be negative")
    if view.numel * view.dtype.itemsize > INT64_MAX:
        raise signature.error(
            parameter.name, f"has the shape {view.shape}, and its bytes must fit in a signed 64-bit integer"
        )
    if parameter.shape is None:
        return
    try:
        expected = parameter.shape(call)
    except Broken as broken:
        raise signature.error(parameter.name, str(broken)) from None
    if expected.holds(view.shape, view.numel):
        return
    if expected.elements is None:
        raise signature.error(
            parameter.name, f"has the shape {view.shape}, and must have {expected.shape} ({expected.why})"
        )
    elements = counted(view.numel, "element")
    raise signature.error(
        parameter.name, f"has {elements} (shape {view.shape}), and must have {expected.elements} ({expected.why})"
    )


def check_memory(signature: Signature, views: Mapping[str, View]) -> None:
    """The rules that depend on where the views lie: one device, inside their storage, outputs without overlap."""
    home = next(iter(views.values())).device
    written: list[str] = []
    for parameter in signature.tensors:
        name = parameter.name
        if name not in views:
            continue
        view = views[name]
        check_device(signature, name, view.device, home)
        _check_address(signature, name, view)
        if not parameter.is_written:
            continue
        if not view.writable:
            raise signature.error(name, "is read-only, and is written: it must be writable")
        if overlaps_itself(view):
            raise signature.error(
                name, f"overlaps itself (shape {view.shape}, strides {view.strides}), and an output must not"
            )
        for other in written:
            if overlap(view, views[other]):
                raise signature.error(name, f"shares memory with {{{other}}}, and outputs must not share memory")
        written.append(name)


def check_device(signature: Signature, name: str, device: object, home: object) -> None:
    """Refuse a tensor on another device than the first one's."""
    if device != home:
        raise signature.error(name, f"is on {quote(device)}, and must be on {quote(home)} as the tensors before it")


def _check_address(signature: Signature, name: str, view: View) -> None:
    if view.numel == 0:
        return
    if view.address == 0:
        raise signature.error(name, "has no memory (its address is null), and must have some")
    if view.address % view.dtype.itemsize:
        raise signature.error(
            name,
            f"lies at address {view.address:#x}, and must be aligned to its elements of {view.dtype.itemsize} bytes",
        )
    reach, storage, itemsize = view.reach, view.storage, view.dtype.itemsize
    if reach.nbytes > INT64_MAX:
        raise signature.error(
            name,
            f"reaches over {reach.nbytes} bytes (shape {view.shape}, strides {view.strides}), which must fit in a "
            "signed 64-bit integer",
        )
    if not view.inside_storage:
        first, last = (reach.address - storage.address) // itemsize, (reach.end - storage.address) // itemsize - 1
        raise signature.error(
            name,
            f"reaches outside its storage (elements {first} to {last} of {storage.nbytes // itemsize}), "
            "and must stay inside",
        )
