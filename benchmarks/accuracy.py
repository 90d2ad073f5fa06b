"""How accurate every implementation is: its largest error as a fraction of the bound, by dtype and kind of case.

    python benchmarks/accuracy.py                        every backend on the CPU, and PyTorch beside it
    python benchmarks/accuracy.py --device cuda          every backend on the GPU, PyTorch, Liger and QuACK beside it
    python benchmarks/accuracy.py --backends reference   one backend alone

What is measured goes into benchmarks/results/accuracy.json, where it replaces what that backend or peer had on that
device; ``pages.py`` writes the pages from there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from normgrad import backends
from normgrad.bench import machine
from normgrad.bench.implementations import gpu, pytorch
from normgrad.bench.implementations.implementation import Unavailable, results_of
from normgrad.bench.tensors import as_torch
from normgrad.contract.status import NO_KERNEL, ContractError
from normgrad.operators import OPERATORS
from normgrad.testing.cases import TestCase, make_cases
from normgrad.testing.comparison import measure
from normgrad.testing.expected import as_tuple, checked, exact_results, magnitudes
from normgrad.testing.host import on_host

ROOT = Path(__file__).parents[1]
STORE = ROOT / "benchmarks" / "results" / "accuracy.json"
_DEFAULTS = {"eps": 1e-5, "input_g": True, "weight_g": True, "bias_g": True}
_IN_PLACE = ("running_mean", "running_var")
_MADE_WITH = {
    "reference": ["numpy"],
    "cpu": ["numpy", "numba"],
    "cuda": ["torch", "triton"],
    "PyTorch": ["torch"],
    "Liger": ["liger-kernel", "torch", "triton"],
    "QuACK": ["quack-kernels", "torch"],
}


def main() -> int:
    """Measure, merge, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backends", nargs="+", choices=backends.BACKENDS, help="default: every one of the device")
    options = parser.parse_args()
    stored = json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}
    stored |= measured(options.device, options.backends)
    STORE.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


def measured(device: str, names: list[str] | None) -> dict[str, Any]:
    """The findings on every implementation, by its name and device."""
    chosen = names or [name for name, (_, kind) in backends.BACKENDS.items() if kind == device]
    cases = [case for name in OPERATORS for case in make_cases(name) if case.kind not in ("dtypes", "masks")]
    others = _peers(device)
    found = {f"{name} ({device})": _entry(name, device, True) for name in chosen}
    found |= {f"{name} ({device})": _entry(name, device, False) for name in others}
    for case in track(cases, "Measuring", disable=not sys.stderr.isatty()):
        for name in chosen:
            entry = _backend_errors(name, case, device)
            if entry is not None:
                found[f"{name} ({device})"]["cases"][_key(case)] = entry
        for name, peer in others.items():
            outcome = _by_peer(peer, case, device)
            if outcome is not None:
                arguments, result = outcome
                entry = _errors(case.operator, arguments, result)
                if any(arguments[key] is not value for key, value in case.arguments.items()):
                    adapted = replace(case, arguments=arguments)
                    entry["adapted"] = {ours: _backend_errors(ours, adapted, device) for ours in chosen}
                found[f"{name} ({device})"]["cases"][_key(case)] = entry
    return found


def _key(case: TestCase) -> str:
    return f"{case.operator} {case.name}"


def _entry(name: str, device: str, ours: bool) -> dict[str, Any]:
    versions = {package: metadata.version(package) for package in _MADE_WITH[name]}
    return {"ours": ours, "machine": machine.hardware(machine.describe(device)), "versions": versions, "cases": {}}


