"""The sums of float32 gradients in columns, two places at a time, all channels: the data as it lies in memory.

Many places of 32 channels at a time would need no sums in memory, but are lines some kB apart, for which the
first-level cache has few sets.
"""

import numpy as np

from normgrad.cpu.compile.jit import device, in_place
from normgrad.cpu.fields.channel import CHANNELS, CHUNK, GRAD_OUT, INPUT, PARTIALS, PITCH
from normgrad.cpu.intrinsics.memory import stack_space
from normgrad.cpu.intrinsics.vectors import splat_f32, vload, vstore
from normgrad.cpu.kernels.channel.access import address_of, partial_index, places_of
from normgrad.cpu.kernels.channel.columns import RUN, add_pair, add_terms
from normgrad.cpu.tags import F32

_AT_ONCE = 2
_AHEAD = 8  # places after which data is asked for
_BLOCK = 512  # channels whose sums stay in the first-level cache

_sums_of_run = stack_space(2 * _BLOCK * 4)


@in_place
def _add_columns(grad_out, go_step, x, x_step, rows, sums, shifts, whole, count):
    """Add the terms of up to _AT_ONCE places to the float32 sums of 32 channels."""
    one, zero, shift = (
        splat_f32(np.float32(1)),
        splat_f32(np.float32(0)),
        (vload(F32, shifts, 0), vload(F32, shifts, 16)),
    )
    ahead, x_ahead, s = _AHEAD * go_step, _AHEAD * x_step, (zero, zero, zero, zero)
    for _ in range(rows):
        s = add_terms(F32, grad_out, ahead, x, x_ahead, whole, count, (one, one), shift, s)
        grad_out, x = grad_out + go_step, x + x_step
    vstore(F32, sums, 0, vload(F32, sums, 0) + s[0])
    vstore(F32, sums, 16, vload(F32, sums, 16) + s[1])
    vstore(F32, sums, 32, vload(F32, sums, 32) + s[2])
    vstore(F32, sums, 48, vload(F32, sums, 48) + s[3])


@in_place
def _settle_run(singles, sums, sums_x, channels):
    """Add the float32 sums of some channels to those in float64, and clear them."""
    zero = splat_f32(np.float32(0))
    for c in range(0, channels, 32):
        at = singles + 8 * c
        add_pair(sums, c, vload(F32, at, 0), vload(F32, at, 16))
        add_pair(sums_x, c, vload(F32, at, 32), vload(F32, at, 48))
        for i in range(0, 64, 16):
            vstore(F32, at, i, zero)


@device
def _add_block(grad_out, go_step, x, x_step, places, sums, sums_x, shifts, channels):
    """Add the terms of places to the sums of some channels: RUN of them in float32, float64 beyond."""
    singles, whole, yes, no = _sums_of_run(), channels & ~31, np.bool_(True), np.bool_(False)
    for i in range(0, 2 * _BLOCK, 16):
        vstore(F32, singles, i, splat_f32(np.float32(0)))
    first = 0
    while first < places:
        rows = min(_AT_ONCE, places - first)
        for c in range(0, whole, 32):
            g, v, s, m = grad_out + 4 * c, x + 4 * c, singles + 8 * c, shifts + 4 * c
            _add_columns(g, go_step, v, x_step, rows, s, m, yes, np.int64(32))
        if whole < channels:
            g, v, s, m = grad_out + 4 * whole, x + 4 * whole, singles + 8 * whole, shifts + 4 * whole
            _add_columns(g, go_step, v, x_step, rows, s, m, no, channels - whole)
        grad_out, x, first = grad_out + rows * go_step, x + rows * x_step, first + rows
        if first % RUN == 0 or first == places:
            _settle_run(singles, sums, sums_x, channels)


@device
def add_singles(desc, n, chunk, shifts):
    """Add the terms of a chunk to its sums: grad_out, and grad_out·(x − mean); the shifts are the negative means."""
    sums, place, channels = desc[PARTIALS] + 8 * partial_index(desc, n, chunk), chunk * desc[CHUNK], desc[CHANNELS]
    sums_x, go_step, x_step = sums + 8 * desc[PITCH], 4 * desc[GRAD_OUT + 3], 4 * desc[INPUT + 3]
    places = places_of(desc, chunk)
    for c in range(0, channels, _BLOCK):
        grad_out, x = address_of(desc, GRAD_OUT, 4, n, c, place), address_of(desc, INPUT, 4, n, c, place)
        some, s, s_x, m = min(_BLOCK, channels - c), sums + 8 * c, sums_x + 8 * c, shifts + 4 * c
        _add_block(grad_out, go_step, x, x_step, places, s, s_x, m, some)
