"""Vectors of 16 float32 or float64 lanes: loads, stores, arithmetic.

Their arithmetic is written out, not left to the auto-vectoriser, so it gives the same bits whatever the alignment,
overlap or tile it happens in.
"""

import operator

from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, register_model

from normgrad.cpu.intrinsics.llvm import (
    DOUBLE_TYPE,
    FLOAT_TYPE,
    I32_TYPE,
    I64_TYPE,
    LANES,
    STORAGE,
    as_i64,
    call_math,
    constant,
    narrowed,
    pointer_to,
    same_shape,
    size_of,
    splatted,
    vector_of,
    widened,
)
from normgrad.cpu.tags import F32


class Vector(types.Type):
    """The Numba type of 16 lanes."""

    def __init__(self, name: str, element: ir.Type):
        self.element = element
        super().__init__(name=name)


f32x16 = Vector("f32x16", FLOAT_TYPE)
f64x16 = Vector("f64x16", DOUBLE_TYPE)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """Kept in a vector register."""

    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.VectorType(fe_type.element, LANES))


def _vector_pointer(context, builder, args, arg_types, element):
    address_, index_ = (as_i64(context, builder, a, t) for a, t in zip(args, arg_types))
    return pointer_to(builder, address_, index_, element, vector_of(element))


@intrinsic
def vload(typingctx, dtype, address, index):
    """16 consecutive elements -> f32x16; no alignment needed."""

    def codegen(context, builder, sig, args):
        element = STORAGE[dtype.tag]
        pointer = _vector_pointer(context, builder, args[1:], sig.args[1:], element)
        return widened(builder, dtype.tag, builder.load(pointer, align=size_of(element)))

    return f32x16(dtype, address, index), codegen


@intrinsic
def vstore(typingctx, dtype, address, index, value):
    """f32x16 -> 16 consecutive elements, rounded to nearest even."""

    def codegen(context, builder, sig, args):
        element = STORAGE[dtype.tag]
        pointer = _vector_pointer(context, builder, args[1:3], sig.args[1:3], element)
        builder.store(narrowed(builder, dtype.tag, args[3]), pointer, align=size_of(element))
        return context.get_dummy_value()

    return types.void(dtype, address, index, f32x16), codegen


@intrinsic
def power_of_two(typingctx, value, mean):
    """Return the largest power of two p with p/2 <= |value| and p/2*|mean| <= 2^126, within 2^-126 .. 2^127.

    For float64 or f64x16. A NaN counts as no limit. Where the mean is no limit, value/p is below 1: its product with a
    weight does not overflow.
    """

    def codegen(context, builder, sig, args):
        size, mean_size = (call_math(builder, "fabs", each) for each in args)
        largest = constant(size.type, 2.0**126)
        limited = call_math(builder, "minnum", size, builder.fdiv(largest, mean_size))
        limited = call_math(builder, "minnum", limited, largest)
        word = same_shape(size.type, I64_TYPE)
        exponent = builder.and_(builder.bitcast(limited, word), constant(word, 0x7FF0000000000000))
        above = builder.fmul(builder.bitcast(exponent, size.type), constant(size.type, 2.0))
        return call_math(builder, "maxnum", above, constant(size.type, 2.0**-126))

    return value(value, value), codegen


@intrinsic
def saturated(typingctx, value):
    """Bring a float64 or f64x16 into float32's range: finite values beyond it become its largest, Inf and NaN stay."""

    def codegen(context, builder, sig, args):
        size, largest = call_math(builder, "fabs", args[0]), constant(args[0].type, (2 - 2.0**-23) * 2.0**127)
        is_finite = builder.fcmp_ordered("<", size, constant(size.type, float("inf")))
        beyond = builder.and_(builder.fcmp_ordered(">", size, largest), is_finite)
        return builder.select(beyond, call_math(builder, "copysign", largest, args[0]), args[0])

    return value(value), codegen


@intrinsic
def not_below(typingctx, value, least):
    """Return the value, or `least` where it is negative: NaN stays; float64 or f64x16."""

    def codegen(context, builder, sig, args):
        is_negative = builder.fcmp_ordered("<", args[0], constant(args[0].type, 0.0))
        return builder.select(is_negative, args[1], args[0])

    return value(value, value), codegen


@intrinsic
def square_roots(typingctx, value):
    return f64x16(f64x16), lambda context, builder, sig, args: call_math(builder, "sqrt", *args)