def _backend_errors(name: str, case: TestCase, device: str) -> dict[str, Any] | None:
    """What a backend's errors are; None where it has no such kernel."""
    os.environ[backends.ENVIRONMENT] = name
    operator = OPERATORS[case.operator]
    arguments = {key: value.copy() if key in _IN_PLACE else value for key, value in case.arguments.items()}
    if device != "cpu":
        arguments = _tensors(arguments, device)
    try:
        found = as_tuple(operator(**arguments))
    except ContractError as error:
        if error.status != NO_KERNEL:
            raise
        return None
    results = dict(zip(operator.signature.output_names, found, strict=True))
    results |= {key: arguments[key] for key in _IN_PLACE if key in arguments}
    return _errors(case.operator, case.arguments, {key: on_host(value) for key, value in results.items()})


# Other libraries

#: Runs an operator on tensors by parameter name and returns a tensor, or None, per output.
Peer = Callable[[str, dict[str, Any], str], Sequence[Any]]


def _peers(device: str) -> dict[str, Peer]:
    """The implementations there are, by name."""
    every: dict[str, tuple[str, Peer]] = {"PyTorch": ("torch", _pytorch)}
    if device == "cuda":
        every["Liger"] = "liger_kernel", lambda operator, tensors, _: gpu.liger(operator, tensors)
        every["QuACK"] = "quack", lambda operator, tensors, _: gpu.quack(operator, tensors)
    return {name: peer for name, (module, peer) in every.items() if find_spec(module) is not None}


def _pytorch(operator: str, tensors: dict[str, Any], device: str) -> Sequence[Any]:
    if device == "cpu" and operator == "batch_norm_elemt":
        raise Unavailable("in evaluation mode BatchNorm takes a variance, which would have to be computed first")
    if device == "cpu" and operator == "batch_norm_stats":  # the statistics that BatchNorm itself uses
        import torch

        return torch.native_batch_norm(tensors["input"], None, None, None, None, True, 0.0, 1e-5)[1:]
    return results_of(pytorch.operator(operator, tensors, device))


def _by_peer(peer: Peer, case: TestCase, device: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """A library's results, with the arguments: the call's, or the nearest that the library takes.

    Where it does not take 16-bit weights beside float32 statistics, with float32 weights; or else with narrower
    statistics. Others' compilers raise errors of their own kinds, so any is taken for a refusal.
    """
    given = case.arguments
    wide = {name: given[name].astype(np.float32) for name in ("weight", "bias") if given.get(name) is not None}
    narrow = {name: given[name].astype(given["input"].dtype) for name in ("mean", "rstd") if name in given}
    changes = [{}, wide, narrow] if peer is _pytorch and given["input"].dtype != np.float32 else [{}]
    for changed in changes:
        arguments = {**given, **changed}
        try:
            found = peer(case.operator, _tensors(_DEFAULTS | arguments, device), device)
        except Unavailable:
            return None
        except Exception as error:
            if peer is not _pytorch:
                print(f"{case.operator} {case.name}: {type(error).__name__}: {str(error)[:100]!r}", file=sys.stderr)
            continue
        names = OPERATORS[case.operator].signature.output_names
        return arguments, {n: on_host(t) for n, t in zip(names, found, strict=True) if t is not None}
    return None


def _tensors(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    return {
        name: as_torch(np.ascontiguousarray(value).copy(), device) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


def _errors(operator: str, arguments: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """The largest error of every output as a fraction of the bound, and the share of elements rounded right."""
    call = checked(OPERATORS[operator], arguments, None)
    exact, sizes = exact_results(OPERATORS[operator], call), magnitudes(OPERATORS[operator], call)
    shares, right, elements = {}, 0, 0
    for name, value in results.items():
        one = measure(value, exact[name].reshape(value.shape), sizes[name].reshaped(value.shape))
        shares[name] = float(np.max(one.share_of_bound, initial=0.0))
        same = (one.actual == one.nearest) | (np.isnan(one.actual) & np.isnan(one.nearest))
        right, elements = right + int(np.count_nonzero(same)), elements + same.size
    return {"shares": shares, "rounded": right / max(elements, 1)}


if __name__ == "__main__":
    sys.exit(main())
