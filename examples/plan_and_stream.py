"""Plan a call once, run it many times on new memory, on two streams side by side.

python examples/plan_and_stream.py
"""

from __future__ import annotations

import sys

import numpy as np

import normgrad

ROWS, COLUMNS, BATCHES = 256, 512, 8


def main() -> int:
    """Compute the input's gradient of several batches with one plan per stream, and compare with plain calls."""
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(2, ROWS, COLUMNS)).astype(np.float32) for _ in range(BATCHES)]
    statistics = [normgrad.layer_norm(x, [COLUMNS])[1:] for x, _ in batches]
    results = [np.empty((ROWS, COLUMNS), np.float32) for _ in batches]

    lanes = []
    for first in range(2):  # each stream takes every other batch
        (x, grad_out), (mean, rstd) = batches[first], statistics[first]
        plan = normgrad.layer_norm_backward.plan(
            grad_out, x, [COLUMNS], mean, rstd, output_mask=(True, False, False), out=(results[first], None, None)
        )
        plan.repeatable = True
        lanes.append((plan, normgrad.Stream()))
    print(f"a plan needs {lanes[0][0].workspace_size} bytes of workspace")

    for number, ((x, grad_out), (mean, rstd)) in enumerate(zip(batches, statistics, strict=True)):
        plan, stream = lanes[number % 2]
        plan.rebind(grad_out=grad_out, input=x, mean=mean, rstd=rstd, grad_input=results[number])
        plan.run(stream=stream)  # returns before the work is done
    for _, stream in lanes:
        stream.synchronize()  # raises an error of the work, if there was one

    same = 0
    for (x, grad_out), (mean, rstd), result in zip(batches, statistics, results, strict=True):
        expected, _, _ = normgrad.layer_norm_backward(grad_out, x, [COLUMNS], mean, rstd)
        same += int((result == expected).all())
    print(f"{same} of {BATCHES} batches have the bits of a plain call")
    return 0 if same == BATCHES else 1


if __name__ == "__main__":
    sys.exit(main())
