"""The operators' two phases: the plans that Python makes, from the program's tensors, behind executor handles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from normgrad.contract.arrays import NotAnArray
from normgrad.contract.check import Signature
from normgrad.contract.parameters import Attribute, Mask, Parameter, Role
from normgrad.contract.parameters import Tensor as TensorParameter
from normgrad.contract.plan import Plan
from normgrad.contract.status import RUNTIME, Status
from normgrad.contract.view import Memory, View
from normgrad.operators import OPERATORS, Operator
from normgrad.sdk import native
from normgrad.sdk.contexts import StreamOfContext, stream_of
from normgrad.sdk.errors import AclError, Refused, check_environment
from normgrad.sdk.exported import exported
from normgrad.sdk.handles import handles
from normgrad.sdk.memory import Allocation, table
from normgrad.sdk.meta import BoolArray, IntArray, Tensor, placeholders
from normgrad.sdk.native import BadAddress

_NULL, _INVALID = Status.ACLNN_ERR_PARAM_NULLPTR, Status.ACLNN_ERR_PARAM_INVALID


class _DeadTensor:
    """Stands for a tensor handle that is none; the plan refuses it where it looks at it, if it does."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __dlpack__(self, **options: Any) -> NoReturn:
        raise NotAnArray(handles.problem(self._handle, "aclTensor"))


class OpExecutor:
    """A plan, and the memory that its tensors must find at the run."""

    def __init__(self, signature: Signature, plan: Plan) -> None:
        self.signature = signature
        self.plan = plan
        self._lock = threading.Lock()  # the memory that a run checks is the memory that it uses

    def block_of(self, name: str, view: View) -> Allocation | None:
        """The live allocation that holds a tensor's storage; None for an empty tensor, which needs none."""
        if view.numel == 0:
            return None
        storage = view.storage
        block = table.holding(storage.address, storage.nbytes)
        if block is None:
            raise self.signature.error(
                name,
                f"has its storage at {storage.address:#x} with {storage.nbytes} bytes, which is not inside memory "
                "that aclrtMalloc gave and that was not freed since, and must be",
            )
        return block

    def check_planned(self) -> None:
        """Refuse tensors whose memory is not there. Those that have none yet may get it before the run."""
        for name, view in self.plan.views.items():
            if not placeholders.has(view.storage.address):
                self.block_of(name, view)

    def rebind(self, name: str, view: View) -> None:
        """Use another tensor of the same layout."""
        with self._lock:
            self.block_of(name, view)
            self.plan.rebind(**{name: view})

    def run(self, address: int, nbytes: int, stream: StreamOfContext) -> None:
        """Run the plan with the caller's workspace."""
        with self._lock:
            self._run(address, nbytes, stream)

    def _run(self, address: int, nbytes: int, stream: StreamOfContext) -> None:
        used: list[Allocation | None] = []
        for name, view in self.plan.views.items():
            if view.numel and placeholders.has(view.storage.address):
                raise self.signature.error(name, "has no memory (its address is null), and must have some by the run")
            used.append(self.block_of(name, view))
        size = self.plan.workspace_size
        if size and address and nbytes >= size:
            used.append(self._workspace_block(address, size))
        device = next(iter(self.plan.views.values())).device
        # The workspace owns the blocks for as long as the work lasts: freed meanwhile, they stay.
        stream.work.run(self.plan, Memory(address, nbytes, device, owner=used))

    def _workspace_block(self, address: int, size: int) -> Allocation:
        block = table.holding(address, size)
        if block is None:
            raise self.signature.error(
                "workspace",
                f"is {address:#x}, of which {size} bytes are needed, and those must lie inside memory that aclrtMalloc "
                "gave and that was not freed since",
            )
        return block


# Phase one


def _argument(signature: Signature, parameter: Parameter, word: Any) -> Any:
    """What the plan gets for one argument of the C call."""
    match parameter:
        case TensorParameter():
            if not word:
                return None
            tensor = handles.find(word, Tensor)
            return _DeadTensor(word) if tensor is None else tensor.view()
        case Mask():
            flags = _values(signature, parameter, word, BoolArray)
            return None if flags is None else tuple(map(bool, flags))
        case Attribute(nullable=True):
            return _values(signature, parameter, word, IntArray)
    return word


def _values(signature: Signature, parameter: Parameter, word: int, kind: type[Any]) -> tuple[Any, ...] | None:
    if not word:
        return None
    array = handles.find(word, kind)
    if array is None:
        raise signature.error(parameter.name, handles.problem(word, f"acl{kind.__name__}"))
    return tuple(array.values)


