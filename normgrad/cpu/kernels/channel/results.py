"""The results of a chunk, for GroupNorm and BatchNorm, and in rows and columns alike."""

from normgrad.cpu.kernels.channel import columns, rows
from normgrad.cpu.kernels.channel.access import choose


def compute_results(dtype, layout, direction, desc, chunk):
    """Compute grad_input or the output of a chunk."""


choose(
    compute_results,
    rows_backward=rows.compute_gradients,
    rows_forward=rows.compute_outputs,
    columns_backward=columns.compute_gradients,
    columns_forward=columns.compute_outputs,
)
