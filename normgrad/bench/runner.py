"""One case after the other: make the data, let everyone compute, verify, time those who are right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from normgrad.bench.cases import Case
from normgrad.bench.clock import FEWEST_ROUNDS, DeviceClock, Timing, captured, host_clock, measure
from normgrad.bench.implementations.implementation import Implementation, Library, Role, Unavailable
from normgrad.bench.implementations.ours import PLAN, Normgrad
from normgrad.bench.memory import peak_growth
from normgrad.bench.results import CaseResult, Measurement
from normgrad.bench.verification import Claim, Verdict, verify
from normgrad.bench.workload import Workload, workload


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes
    ----------
    device : str
        ``cpu`` or ``cuda``.
    budget : float
        About how many seconds to time each case.
    compiled : bool
        Whether torch.compile takes part, which takes seconds for every case.
    compiled_cases : set of Case or None
        In which cases it does; None: in all.
    fewest_rounds : int
        How often everyone is timed at least.
    graph : bool
        Whether to time, on a GPU, the host's part of small calls and their replay in a CUDA graph.
    """

    device: str = "cpu"
    budget: float = 2.0
    compiled: bool = False
    compiled_cases: frozenset[Case] | None = None
    fewest_rounds: int = FEWEST_ROUNDS
    graph: bool = False

    def timings(self, implementations: Iterable[Implementation]) -> dict[str, Timing]:
        """Time implementations in turn."""
        runs = {implementation.name: implementation.run for implementation in implementations}
        if self.device == "cpu":
            return measure(runs, self.budget, fewest=self.fewest_rounds)
        # One call a round: the device's clock is exact, and evicts the caches before every call.
        return measure(runs, self.budget, device_clock(), batch=0.0, fewest=self.fewest_rounds)


@cache
def device_clock(cold: bool = True) -> DeviceClock:
    """Return the clock of the CUDA device, which keeps memory of its own on it."""
    return DeviceClock(cold)


#: Up to so many bytes that an operator moves, launching it takes the host longer than the GPU takes to run it.
_HOST_BOUND = 20_000_000
_HOST_ROUNDS, _GRAPH_ROUNDS, _GRAPH_CALLS = 200, 15, 10


def host_and_graph_times(
    work: Workload, implementations: Sequence[Implementation]
) -> dict[str, tuple[float, float | None]]:
    """Return a call's seconds on the host and in a CUDA graph, of normgrad's calls and of PyTorch's operator.

    Of normgrad the plan alone is captured, which allocates nothing.
    """
    if work.case.nbytes * (work.traffic.reads + work.traffic.writes) > _HOST_BOUND:
        return {}
    runs = {one.name: one.run for one in implementations if one.role is Role.OURS or one.name == "PyTorch"}
    host = measure(runs, 0.0, host_clock, batch=0.0, fewest=_HOST_ROUNDS)
    replays = {name: captured(run, _GRAPH_CALLS) for name, run in runs.items() if name in (PLAN, "PyTorch")}
    timings = measure(replays, 0.0, device_clock(cold=False), batch=0.0, fewest=_GRAPH_ROUNDS)
    graph = {name: timing.median / _GRAPH_CALLS for name, timing in timings.items()}
    return {name: (host[name].median, graph.get(name)) for name in runs}


def libraries(settings: Settings) -> list[Library]:
    """Everyone who is installed."""
    from normgrad.bench.implementations import gpu, jax, pytorch, streaming

    device = settings.device
    every: list[tuple[str | None, Callable[[], Library]]] = [(None, Normgrad)]
    if device == "cpu":
        every += [(None, streaming.Streaming), (None, streaming.NumpyStreaming)]
    every += [
        ("torch", streaming.TorchStreaming if device == "cpu" else streaming.DeviceCopy),
        ("torch", pytorch.PyTorch),
    ]
    if device == "cpu":
        every.append(("jax", jax.Jax))
    if settings.compiled:
        every.append(("torch", lambda: pytorch.CompiledPyTorch(settings.compiled_cases)))
    if device == "cuda":
        every += [
            ("liger_kernel", lambda: gpu.Published("Liger", gpu.liger)),
            ("quack", lambda: gpu.Published("QuACK", gpu.quack)),
        ]
    return [make() for module, make in every if module is None or find_spec(module) is not None]


def run_case(case: Case, libraries: Sequence[Library], settings: Settings) -> CaseResult:
    """Measure all implementations in one case."""
    work = workload(case, device=settings.device)
    implementations, skipped = prepared(work, libraries)
    on_cpu = settings.device == "cpu"
    verdicts = verified(work, implementations, sampled=not on_cpu)  # a GPU's tensors are too large for the oracle
    right = [one for one in implementations if not verdicts[one.name].problem]
    growth = {one.name: peak_growth(one.run) for one in right if on_cpu and one.results is not None}
    timings = settings.timings(right)
    launches = host_and_graph_times(work, right) if settings.graph else {}
    measurements = [
        Measurement(
            one.name,
            one.role,
            timings.get(one.name),
            verdicts[one.name].worst if one.results is not None else None,
            verdicts[one.name].problem,
            growth.get(one.name),
            one.workspace,
            *launches.get(one.name, (None, None)),
        )
        for one in implementations
    ]
    return CaseResult(case, measurements, skipped)


def prepared(work: Workload, libraries: Sequence[Library]) -> tuple[list[Implementation], dict[str, str]]:
    """Return the implementations of a workload, and by library why one has none."""
    implementations: list[Implementation] = []
    skipped: dict[str, str] = {}
    for library in libraries:
        made, reason = _implementations_of(library, work)
        implementations += made
        if reason:
            skipped[library.name] = reason
    return implementations, skipped


def _implementations_of(library: Library, work: Workload) -> tuple[list[Implementation], str]:
    """A library's implementations, all but ours run once: other libraries fail in their own ways, as on long rows."""
    try:
        made = list(library.prepare(work))
        for implementation in made:
            if implementation.role is not Role.OURS:
                implementation.run()
    except Unavailable as reason:
        return [], str(reason)
    except Exception as error:
        if isinstance(library, Normgrad):
            raise
        return [], f"{type(error).__name__}: {str(error)[:200]}"
    return made, ""


def verified(work: Workload, implementations: Sequence[Implementation], sampled: bool = False) -> dict[str, Verdict]:
    """Return what was found about each implementation's results; nothing bad of those that only move bytes."""
    verdicts = {implementation.name: Verdict() for implementation in implementations}
    claims = []
    for implementation in implementations:
        if implementation.results is None:
            continue
        verdict = verdicts[implementation.name]
        results: Any = implementation.results()
        claims.append(Claim(results, implementation.role is Role.OURS, verdict))
    verify(work, claims, sampled)
    return verdicts
