"""Numbers to test with, by kind of case."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from normgrad.oracle.float64 import Array

#: What each kind of case is for.
KINDS = {
    "normal": "normally distributed data",
    "uniform": "uniformly distributed data",
    "offset": "data whose mean is far from zero and far larger than its deviation",
    "tiny": "data of tiny magnitude, subnormal in float16",
    "huge": "data of huge magnitude",
    "constant": "rows of one value each, whose variance is 0",
    "one-column": "one element per statistic, or one channel",
    "one-place": "one spatial position per channel (HxW = 1)",
    "long-rows": "few and long rows",
    "many-rows": "many and short rows",
    "special": "NaN, Inf, negative zero, a very large and the smallest number here and there",
    "dtypes": "every mix of dtypes that the operator takes; every mix of any two where it takes all",
    "masks": "every choice of outputs",
}

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int32": np.dtype(np.int32),
}

_TINY = {"float16": 2.0**-18}
_HUGE = {"float16": 2.0**11}
_OFFSET = 300.0
_OFFSET_DEVIATION = {"bfloat16": 8.0}  # neighbours near 300 are 2 apart
_SPECIALS_OF_EACH = 2
_VERY_LARGE = 2.0**60  # whose square float32 still holds


@dataclass(frozen=True)
class Values:
    """Draws the numbers of one case."""

    rng: np.random.Generator
    kind: str
    dtype: str

    def data(self, shape: tuple[int, ...], row: tuple[int, ...] = ()) -> Array:
        """Gradients or inputs; ``row`` are the axes along which a constant one is constant."""
        if self.kind == "uniform":
            return self.rng.uniform(-2, 2, shape)
        values = self.rng.standard_normal(shape)
        match self.kind:
            case "offset":
                return values * _OFFSET_DEVIATION.get(self.dtype, 1.0) + _OFFSET
            case "tiny":
                return values * _TINY.get(self.dtype, 1e-12)
            case "huge":
                return values * _HUGE.get(self.dtype, 1e15)
            case "constant" if row:
                kept = tuple(1 if axis in row else size for axis, size in enumerate(shape))
                return np.broadcast_to(np.round(4 * self.rng.standard_normal(kept)) / 4, shape).copy()
        return values

    def parameters(self, shape: tuple[int, ...]) -> Array:
        """Weights and biases."""
        return self.rng.standard_normal(shape)

    def with_specials(self, values: np.ndarray) -> np.ndarray:
        """The same with special values here and there, in a case of special values."""
        if self.kind != "special" or values.size == 0:
            return values
        limits = ml_dtypes.finfo(values.dtype)
        odd = [np.nan, np.inf, -np.inf, -0.0, min(float(limits.max), _VERY_LARGE), float(limits.smallest_subnormal)]
        indices = self.rng.integers(0, values.size, (_SPECIALS_OF_EACH, len(odd)))
        changed = values.copy()
        for row in indices:
            changed.flat[row] = np.array(odd).astype(values.dtype)
        return changed
