"""The output of float32 numbers, computed in float64 and so rounded once: 16 numbers at a time."""

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from normgrad.cpu.compile.jit import in_place
from normgrad.cpu.fields.channel import RECORDS
from normgrad.cpu.intrinsics.llvm import (
    FLOAT_TYPE,
    I32_TYPE,
    LANES,
    call_intrinsic,
    pointer_to,
    splat_constant,
    splatted,
    type_suffix,
    vector_of,
)
from normgrad.cpu.intrinsics.memory import load, load_f64, store
from normgrad.cpu.intrinsics.vectors import f32x16, fma, narrow, splat_f64, vload, vstore, widen
from normgrad.cpu.kernels.channel.access import statistic_of
from normgrad.cpu.tags import F32

_SINGLES = vector_of(FLOAT_TYPE)
_FEW = 3  # numbers at the end of a row that are faster one by one


def _first_lanes(builder, count):
    lanes = ir.Constant(vector_of(I32_TYPE), list(range(LANES)))
    return builder.icmp_signed("<", lanes, splatted(builder, builder.trunc(count, I32_TYPE)))


@intrinsic
def _load_first(typingctx, address, index, count):
    """The first `count` of 16 numbers, zeros after; nothing beyond is read."""

    def codegen(context, builder, sig, args):
        pointer = pointer_to(builder, args[0], args[1], FLOAT_TYPE, _SINGLES)
        others = [ir.Constant(I32_TYPE, 4), _first_lanes(builder, args[2]), splat_constant(_SINGLES, 0.0)]
        return call_intrinsic(builder, f"llvm.masked.load.{type_suffix(_SINGLES)}.p0", _SINGLES, [pointer, *others])

    return f32x16(types.int64, types.int64, types.int64), codegen


@intrinsic
def _store_first(typingctx, address, index, value, count):
    def codegen(context, builder, sig, args):
        pointer = pointer_to(builder, args[0], args[1], FLOAT_TYPE, _SINGLES)
        others = [ir.Constant(I32_TYPE, 4), _first_lanes(builder, args[3])]
        name = f"llvm.masked.store.{type_suffix(_SINGLES)}.p0"
        call_intrinsic(builder, name, ir.VoidType(), [args[2], pointer, *others])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, f32x16, types.int64), codegen


@intrinsic
def _stream(typingctx, address, index, value):
    """Past the caches; the address must be a multiple of 64."""

    def codegen(context, builder, sig, args):
        pointer = pointer_to(builder, args[0], args[1], FLOAT_TYPE, _SINGLES)
        stored = builder.store(args[2], pointer, align=64)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32_TYPE, 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, f32x16), codegen


@in_place
def _normalised(v, centre, factor, bias):
    return narrow(fma(widen(v) - centre, factor, bias))


@in_place
def normalise_singles(desc, n, c, x, result, count, weights, biases, stream):
    """The output of a row."""
    statistic = statistic_of(desc, n, c)
    mean, rstd = load_f64(desc[RECORDS], 2 * statistic), load_f64(desc[RECORDS], 2 * statistic + 1)
    scale, offset = rstd * np.float64(load(F32, weights, c)), np.float64(load(F32, biases, c))
    centre, factor, bias = splat_f64(mean), splat_f64(scale), splat_f64(offset)
    whole = count & ~15
    left = count - whole
    for i in range(0, count & ~31, 32):
        y = _normalised(vload(F32, x, i), centre, factor, bias)
        z = _normalised(vload(F32, x, i + 16), centre, factor, bias)
        if stream:
            _stream(result, i, y)
            _stream(result, i + 16, z)
        else:
            vstore(F32, result, i, y)
            vstore(F32, result, i + 16, z)
    if count & 16:
        vstore(F32, result, whole - 16, _normalised(vload(F32, x, whole - 16), centre, factor, bias))
    if left > _FEW:
        y = _normalised(_load_first(x, whole, left), centre, factor, bias)
        _store_first(result, whole, y, left)
    else:
        for i in range(whole, count):
            y = fma(np.float64(load(F32, x, i)) - mean, scale, offset)
            store(F32, result, i, np.float32(y))
