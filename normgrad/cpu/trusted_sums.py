"""Where sums of gradients in float32 are not to be trusted, they are made again in float64."""

from normgrad.cpu.channel_fields import CHANNELS, GRAD_OUT
from normgrad.cpu.channels import address_of
from normgrad.cpu.exact import exact_gradient_sums
from normgrad.cpu.jit import device
from normgrad.cpu.memory import item_size, load, load_f64, store_f64
from normgrad.cpu.rows import column_of_lane
from normgrad.cpu.vectors import all_between_f64, unlikely, vload_f64

# A float32 sum of products is trusted between these: below, the products may have been rounded as subnormals.
SMALLEST, LARGEST = 2.0**-90, 2.0**126


@device
def _only_zeros(kind, desc, n, c, place, last):
    """Whether grad_out is zero at some places of a channel, as it is behind a unit that is off."""
    grad_out = address_of(desc, GRAD_OUT, item_size(kind), n, c, place)
    for i in range(last - place):
        if load(kind, grad_out, i * desc[GRAD_OUT + 3]) != 0:
            return False
    return True


@device
def _sum_again(kind, desc, n, c, place, last, sums, sums_x):
    total, total_x = load_f64(sums, 0), load_f64(sums_x, 0)
    if SMALLEST <= abs(total_x) <= LARGEST and abs(total) <= LARGEST:
        return
    if total_x == 0 and _only_zeros(kind, desc, n, c, place, last):
        return
    total, total_x = exact_gradient_sums(desc, n, c, place, last, 1.0, 1.0)
    store_f64(sums, 0, total)
    store_f64(sums_x, 0, total_x)


@device
def settle_lanes(kind, columns, desc, n, first, last, place, end, sums, sums_x):
    """See to the sums of grad_out and of grad_out·(x − mean) over some places, in lanes from the first to the last."""
    lane = first
    while lane < last:
        stop = min(lane + 16, last)
        fine = stop - lane == 16 and all_between_f64(vload_f64(sums_x, lane), SMALLEST, LARGEST)
        if unlikely(not (fine and all_between_f64(vload_f64(sums, lane), 0.0, LARGEST))):
            for k in range(lane, stop):
                c = column_of_lane(kind, k) if columns else k
                if c < desc[CHANNELS]:
                    _sum_again(kind, desc, n, c, place, end, sums + 8 * k, sums_x + 8 * k)
        lane = stop
