"""The types of the operators' arguments, for type checkers."""

from typing import Any, Protocol, TypeVar


class Array(Protocol):
    """An array that the operators take: a NumPy array, a PyTorch tensor, or any other object with ``__dlpack__``."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Export the array through DLPack."""


#: The type of ``input``, which is the type of the results too.
ArrayT = TypeVar("ArrayT", bound=Array)
