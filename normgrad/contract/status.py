"""Status codes, and the one exception that carries them."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Mapping
from enum import IntEnum


class Status(IntEnum):
    """The status codes of the two-phase interface."""

    ACLNN_SUCCESS = 0
    ACLNN_ERR_PARAM_NULLPTR = 161001
    ACLNN_ERR_PARAM_INVALID = 161002
    ACLNN_ERR_RUNTIME_ERROR = 361001
    ACLNN_ERR_INNER = 561000
    ACLNN_ERR_INNER_FIND_KERNEL_ERROR = 561003
    ACLNN_ERR_INNER_CREATE_EXECUTOR = 561101
    ACLNN_ERR_INNER_NULLPTR = 561103


NULLPTR = Status.ACLNN_ERR_PARAM_NULLPTR
INVALID = Status.ACLNN_ERR_PARAM_INVALID
NO_KERNEL = Status.ACLNN_ERR_INNER_FIND_KERNEL_ERROR
RUNTIME = Status.ACLNN_ERR_RUNTIME_ERROR


class Names(dict[str, str]):
    """Parameter names as one interface spells them; a name not listed stands for itself."""

    def __missing__(self, key: str) -> str:
        return key


class ContractError(ValueError):
    """A call that breaks the contract.

    Attributes
    ----------
    status : Status
        The code that the C interface returns for the same call (an ``int``).
    status_name : str
        Its name, such as ``ACLNN_ERR_PARAM_INVALID``.
    operator : str
        The operator that refused the call, such as ``layer_norm_backward``.
    parameter : str or None
        The parameter at fault, where there is one.
    """

    def __init__(self, status: Status, operator: str, parameter: str | None, problem: str) -> None:
        self.status = status
        self.operator = operator
        self.parameter = parameter
        self._problem = problem
        super().__init__(self.text(operator, Names()))

    @property
    def status_name(self) -> str:
        return self.status.name

    def text(self, operator: str, names: Mapping[str, str]) -> str:
        """The message, with the operator and the parameters called by the given names."""
        return f"{operator}: {self._problem.format_map(names)}"

    def __reduce__(self) -> tuple[type[ContractError], tuple[Status, str, str | None, str]]:
        return type(self), (self.status, self.operator, self.parameter, self._problem)


def let_signals_through(error: BaseException) -> None:
    """Raise an exception again if a signal handler raised it: a caller's timeout, say, is no failure of the call."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
        raise error


def quote(value: object) -> str:
    """A user's value inside a message: braces doubled, since messages name parameters as ``{name}``."""
    return str(value).replace("{", "{{").replace("}", "}}")


_LONGEST = 200  # characters of a user's value in a message


def shown(value: object) -> str:
    """Return a user's value for a message: its repr, shortened; where repr fails, what the value is.

    Examples
    --------
    >>> shown([4]), shown(10**5000), shown([10**5000])
    ('[4]', 'an integer of 16610 bits', 'an object of type list')
    """
    if isinstance(value, int) and value.bit_length() > _LONGEST:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception as error:  # it is the user's code; an integer of more than 4300 digits has no repr either
        let_signals_through(error)
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def counted(number: int, noun: str) -> str:
    """Return a number of things for a message: ``1 element``, ``2 elements``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown_error(error: Exception) -> str:
    """Return a foreign exception for a message: its type and the first line of its text."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception as another:
        let_signals_through(another)
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
