"""The runtime's error codes, and the exception that carries one."""

from __future__ import annotations

import os
from datetime import datetime
from enum import IntEnum

from normgrad.backends import chosen
from normgrad.contract.products import ENVIRONMENT, Product, current_product
from normgrad.contract.status import ContractError, Names, Status
from normgrad.operators import OPERATORS
from normgrad.sdk.native import BadAddress
from normgrad.threads import get_num_threads


class AclError(IntEnum):
    """The codes of the runtime's functions."""

    SUCCESS = 0
    INVALID_PARAM = 100000
    UNINITIALIZE = 100001
    REPEAT_INITIALIZE = 100002
    REPEAT_FINALIZE = 100037
    BAD_ALLOC = 200000
    INTERNAL_ERROR = 500000
    RT_PARAM_INVALID = 107000
    RT_INVALID_DEVICEID = 107001
    RT_CONTEXT_NULL = 107002
    RT_INVALID_HANDLE = 107017
    RT_WAIT_TIMEOUT = 107019
    RT_SYSPARAMOPT_NOT_SET = 107021
    RT_MEMORY_ALLOCATION = 207001


class Refused(Exception):
    """A call that is answered with an error code; the text says what was given and what would be right."""

    def __init__(self, status: int, text: str) -> None:
        self.status = int(status)
        super().__init__(text)


def product_in_force() -> Product | None:
    """Return the product that calls are checked for; refuse a name in the environment that no product has."""
    try:
        return current_product()
    except ValueError as problem:
        raise Refused(AclError.INVALID_PARAM, f"{ENVIRONMENT}: {problem}") from None


def check_environment() -> None:
    """Refuse a value that an environment variable of the operators cannot have."""
    product_in_force()
    try:
        chosen("cpu")
        get_num_threads()
    except ValueError as problem:
        raise Refused(AclError.INVALID_PARAM, str(problem)) from None


def text_of(error: BaseException) -> str:
    """An error in words, with the operators and their parameters called by their C names."""
    if isinstance(error, ContractError):
        signature = OPERATORS[error.operator].signature
        return error.text(signature.c_name, Names({p.name: p.c_name for p in signature.parameters}))
    return str(error) if isinstance(error, Refused | BadAddress) else f"{type(error).__name__}: {error}"


def dressed(status: int, text: str) -> str:
    """An error text as ``aclGetRecentErrMsg`` gives it."""
    of_parameters = status in (Status.ACLNN_ERR_PARAM_NULLPTR, Status.ACLNN_ERR_PARAM_INVALID)
    label = "AclNN_Parameter_Error(EZ1001)" if of_parameters else f"Acl_Error({status})"
    now = datetime.now()
    clock = f"{now:%Y-%m-%d-%H:%M:%S}.{now.microsecond // 1000:03}.{now.microsecond % 1000:03}"
    return f"[PID:{os.getpid()}] {clock} {label}: {text}"
