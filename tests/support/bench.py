"""What the tests of the benchmark share: small cases, and an implementation that is wrong."""

import numpy as np

from normgrad.bench import runner
from normgrad.bench.cases import CHANNELS_LAST, GATHER, Case
from normgrad.bench.implementations.implementation import Implementation, Role
from normgrad.bench.implementations.ours import Normgrad

TINY = [
    Case("layer_norm_backward", (5, 7), "float32"),
    Case("group_norm_backward", (3, 4, 2, 3), "float16", CHANNELS_LAST, 2),
    Case("batch_norm_elemt_backward", (3, 4, 5), "bfloat16"),
    Case("layer_norm", (5, 7), "bfloat16"),
    Case("group_norm", (3, 4, 2, 3), "float32", group=2),
    Case("batch_norm_stats", (3, 4, 2, 3), "float16", CHANNELS_LAST),
    Case("batch_norm_elemt", (3, 4), "float32"),
    Case("batch_norm_reduce_backward", (3, 4, 2, 3), "bfloat16"),
    Case(GATHER, (3, 4), "float32"),
]
LAYER_NORM = TINY[0]
QUICKLY = runner.Settings(budget=1e-3)


class Altered:
    """An implementation whose results are the right ones with a change."""

    name = "altered"

    def __init__(self, change, role=Role.PEER):
        self.change, self.role = change, role

    def prepare(self, work):
        own = next(iter(Normgrad().prepare(work)))

        def altered():
            made = [np.array(result) for result in own.results()]
            self.change(made)
            return made

        yield Implementation(self.name, self.role, own.run, altered)