def _plan(op: Operator, words: Iterable[Any]) -> None:
    signature = op.signature
    *values, size_result, executor_result = words
    for name, pointer in (("workspaceSize", size_result), ("executor", executor_result)):
        if not pointer:
            raise signature.error(name, "is null, and must be given", _NULL)
    arguments = {
        parameter.name: _argument(signature, parameter, word)
        for parameter, word in zip(signature.parameters, values, strict=True)
    }
    outputs = tuple(arguments.pop(output.name) for output in signature.outputs)
    try:
        check_environment()
    except Refused as refused:
        raise signature.error(None, str(refused), _INVALID) from None
    executor = OpExecutor(signature, op.plan(**arguments, out=outputs))
    native.wait_for_work_at_exit("operators")
    executor.check_planned()
    handle = handles.add(executor)
    try:
        _give(signature, "workspaceSize", size_result, executor.plan.workspace_size)
        _give(signature, "executor", executor_result, handle)
    except BaseException:
        handles.remove(handle, OpExecutor)
        raise


def _give(signature: Signature, name: str, result: int, value: int) -> None:
    """Write a result of phase one to the caller's variable."""
    try:
        native.write(result, "Q", value)
    except BadAddress:
        raise signature.error(name, f"is {result:#x}, and must be the address of a variable") from None


# Phase two


def _run(op: Operator, workspace: int, nbytes: int, handle: int, stream: int) -> None:
    signature = op.signature
    if not handle:
        raise signature.error("executor", "is null, and must be given", _NULL)
    executor = handles.find(handle, OpExecutor)
    if executor is None:
        raise signature.error(
            "executor",
            f"{handles.problem(handle, 'aclOpExecutor')}: an executor runs once, unless it was made repeatable before",
        )
    if executor.signature is not signature:
        raise signature.error("executor", f"was made for {executor.signature.c_name}, and must be run by it")
    try:
        where = stream_of(stream)
    except Refused as refused:
        invalid = refused.status == AclError.RT_INVALID_HANDLE
        raise signature.error(None, str(refused), _INVALID if invalid else RUNTIME) from None
    executor.run(workspace, nbytes, where)
    if not executor.plan.repeatable:
        handles.remove(handle, OpExecutor)


def _export(op: Operator) -> None:
    name = op.signature.c_name
    exported(f"{name}GetWorkspaceSize")(lambda *words: _plan(op, words))
    exported(name)(lambda *words: _run(op, *words))


for _op in OPERATORS.values():
    _export(_op)


# Executors


def _executor_of(handle: int) -> OpExecutor:
    if not handle:
        raise Refused(Status.ACLNN_ERR_INNER_NULLPTR, "executor is null, and must be given")
    executor = handles.find(handle, OpExecutor)
    if executor is None:
        raise Refused(_INVALID, f"executor {handles.problem(handle, 'aclOpExecutor')}")
    return executor


@exported("aclSetAclOpExecutorRepeatable")
def set_repeatable(handle: int) -> None:
    """Let an executor run more than once, until it is destroyed."""
    _executor_of(handle).plan.repeatable = True


@exported("aclDestroyAclOpExecutor")
def destroy_executor(handle: int) -> None:
    """End an executor; work that it has begun goes on."""
    _executor_of(handle)
    handles.remove(handle, OpExecutor)


def _rebind(chosen: Callable[[TensorParameter], bool], handle: int, index: int, tensor: int, address: int) -> None:
    """Give a tensor of an executor another address."""
    executor = _executor_of(handle)
    for name, pointer in (("tensor", tensor), ("addr", address)):
        if not pointer:
            raise Refused(Status.ACLNN_ERR_INNER_NULLPTR, f"{name} is null, and must be given")
    signature = executor.signature
    parameters = [parameter for parameter in signature.tensors if chosen(parameter)]
    if index >= len(parameters):
        raise Refused(_INVALID, f"index is {index}, and must be less than {len(parameters)}")
    name = parameters[index].name
    if name not in executor.plan.views:
        raise signature.error(name, "takes no part in this plan, and so has no address")
    described = handles.find(tensor, Tensor)
    if described is None:
        raise Refused(_INVALID, f"tensor {handles.problem(tensor, 'aclTensor')}")
    executor.rebind(name, described.view_at(address))


def _export_rebind(name: str, chosen: Callable[[TensorParameter], bool]) -> None:
    exported(name)(lambda *words: _rebind(chosen, *words))


_export_rebind("aclSetTensorAddr", lambda parameter: True)
_export_rebind("aclSetInputTensorAddr", lambda parameter: parameter.role is not Role.OUTPUT)
_export_rebind("aclSetOutputTensorAddr", lambda parameter: parameter.role is Role.OUTPUT)
