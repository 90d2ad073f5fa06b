"""Throws null, random, stale and wrong handles, wild addresses, dims, strides and sizes at every function.

``python fuzz.py LIBRARY CALLS SEED`` runs in a process of its own, so that a crash is seen as one. Every answer must be
a known status with a text, none an internal error; at the end nothing may be left alive that was destroyed.
"""

from __future__ import annotations

import ctypes
import math
import random
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from normgrad.sdk.prototypes import Argument, Prototype, read_headers

KNOWN = {
    "aclError": {0, 100000, 100001, 100002, 100037, 200000, 107000, 107001, 107002, 107017, 107019, 107021, 207001},
    "aclnnStatus": {0, 161001, 161002, 361001, 561003, 561103},
}
PAGE = 4096
# C's floating-point types, which are passed in registers of their own.
REALS: dict[str, type[ctypes.c_float] | type[ctypes.c_double]] = {"float": ctypes.c_float, "double": ctypes.c_double}
SCRATCH = 64 * PAGE
WILD = (0x1, 0x10, 0xDEADBEEF, 0x7AC1_0000_0000_0010, 0x4000_0000_0000_0000, 2**63, 2**64 - 1, 2**64 - 8)
NUMBERS = (0, 1, 2, 3, 4, 5, 6, 8, 9, 24, -1, -2, 64, 4096, 2**31, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63))
COUNTS = (0, 1, 1, 2, 2, 3, 3, 3, 4, 8, 9, 64, 2**20, 2**33, 2**61, 2**63, 2**64 - 1)
SIZES = (0, 1, 7, 64, 100, 4096, 65536, 2**47, 2**63, 2**64 - 1)
#: Kinds of handles by the type that an argument has.
KINDS = ("aclTensor", "aclScalar", "aclIntArray", "aclFloatArray", "aclBoolArray", "aclTensorList", "aclScalarList")
KINDS += ("aclOpExecutor", "aclrtStream", "aclrtEvent", "aclrtContext")
MAKERS = {"aclrtCreateStream", "aclrtCreateStreamWithConfig", "aclrtCreateEvent", "aclrtCreateEventWithFlag"}
MAKERS |= {"aclrtCreateContext"}


class Guarded:
    """Memory of the host with nothing after it: whoever runs past its end is told so by the kernel."""

    def __init__(self, libc: ctypes.CDLL, nbytes: int) -> None:
        libc.mmap.restype = ctypes.c_void_p
        none, read_write, private_anonymous = 0, 3, 0x22
        whole = libc.mmap(None, ctypes.c_size_t(nbytes + 2 * SCRATCH), none, private_anonymous, -1, ctypes.c_long(0))
        self.address = whole + SCRATCH
        self.nbytes = nbytes
        assert libc.mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(nbytes), read_write) == 0


