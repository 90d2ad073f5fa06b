"""Where the rows of LayerNorm are."""

from normgrad.cpu.compile.jit import device


@device
def row_address(tensor, axes, row):
    """Return the address of a row of a tensor whose rows extend over these axes."""
    strides = tensor.strides
    if row < axes.inner:
        return tensor.address + row * strides.inner
    rest = row // axes.inner
    offset = (rest % axes.middle) * strides.middle + (rest // axes.middle) * strides.outer
    return tensor.address + (row - rest * axes.inner) * strides.inner + offset


@device
def uniform_rows(axes, row, most):
    """Return how many rows from `row` on, at most so many, are equally spaced in all tensors."""
    return min(most, axes.inner - (row if row < axes.inner else row % axes.inner))
