"""One case after the other: make the data, let everyone compute, verify, time those who are right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from normgrad.bench.cases import Case
from normgrad.bench.clock import FEWEST_ROUNDS, DeviceClock, Timing, captured, host_clock, measure
from normgrad.bench.contenders.contender import Contender, Library, Role, Unavailable
from normgrad.bench.contenders.ours import PLAN, Normgrad
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

    def timings(self, contenders: Iterable[Contender]) -> dict[str, Timing]:
        """Time contenders in turn."""
        runs = {contender.name: contender.run for contender in contenders}
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


def host_and_graph_times(work: Workload, contenders: Sequence[Contender]) -> dict[str, tuple[float, float | None]]:
    """Return a call's seconds on the host and in a CUDA graph, by contender: normgrad's ways and PyTorch's operator.

    Of normgrad the plan alone is captured, which allocates nothing.
    """
    if work.case.nbytes * (work.traffic.reads + work.traffic.writes) > _HOST_BOUND:
        return {}
    runs = {c.name: c.run for c in contenders if c.role is Role.OURS or c.name == "PyTorch"}
    host = measure(runs, 0.0, host_clock, batch=0.0, fewest=_HOST_ROUNDS)
    replays = {name: captured(run, _GRAPH_CALLS) for name, run in runs.items() if name in (PLAN, "PyTorch")}
    timings = measure(replays, 0.0, device_clock(cold=False), batch=0.0, fewest=_GRAPH_ROUNDS)
    graph = {name: timing.median / _GRAPH_CALLS for name, timing in timings.items()}
    return {name: (host[name].median, graph.get(name)) for name in runs}


def libraries(settings: Settings) -> list[Library]:
    """Everyone who is installed."""
    from normgrad.bench.contenders import gpu, jax, pytorch, streaming

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


def run_case(case: Case, contending: Sequence[Library], settings: Settings) -> CaseResult:
    """Measure everyone in one case."""
    work = workload(case, device=settings.device)
    contenders, skipped = prepared(work, contending)
    on_cpu = settings.device == "cpu"
    verdicts = verified(work, contenders, sampled=not on_cpu)  # a GPU's tensors are too large for the oracle
    right = [c for c in contenders if not verdicts[c.name].problem]
    growth = {c.name: peak_growth(c.run) for c in right if on_cpu and c.results is not None}
    timings = settings.timings(right)
    launches = host_and_graph_times(work, right) if settings.graph else {}
    measurements = [
        Measurement(
            c.name,
            c.role,
            timings.get(c.name),
            verdicts[c.name].worst if c.results is not None else None,
            verdicts[c.name].problem,
            growth.get(c.name),
            c.workspace,
            *launches.get(c.name, (None, None)),
        )
        for c in contenders
    ]
    return CaseResult(case, measurements, skipped)


def prepared(work: Workload, contending: Sequence[Library]) -> tuple[list[Contender], dict[str, str]]:
    """Who takes part, and why the others do not."""
    contenders: list[Contender] = []
    skipped: dict[str, str] = {}
    for library in contending:
        made, reason = _contenders_of(library, work)
        contenders += made
        if reason:
            skipped[library.name] = reason
    return contenders, skipped


def _contenders_of(library: Library, work: Workload) -> tuple[list[Contender], str]:
    """A library's contenders, each other's run once: they fail in ways of their own, on rows too long for them, say."""
    try:
        made = list(library.prepare(work))
        for contender in made:
            if contender.role is not Role.OURS:
                contender.run()
    except Unavailable as reason:
        return [], str(reason)
    except Exception as error:
        if isinstance(library, Normgrad):
            raise
        return [], f"{type(error).__name__}: {str(error)[:200]}"
    return made, ""


def verified(work: Workload, contenders: Sequence[Contender], sampled: bool = False) -> dict[str, Verdict]:
    """What is to be thought of each contender's results; of those who only move bytes, nothing bad."""
    verdicts = {contender.name: Verdict() for contender in contenders}
    claims = []
    for contender in contenders:
        if contender.results is None:
            continue
        verdict = verdicts[contender.name]
        results: Any = contender.results()
        claims.append(Claim(results, contender.role is Role.OURS, verdict))
    verify(work, claims, sampled)
    return verdicts
