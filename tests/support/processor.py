"""Code run in a process that takes this machine's processor for another one, with fewer instructions."""

from __future__ import annotations

from support.processes import run_python

_OTHER_PROCESSOR = """
from llvmlite import binding
kept = binding.FeatureMap({{name: has for name, has in binding.get_host_cpu_features().items() if name in {kept!r}}})
binding.get_host_cpu_name = lambda: {name!r}
binding.get_host_cpu_features = lambda: kept
"""


def run_on(processor: str, features: tuple[str, ...], code: str, **environment: str) -> str:
    """What the code prints on a processor of this name, as LLVM has it, with no features but these."""
    return run_python(_OTHER_PROCESSOR.format(name=processor, kept=features) + code, **environment)
