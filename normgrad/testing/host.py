"""Arrays of any library as NumPy arrays, for computations in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from normgrad.contract.arrays import as_numpy, as_view


def on_host(array: Any) -> np.ndarray:
    """The elements of an array in a NumPy array: a NumPy array itself, a copy of anything else."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "detach"):  # a tensor, which may be on a GPU and may require its gradient
        array = array.detach().cpu()
    view = as_view(array)
    return np.asarray(array) if view.dtype.name == "float64" else as_numpy(view).copy()