@intrinsic
def vload_f64(typingctx, address, index):
    def codegen(context, builder, sig, args):
        return builder.load(_vector_pointer(context, builder, args, sig.args, DOUBLE_TYPE), align=8)

    return f64x16(address, index), codegen


@intrinsic
def vstore_f64(typingctx, address, index, value):
    def codegen(context, builder, sig, args):
        builder.store(args[2], _vector_pointer(context, builder, args[:2], sig.args[:2], DOUBLE_TYPE), align=8)
        return context.get_dummy_value()

    return types.void(address, index, f64x16), codegen


def _splat(vector_type, scalar_type):
    @intrinsic
    def splat(typingctx, value):
        return vector_type(scalar_type), lambda context, builder, sig, args: splatted(builder, args[0])

    return splat


splat_f32 = _splat(f32x16, types.float32)
splat_f64 = _splat(f64x16, types.float64)


@intrinsic
def widen(typingctx, value):
    """f32x16 -> f64x16, exact."""
    return f64x16(f32x16), lambda context, builder, sig, args: builder.fpext(args[0], vector_of(DOUBLE_TYPE))


@intrinsic
def narrow(typingctx, value):
    """f64x16 -> f32x16, round to nearest even."""
    return f32x16(f64x16), lambda context, builder, sig, args: builder.fptrunc(args[0], vector_of(FLOAT_TYPE))


@intrinsic
def fma(typingctx, a, b, c):
    """a*b + c with one rounding; vectors or scalars, all of one type."""
    return a(a, a, a), lambda context, builder, sig, args: call_math(builder, "fma", *args)


@intrinsic
def scaled(typingctx, dtype, value, factor, low, offset):
    """Return value*(factor + low) + offset; before a 16-bit store without `low`, which would not show."""

    def codegen(context, builder, sig, args):
        _, value_, factor_, low_, offset_ = args
        if dtype.tag == F32:
            offset_ = call_math(builder, "fma", value_, low_, offset_)
        return call_math(builder, "fma", value_, factor_, offset_)

    return value(dtype, value, value, value, value), codegen


def _folded(builder, run, vector, other=None):
    """Add the second half of every `run` lanes to the first, in one or two vectors."""
    lanes = vector.type.count * (1 if other is None else 2)
    firsts = [start + i for start in range(0, lanes, run) for i in range(run // 2)]
    halves = [
        builder.shuffle_vector(
            vector, other or vector, ir.Constant(vector_of(I32_TYPE, lanes // 2), [i + shift for i in firsts])
        )
        for shift in (0, run // 2)
    ]
    return builder.fadd(*halves)


@intrinsic
def hsum(typingctx, value):
    """Sum the lanes, halves added pairwise (16 -> 8 -> 4 -> 2 -> 1), always in that order."""
    scalar = types.float64 if value == f64x16 else types.float32

    def codegen(context, builder, sig, args):
        vector = args[0]
        while vector.type.count > 1:
            vector = _folded(builder, vector.type.count, vector)
        return builder.extract_element(vector, ir.Constant(I32_TYPE, 0))

    return scalar(value), codegen


@intrinsic
def store_sums(typingctx, address, a, b, c, d):
    """Store the sums of the lanes of four f64x16, each in the order of hsum, as four float64."""

    def codegen(context, builder, sig, args):
        a, b, c, d = (_folded(builder, 16, vector) for vector in args[1:])
        pairs = _folded(builder, 4, _folded(builder, 8, a, b), _folded(builder, 8, c, d))
        sums = _folded(builder, 2, pairs)
        pointer = pointer_to(builder, args[0], ir.Constant(I64_TYPE, 0), DOUBLE_TYPE, sums.type)
        builder.store(sums, pointer, align=8)
        return context.get_dummy_value()

    return types.void(types.int64, f64x16, f64x16, f64x16, f64x16), codegen


class _VectorOperator(AbstractTemplate):
    def generic(self, args, kws):
        if not kws and args and isinstance(args[0], Vector) and all(a == args[0] for a in args):
            return signature(args[0], *args)
        return None


def _define_operators():
    emitters = {
        operator.add: "fadd",
        operator.sub: "fsub",
        operator.mul: "fmul",
        operator.truediv: "fdiv",
        operator.neg: "fneg",
    }
    for function, emitter in emitters.items():
        infer_global(function)(type("VectorOperator", (_VectorOperator,), {"key": function}))
        arity = 1 if function is operator.neg else 2
        lower_builtin(function, *[Vector] * arity)(
            lambda context, builder, sig, args, emitter=emitter: getattr(builder, emitter)(*args)
        )


_define_operators()
