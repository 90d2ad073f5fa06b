"""The functions of the interface, read from the headers: the one place where they are declared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INCLUDE = Path(__file__).parent / "include"

_DECLARATION = re.compile(r"^ACL(?:NN)?_API\s+(?P<returns>[\w\s*]+?)(?P<name>\w+)\((?P<parameters>[^)]*)\);", re.M)
_HANDLES = {"aclrtStream", "aclrtEvent", "aclrtContext"}
_UNSIGNED = {"size_t", "uint64_t", "uint32_t", "bool"}
_SIGNED = {
    "int32_t",
    "int64_t",
    *("aclDataType", "aclFormat", "aclSysParamOpt", "aclrtMemMallocPolicy", "aclrtMemcpyKind", "aclrtMemAttr"),  # enums
}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: its C type and name."""

    type: str
    name: str

    @property
    def code(self) -> str:
        """How its 64-bit word is read, as the struct module writes it."""
        plain = self.type.removeprefix("const ")
        if self.is_pointer or plain in _UNSIGNED:
            return "Q"
        if plain == "double":
            return "d"
        if plain in _SIGNED:
            return "q"
        known = ", ".join(sorted({"double", *_HANDLES, *_UNSIGNED, *_SIGNED}))
        raise ValueError(f"{self.name} is of the C type {self.type}, and must be a pointer or one of {known}")

    @property
    def is_pointer(self) -> bool:
        return "*" in self.type or self.type in _HANDLES

    @property
    def word(self) -> str:
        """The C expression that makes the word."""
        if self.code == "d":
            return f"word_of_double({self.name})"
        if self.is_pointer:
            return f"(uint64_t)(uintptr_t){self.name}"
        return f"(uint64_t)(int64_t){self.name}"


@dataclass(frozen=True, slots=True)
class Prototype:
    """One function of the interface."""

    returns: str
    name: str
    arguments: tuple[Argument, ...]

    @property
    def codes(self) -> str:
        return "".join(argument.code for argument in self.arguments)

    @property
    def failure(self) -> int:
        """What the function returns when not even Python can say what is wrong."""
        return {"aclError": 500000, "aclnnStatus": 561000}.get(self.returns, 0)


def read_headers(include: Path = INCLUDE) -> Iterator[Prototype]:
    """Every function that the headers declare, in a fixed order."""
    for header in sorted(include.rglob("*.h")):
        for found in _DECLARATION.finditer(header.read_text(encoding="utf-8")):
            yield Prototype(found["returns"].strip(), found["name"], tuple(_arguments(found["parameters"])))


def _arguments(text: str) -> Iterator[Argument]:
    for item in text.split(","):
        found = re.fullmatch(r"\s*(?P<type>.*?)\s*\b(?P<name>\w+)\s*", item, re.S)
        if found and found["type"]:
            yield Argument(found["type"].strip(), found["name"])
