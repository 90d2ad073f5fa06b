"""Judge results: the oracle, the bound on its distance, and a comparison that says what is wrong.

>>> import numpy as np
>>> from normgrad.testing import compare, oracle
>>> x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
>>> expected, _ = oracle.batch_norm_stats(x)
>>> compare(x.mean(0), expected, terms=np.abs(x).mean(0)).passed
True
"""

from normgrad import oracle
from normgrad.testing import terms
from normgrad.testing.comparison import Report, bound, compare, ulp
from normgrad.testing.judgement import Judgement, judge
from normgrad.testing.standards import LEVELS, STANDARDS

__all__ = ["LEVELS", "STANDARDS", "Judgement", "Report", "bound", "compare", "judge", "oracle", "terms", "ulp"]