class Fuzzer:
    """One run: the library, what is alive, and how arguments are drawn."""

    def __init__(self, path: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.libc = ctypes.CDLL(None)
        self.library = ctypes.CDLL(path)
        self.library.aclGetRecentErrMsg.restype = ctypes.c_char_p
        self.scratch = Guarded(self.libc, SCRATCH)
        self.alive: dict[str, list[int]] = {kind: [] for kind in KINDS}
        self.dead: list[int] = [0x7AC1_0000_0000_0000]
        self.blocks: dict[int, int] = {}  # sizes by address
        self.freed: list[int] = []
        self.worked: Counter[str] = Counter()
        self.called: Counter[str] = Counter()
        self.prototypes = {p.name: p for p in read_headers() if p.name != "aclGetRecentErrMsg"}
        self.operators = [name for name in self.prototypes if name.startswith("aclnn") and name.endswith("Size")]

    # Arguments

    def argument(self, argument: Argument, *, copies: bool) -> int | float:
        kind = argument.type.replace("const ", "").replace("*", "").strip()
        stars = argument.type.count("*")
        if kind in KINDS and stars < 2 and not (stars and kind.startswith("aclrt")):
            return self.handle(kind)
        if kind == "void" and stars == 1:
            return self.address(copies)
        if stars:
            return self.pointer()
        if kind in REALS:
            return self.random.choice([0.0, 1e-5, 0.1, -1.0, float("inf"), float("nan"), 1e308])
        if kind == "size_t":
            return self.random.choice(SIZES + COUNTS)
        if kind.startswith("uint"):
            return self.random.choice(COUNTS)
        if kind == "bool":
            return self.random.choice([0, 1])
        if kind.startswith("acl"):
            return self.random.choice([*range(-1, 6), 27, 29, 33, 54, 99, -(2**31)])
        return self.random.choice(NUMBERS)

    def handle(self, kind: str) -> int:
        draw = self.random.random()
        if draw < 0.75 and self.alive[kind]:
            return self.random.choice(self.alive[kind])
        if draw < 0.85:
            return 0
        others = [handle for handles in self.alive.values() for handle in handles]
        return self.random.choice([*WILD, *self.dead[-20:], *others[-20:], self.random.getrandbits(64)])

    def address(self, copies: bool) -> int:
        """Memory of the device, live or (unless bytes are copied there: it is the process's heap) freed; or other."""
        draw = self.random.random()
        if draw < 0.6 and self.blocks:
            block, size = self.random.choice(list(self.blocks.items()))
            return block + min(self.random.choice([0, 0, 0, 0, 4, 1, 64]), size - 1)
        if draw < 0.8:
            return self.pointer()
        return self.random.choice([0, *WILD, *(() if copies else self.freed[-20:])])

    def pointer(self) -> int:
        """Somewhere in the scratch memory, filled with numbers; sometimes nowhere."""
        if self.random.random() < 0.1:
            return self.random.choice([0, *WILD, self.scratch.address - 8, self.scratch.address + SCRATCH])
        values = [self.random.choice(NUMBERS) for _ in range(9)]
        if self.random.random() < 0.5:
            values = [self.random.choice([1, 2, 3, 4]) for _ in range(9)]
        place = self.scratch.address + 16 * self.random.randrange(SCRATCH // 16 - 8)
        ctypes.memmove(place, struct.pack("9q", *values), 72)
        return place

    # Calls

    def call(self, name: str, values: list[int | float]) -> int:
        """Call a function and judge its answer."""
        prototype = self.prototypes[name]
        function = getattr(self.library, name)
        words = [
            REALS[argument.type](value) if argument.type in REALS else ctypes.c_uint64(int(value) & (2**64 - 1))
            for argument, value in zip(prototype.arguments, values, strict=True)
        ]
        function.restype = ctypes.c_void_p if "*" in prototype.returns else ctypes.c_int64
        answer = function(*words)
        if "*" in prototype.returns:
            answer = answer or 0
            if not answer and name != "aclGetRecentErrMsg":
                self.library.aclGetRecentErrMsg()  # why there is none; the next call's text is read for that call
        elif prototype.returns in KNOWN:
            answer = ctypes.c_int32(answer).value
            self.judge(prototype, answer, values)
            self.worked[name] += answer == 0
        self.called[name] += 1
        return answer

    def judge(self, prototype: Prototype, status: int, values: list[int | float]) -> None:
        text = self.library.aclGetRecentErrMsg()
        shown = f"{prototype.name}({', '.join(map(hex_or_text, values))}) gave {status}: {text!r}"
        assert status in KNOWN[prototype.returns], shown
        assert (status == 0) == (text is None), shown

    def any_function(self) -> None:
        name = self.random.choice(list(self.prototypes))
        prototype = self.prototypes[name]
        if name in ("aclrtSynchronizeDevice", "aclFinalize") and self.random.random() < 0.9:
            return
        values = [self.argument(argument, copies="Mem" in name) for argument in prototype.arguments]
        answer = self.call(name, values)
        self.remember(prototype, values, answer)

    def remember(self, prototype: Prototype, values: list[int | float], answer: int) -> None:
        """Keep account of what lives."""
        name = prototype.name
        if "*" in prototype.returns and name.startswith("aclCreate"):
            if answer:
                self.alive[prototype.returns.replace("*", "").strip()].append(answer)
            else:
                self.library.aclGetRecentErrMsg()
        elif "*" in prototype.returns or prototype.returns not in KNOWN or answer != 0:
            return
        elif name in ("aclrtMalloc", "aclrtMallocHost"):
            self.blocks[self.read(values[0])] = int(values[1])
        elif name in ("aclrtFree", "aclrtFreeHost"):
            self.freed.append(int(values[0]))
            del self.blocks[int(values[0])]
        elif name in MAKERS:
            self.alive[prototype.arguments[0].type.replace("*", "").strip()].append(self.read(values[0]))
        elif "Destroy" in name:
            kind = prototype.arguments[0].type.replace("const ", "").replace("*", "").strip()
            self.bury(kind, int(values[0]))
        elif name in ("aclGetViewShape", "aclGetStorageShape", "aclGetViewStrides"):
            overlapping = abs(int(values[1]) - int(values[2])) < 8
            assert not overlapping or values[1] == values[2]
            self.libc.free(ctypes.c_void_p(self.read(values[1])))
        elif name.endswith("GetWorkspaceSize"):
            self.alive["aclOpExecutor"].append(self.read(values[-1]))
        elif name.startswith("aclnn") and len(values) == 4:
            self.dead.append(int(values[2]))

    def bury(self, kind: str, handle: int) -> None:
        if not handle:
            return
        self.alive[kind].remove(handle)
        self.dead.append(handle)

    def read(self, place: int | float) -> int:
        return int(ctypes.c_uint64.from_address(int(place)).value)

    # Calls that mean something, so that the fuzzing gets past the first check

    def likely_call(self) -> None:
        """A sound call of an operator, or one with an argument that is not."""
        name = self.random.choice(self.operators)
        prototype = self.prototypes[name]
        values = [self.sound(name, argument) for argument in prototype.arguments[:-2]]
        values += [self.scratch.address, self.scratch.address + 8]
        if self.random.random() < 0.5:
            index = self.random.randrange(len(values))
            values[index] = self.argument(prototype.arguments[index], copies=False)
        executor_at, size_at = int(values[-1]), int(values[-2])
        if abs(executor_at - size_at) >= 8:
            self.remember(prototype, values, self.call(name, values))

    def sound(self, operator: str, argument: Argument) -> int | float:
        """An argument that belongs to data of the shape (2, 6, 4)."""
        if "Tensor" in argument.type:
            return self.tensor(sound_shape(operator, argument.name))
        if "IntArray" in argument.type:
            return self.array("aclCreateIntArray", struct.pack("q", 4), 1)
        if "BoolArray" in argument.type:
            return self.array("aclCreateBoolArray", bytes(self.random.choices([0, 1], k=3)), 3)
        return {"N": 2, "C": 6, "HxW": 4, "group": 3}.get(argument.name, 1)

    def tensor(self, shape: tuple[int, ...]) -> int:
        if self.call("aclrtMalloc", [self.scratch.address, 4 * math.prod(shape), 0]) != 0:
            return 0
        data = self.read(self.scratch.address)
        self.blocks[data] = 4 * math.prod(shape)
        dims = self.scratch.address + 1024
        ctypes.memmove(dims, struct.pack(f"{len(shape)}q", *shape), 8 * len(shape))
        return self.make("aclCreateTensor", [dims, len(shape), 0, 0, 0, 2, dims, len(shape), data])

    def array(self, maker: str, values: bytes, count: int) -> int:
        ctypes.memmove(self.scratch.address, values, len(values))
        return self.make(maker, [self.scratch.address, count])

    def make(self, maker: str, values: list[int | float]) -> int:
        answer = self.call(maker, values)
        self.remember(self.prototypes[maker], values, answer)
        return answer

    def likely_run(self) -> None:
        if not self.alive["aclOpExecutor"]:
            return
        executor = self.random.choice(self.alive["aclOpExecutor"][-5:])
        if self.call("aclrtMalloc", [self.scratch.address, 8192, 0]) != 0:
            return
        workspace = self.read(self.scratch.address)
        for name in (name.removesuffix("GetWorkspaceSize") for name in self.operators):
            values: list[int | float] = [workspace, 8192, executor, 0]
            self.remember(self.prototypes[name], values, self.call(name, values))
        self.call("aclrtFree", [workspace])  # perhaps before the work is done

    def keep_small(self) -> None:
        """Destroy what has become many."""
        for kind, handles in self.alive.items():
            if len(handles) > 100:
                self.end(kind, handles[: len(handles) // 2])
        if len(self.blocks) > 100:
            self.free(list(self.blocks)[:50])
        del self.dead[:-200]

    def end(self, kind: str, handles: list[int]) -> None:
        name = f"aclrtDestroy{kind[5:]}" if kind.startswith("aclrt") else f"aclDestroy{kind[3:]}"
        name = "aclDestroyAclOpExecutor" if kind == "aclOpExecutor" else name
        for handle in list(handles):
            self.call(name, [handle])  # may have gone with a list, or with a run
            self.bury(kind, handle)

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.call("aclrtFree", [block]) != 0:
                assert self.call("aclrtFreeHost", [block]) == 0
            del self.blocks[block]

    def run(self, calls: int) -> None:
        self.call("aclrtSetDevice", [0])
        self.call("aclrtSynchronizeDevice", [])  # rare below, since it waits
        actions: list[tuple[float, Callable[[], None]]] = [(0.05, self.likely_call), (0.1, self.likely_run)]
        resident, steps = 0, 0
        while self.called.total() < calls:
            draw = self.random.random()
            next((action for limit, action in actions if draw < limit), self.any_function)()
            steps += 1
            if steps % 50 == 0:
                self.call("aclrtSetDevice", [0])
                self.keep_small()
            if not resident and self.called.total() > calls // 4:
                resident = resident_bytes()
        grown = resident_bytes() - resident
        self.finish()
        plans = sum(self.worked[name] for name in self.operators)
        runs = sum(self.worked[name.removesuffix("GetWorkspaceSize")] for name in self.operators)
        never = sorted(set(self.prototypes) - set(self.called))
        print(f"{self.called.total()} calls, {plans} plans, {runs} runs, grown by {grown >> 10} KiB, never: {never}")
        assert plans > 0
        assert runs > 0
        assert grown < 32 << 20, grown

    def finish(self) -> None:
        """Destroy everything; then nothing may be left."""
        self.call("aclrtSetDevice", [0])
        for kind, handles in self.alive.items():
            self.end(kind, handles)
        self.free(list(self.blocks))
        from normgrad.sdk import contexts, memory
        from normgrad.sdk.handles import handles as registry

        left = [made for made in registry._objects.values() if not isinstance(made, contexts.Context)]
        assert not left, left
        assert not memory.table._blocks
        assert self.library.aclrtSetDevice(0) == 0  # and it still works


def sound_shape(operator: str, name: str) -> tuple[int, ...]:
    """The shape of a tensor in a sound call."""
    if name in ("gradOut", "input", "self", "out", "output", "gradInput", "gradInputOut"):
        return (2, 6, 4)
    if name in ("counter", "counts"):
        return (2,)
    if "LayerNorm" in operator:
        return (2, 6, 1) if name.startswith(("mean", "rstd")) else (4,)
    if "GroupNorm" in operator:
        return (2, 3) if name.startswith(("mean", "rstd")) else (6,)
    return (2, 6) if "Gather" in operator and name in ("mean", "invstd") else (6,)


def hex_or_text(value: int | float) -> str:
    return hex(value) if isinstance(value, int) else str(value)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


if __name__ == "__main__":
    Fuzzer(sys.argv[1], int(sys.argv[3])).run(int(sys.argv[2]))
