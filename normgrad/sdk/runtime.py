"""The process as a whole: init and finalise, versions, products, system parameters."""

from __future__ import annotations

import os
import threading

import normgrad
from normgrad.contract import products
from normgrad.sdk import contexts, memory_calls, native, streams
from normgrad.sdk.contexts import current_context, required
from normgrad.sdk.devices import close
from normgrad.sdk.errors import AclError, Refused, check_environment, product_in_force
from normgrad.sdk.exported import exported

_MODULES = (memory_calls, streams)  # whose functions are exported by having been imported

_HOST = 1  # ACL_HOST
_HIGHEST = {0: 3, 1: 1, 2: 1}  # of each system parameter: deterministic, debug kernel, strong consistency


class _State:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.initialised = False
        self.finalised = False
        self.parameters: dict[int, int] = {}


_state = _State()


@exported("aclInit")
def init(config_path: int) -> None:
    """Begin; there is nothing to configure, so the path is not read."""
    check_environment()
    with _state.lock:
        if _state.initialised:
            raise Refused(AclError.REPEAT_INITIALIZE, "aclInit was called before, and is called once")
        _state.initialised, _state.finalised = True, False


@exported("aclFinalize")
def finalize() -> None:
    """End, after the work of all streams. Memory and tensors stay until they are freed."""
    with _state.lock:
        if _state.finalised:
            raise Refused(AclError.REPEAT_FINALIZE, "aclFinalize was called before, and is called once")
        if not _state.initialised:
            raise Refused(AclError.UNINITIALIZE, "aclFinalize is called, and aclInit was not")
        _state.initialised, _state.finalised = False, True
    contexts.finish()


@exported("aclnnInit")
def init_operators(config_path: int) -> None:
    """Nothing to do: the operators need no beginning."""


@exported("aclnnFinalize")
def finalize_operators() -> None:
    """Nothing to do."""


def finish_all() -> None:
    """At the end of the process: wait for the work of all streams. What comes later finds the devices closed."""
    try:
        contexts.finish()
    finally:
        close()


@exported("aclrtGetVersion")
def get_version(major: int, minor: int, patch: int) -> None:
    """The version of normgrad."""
    addresses = (required(major, "majorVersion"), required(minor, "minorVersion"), required(patch, "patchVersion"))
    for address, number in zip(addresses, normgrad.__version__.split(".")[:3], strict=True):
        native.write(address, "i", int(number))


@exported("aclrtGetRunMode")
def get_run_mode(result: int) -> None:
    """Programs run on the host."""
    native.write(required(result, "runMode"), "i", _HOST)


@exported("aclrtGetSocName")
def get_soc_name() -> int:
    """The SoC name of the product that calls are checked for; null without one, as CANN has it without a device."""
    product = product_in_force()
    if product is None:
        raise Refused(AclError.INVALID_PARAM, f"no product is chosen: {products.ENVIRONMENT} chooses one")
    given = os.environ.get(products.ENVIRONMENT, "").strip()
    return native.lasting_text(given if product.is_soc(given) else product.value.soc_prefixes[0])


# System parameters: one store for the process, one for each context


def _checked_option(option: int) -> int:
    if option not in _HIGHEST:
        raise Refused(AclError.INVALID_PARAM, f"opt is {option}, and must be one of {', '.join(map(str, _HIGHEST))}")
    return option


def _set(store: dict[int, int], option: int, value: int) -> None:
    highest = _HIGHEST[option]
    if not 0 <= value <= highest:
        raise Refused(AclError.RT_PARAM_INVALID, f"value is {value}, and must be 0 to {highest}")
    store[option] = value


@exported("aclrtSetSysParamOpt")
def set_parameter(option: int, value: int) -> None:
    """Set a parameter of the process."""
    _set(_state.parameters, _checked_option(option), value)


@exported("aclrtGetSysParamOpt")
def get_parameter(option: int, result: int) -> None:
    """A parameter of the process; 0 while it is not set."""
    _checked_option(option)
    native.write(required(result, "value"), "q", _state.parameters.get(option, 0))


@exported("aclrtCtxSetSysParamOpt")
def set_context_parameter(option: int, value: int) -> None:
    """Set a parameter of the thread's context."""
    _set(current_context().parameters, _checked_option(option), value)


@exported("aclrtCtxGetSysParamOpt")
def get_context_parameter(option: int, result: int) -> None:
    """A parameter of the thread's context; refused while it is not set."""
    _checked_option(option)
    required(result, "value")
    store = current_context().parameters
    if option not in store:
        raise Refused(AclError.RT_SYSPARAMOPT_NOT_SET, f"option {option} is not set in this context")
    native.write(result, "q", store[option])
