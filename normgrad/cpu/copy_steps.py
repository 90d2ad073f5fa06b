"""Steps that copy between layouts and dtypes: small vectors to float32, awkward strides to contiguous memory."""

from __future__ import annotations

import numpy as np

from normgrad.contract.dtypes import INT32, DType
from normgrad.contract.view import View, contiguous_strides
from normgrad.cpu import copy_fields as at
from normgrad.cpu import pool
from normgrad.cpu.axes import collapsed_together
from normgrad.cpu.kinds import CODES
from normgrad.cpu.steps import Place, Step
from normgrad.cpu.variants import Kernel

_COPY = Kernel("normgrad.cpu.copies", "copy")
_FILL = Kernel("normgrad.cpu.copies", "fill")
_COPIED = {**CODES, INT32: 0}  # integers are copied to integers alone: bit for bit, as float32 are
_GRAIN = 1 << 16  # elements that are taken at a time


def fill_step(place: Place, stride: int, dtype: DType, count: int, value: float) -> Step:
    """A step that stores one value in all ``count`` elements of a vector."""
    bits = int(np.float64(value).view(np.int64))
    return Step(_FILL, np.array([0, stride, CODES[dtype], count, bits], np.int64), ((at.VECTOR, place),))


def copy_step(view: View, place: Place, copy_place: Place, copy_dtype: DType, *, outwards: bool = False) -> Step:
    """A step that copies a view to a contiguous copy of a dtype, or the copy back out to the view."""
    sizes, (own, dense) = collapsed_together(view.shape, (view.strides, contiguous_strides(view.shape)))
    missing = at.RANK - len(sizes)
    sizes, own, dense = [1] * missing + sizes, [0] * missing + own, [0] * missing + dense
    descriptor = np.zeros(at.DESCRIPTOR_SIZE, np.int64)
    length = sizes[-1]
    lines = view.numel // length if length else 0
    descriptor[[at.LINES, at.LENGTH, at.GRAIN]] = lines, length, max(1, _GRAIN // max(length, 1))
    ends = [(own, _COPIED[view.dtype], place), (dense, _COPIED[copy_dtype], copy_place)]
    (source, source_code, source_place), (target, target_code, target_place) = reversed(ends) if outwards else ends
    descriptor[[at.SOURCE_CODE, at.TARGET_CODE]] = source_code, target_code
    descriptor[at.SIZES : at.SOURCE_STRIDES] = sizes
    descriptor[at.SOURCE_STRIDES : at.TARGET_STRIDES] = source
    descriptor[at.TARGET_STRIDES :] = target
    places = ((at.SOURCE, source_place), (at.TARGET, target_place))
    return Step(_COPY, descriptor, places, shared=pool.shared(view.numel))
