"""Where calls from C arrive: each is carried to its function, and every outcome becomes a code."""

from __future__ import annotations

import atexit
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from normgrad.contract.status import ContractError, Status
from normgrad.sdk import meta, native, operators, runtime
from normgrad.sdk.errors import AclError, Refused, dressed, text_of
from normgrad.sdk.exported import FUNCTIONS
from normgrad.sdk.native import BadAddress

__all__ = ["start"]

_MODULES = (meta, operators, runtime)  # whose functions are exported by having been imported


@dataclass(frozen=True)
class _Function:
    """One function of the interface: its body, how its words are read, and its codes for failures."""

    body: Callable[..., Any]
    words: struct.Struct
    returns: str

    def answer(self, data: Any) -> tuple[int, str | None]:
        """What the function returns, and the error text where it fails."""
        try:
            return int(self.body(*self.words.unpack_from(data)) or 0), None
        except BaseException as error:
            status = self._status(error)
            text = dressed(status, text_of(error))
            return (0 if "*" in self.returns else status), text

    def _status(self, error: BaseException) -> int:
        of_operators = self.returns != "aclError"
        if isinstance(error, Refused) or (isinstance(error, ContractError) and of_operators):
            return int(error.status)
        if isinstance(error, BadAddress):
            return Status.ACLNN_ERR_PARAM_INVALID if of_operators else AclError.RT_PARAM_INVALID
        if isinstance(error, MemoryError) and not of_operators:
            return AclError.BAD_ALLOC
        return Status.ACLNN_ERR_INNER if of_operators else AclError.INTERNAL_ERROR


def start(ffi: Any, lib: Any, table: Iterable[tuple[str, str, str]]) -> None:
    """Connect the library's functions, given as (name, codes of the words, return type), to their bodies."""
    native.bind(ffi, lib)
    functions = [_Function(FUNCTIONS[name], struct.Struct(f"={codes}"), returns) for name, codes, returns in table]
    finish = _Function(runtime.finish_all, struct.Struct("="), "aclError")

    def call(number: int, words: Any, result: Any) -> None:
        function = functions[number] if number >= 0 else finish
        data = ffi.buffer(words, function.words.size) if function.words.size else b""
        answer, text = function.answer(data)
        if text is not None:
            lib.normgrad_set_text(text.encode("utf-8", "replace"))
        result[0] = answer

    ffi.def_extern(name="normgrad_call")(call)
    atexit.register(lib.normgrad_ended)
    lib.normgrad_started()
