"""Synchronised BatchNorm on real processes, against PyTorch's BatchNorm in one process on the whole batch."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from support.ranks import run_ranks
from support.sync_cases import CHANNELS, STEPS, Case, cases, train_in_one_process, train_on_rank
from support.sync_checks import assert_one_batch_norm

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="PyTorch without gloo")


def train_every_case(ranks: int) -> dict[str, dict[str, Tensor]]:
    return {name: train_on_rank(case) for name, case in cases(ranks).items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_together_are_one_batch_norm(ranks: int, tmp_path: Path) -> None:
    found = run_ranks(ranks, train_every_case, tmp_path, ranks)
    for name, case in cases(ranks).items():
        assert_one_batch_norm(name, case, [rank[name] for rank in found])


def try_the_rest() -> dict[str, Any]:
    """What needs two ranks, each check with a name of its own."""
    return {
        "collectives": name_collectives(),
        "memory formats": keep_memory_formats(),
        "compiled": {name: train_on_rank(cases(2)[name], wrap=compiled) for name in COMPILED},
        "compiled for any size": compile_for_any_size(),
        "no values": train_on_nothing(),
        "one value": raise_for_one_value(),
        "evaluation without buffers": evaluate_without_buffers(),
        "second derivative": differentiate_twice(),
        "data parallel": train_data_parallel(),
    }


COMPILED = ["uneven", "an empty rank", "all but one empty", "bfloat16", "channels last", "not affine", "cumulative"]
COMPILED += ["no running statistics", "frozen parameters", "float64"]


def compiled(norm: nn.Module) -> Any:
    torch.compiler.reset()
    return torch.compile(norm, backend="aot_eager", fullgraph=True)


class Collectives(TorchDispatchMode):
    """The collectives that are called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and func.overloadpacket.__name__ != "wait_tensor":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def name_collectives() -> list[str]:
    with Collectives() as collectives:
        train_on_rank(cases(2)["uneven"])
    return collectives.names


def keep_memory_formats() -> list[bool]:
    from normgrad.torch import SyncBatchNorm

    kept = []
    for shape, memory_format in [((2, 3, 4, 5), torch.channels_last), ((2, 3, 2, 4, 5), torch.channels_last_3d)]:
        x = torch.randn(shape).contiguous(memory_format=memory_format).requires_grad_()
        output = SyncBatchNorm(3)(x)
        output.backward(torch.randn(shape))
        kept += [tensor.is_contiguous(memory_format=memory_format) for tensor in (output, x.grad)]
    for dtype in (torch.float32, torch.float64):  # a sequence of features: PyTorch's outputs are contiguous, for a view
        x = torch.randn(2, 5, 3, dtype=dtype).transpose(1, 2)
        kept.append(SyncBatchNorm(3, dtype=dtype)(x).is_contiguous())
    return kept


def compile_for_any_size() -> list[bool]:
    """One graph for batches of every size, with the bits of the eager steps."""
    from normgrad.torch import SyncBatchNorm

    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    eager, traced = SyncBatchNorm(CHANNELS), SyncBatchNorm(CHANNELS)
    step = torch.compile(traced, backend=count, fullgraph=True, dynamic=True)
    same = []
    for samples in (2, 5, 9, 4):
        x = torch.randn(samples + 3 * dist.get_rank(), CHANNELS, 4)
        same.append(torch.equal(step(x), eager(x)))
    same += [torch.equal(ours, other) for ours, other in zip(eager.buffers(), traced.buffers(), strict=True)]
    return [*same, len(graphs) == 1]


def train_on_nothing() -> dict[str, Tensor]:
    """A step in which no rank has a sample leaves the running statistics alone, as BatchNorm does, compiled or not."""
    from normgrad.torch import SyncBatchNorm

    found = {}
    for way, wrap in {"eager": lambda norm: norm, "compiled": compiled}.items():
        norm = SyncBatchNorm(CHANNELS)
        x = torch.zeros(0, CHANNELS, 2, requires_grad=True)
        wrap(norm)(x).sum().backward()
        found |= {f"{way} {name}": buffer for name, buffer in norm.named_buffers()}
        found[f"{way} grad_weight"] = norm.weight.grad
    return found


def raise_for_one_value() -> str:
    from normgrad.torch import SyncBatchNorm

    try:
        SyncBatchNorm(CHANNELS)(torch.zeros(dist.get_rank(), CHANNELS))
    except ValueError as error:
        return str(error)
    return ""


def evaluate_without_buffers() -> Tensor:
    """Evaluation exchanges nothing: the ranks' results differ as their data do."""
    from normgrad.torch import SyncBatchNorm

    return SyncBatchNorm(1, track_running_stats=False).eval()(torch.tensor([[0.0], [2.0 + dist.get_rank()]]))


def differentiate_twice() -> str:
    from normgrad.torch import SyncBatchNorm

    x = torch.randn(4, CHANNELS, requires_grad=True)
    (first,) = torch.autograd.grad(SyncBatchNorm(CHANNELS)(x).pow(3).sum(), x, create_graph=True)
    try:
        first.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    convolution = nn.Conv2d(2, 4, 3, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3))


def optimise(network: Any, x: Tensor, target: Tensor) -> None:
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.mse_loss(network(x), target).backward()
        optimiser.step()


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 2, 6, 6, generator=generator).to(dtype), torch.randn(8, 3, generator=generator).to(dtype)


def train_data_parallel() -> dict[str, Tensor]:
    from normgrad.torch import convert_sync_batchnorm

    network = convert_sync_batchnorm(model())
    x, target = (tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in data())
    optimise(nn.parallel.DistributedDataParallel(network), x, target)
    return network.state_dict()


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, try_the_rest, tmp_path_factory.mktemp("ranks"))


def test_two_ranks(rest: list[dict[str, Any]]) -> None:
    """One test, since a worker of pytest's would start its own ranks."""
    for rank in rest:
        assert rank["collectives"] == STEPS * ["all_gather_into_tensor", "all_reduce"]
        assert rank["memory formats"] == [True] * 6
        assert all(rank["compiled for any size"]), rank["compiled for any size"]
        assert_untouched_by_nothing(rank["no values"])
        assert "Expected more than 1 value per channel when training" in rank["one value"]
        assert "once_differentiable" in rank["second derivative"]
    for name in COMPILED:
        assert_one_batch_norm(f"compiled {name}", cases(2)[name], [rank["compiled"][name] for rank in rest])
    for number, rank in enumerate(rest):
        expected = nn.functional.batch_norm(torch.tensor([[0.0], [2.0 + number]]), None, None, training=True)
        assert torch.equal(rank["evaluation without buffers"], expected)
    assert_data_parallel_is_one_process([rank["data parallel"] for rank in rest])


def assert_untouched_by_nothing(found: dict[str, Tensor]) -> None:
    for way in ("eager", "compiled"):
        assert torch.equal(found[f"{way} running_mean"], torch.zeros(CHANNELS))
        assert torch.equal(found[f"{way} running_var"], torch.ones(CHANNELS))
        assert torch.equal(found[f"{way} grad_weight"], torch.zeros(CHANNELS))
        assert int(found[f"{way} num_batches_tracked"]) == 1


def assert_data_parallel_is_one_process(ranks: list[dict[str, Tensor]]) -> None:
    exact, theirs = model().double(), model()
    optimise(exact, *data(torch.float64))
    optimise(theirs, *data())
    for name, expected in exact.state_dict().items():
        assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks), f"{name} differs between ranks"
        # Three steps of a network of several layers: PyTorch's own distance from float64 says what is to be expected.
        usual = float((theirs.state_dict()[name] - expected).abs().max())
        distance = float((ranks[0][name] - expected).abs().max())
        assert distance <= 8 * usual + 2.0**-20 * float(expected.abs().max()), name


def train_in_pairs() -> dict[str, Tensor]:
    """Ranks 0 and 1 are one BatchNorm, 2 and 3 another on the same data, and every rank in two groups of one."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([rank]) for rank in range(4)]
    rank = dist.get_rank()
    case = cases(2)["uneven"]
    found = train_on_rank(case, process_group=pairs[rank // 2])
    single = Case((sum(case.split),))
    return found | {f"alone {key}": value for key, value in train_on_rank(single, alone[rank]).items()}


def test_process_groups(tmp_path: Path) -> None:
    found = run_ranks(4, train_in_pairs, tmp_path)
    case = cases(2)["uneven"]
    together = [{key: value for key, value in rank.items() if "alone" not in key} for rank in found]
    assert_one_batch_norm("first pair", case, together[:2])
    assert_one_batch_norm("second pair", case, together[2:])
    expected = train_in_one_process(Case((sum(case.split),)), torch.float32)
    for rank in found:
        assert all(torch.equal(rank[f"alone {key}"], value) for key, value in expected.items())


def train_in_float64() -> float:
    """The largest relative error of the running statistics, with momentum=None."""
    from normgrad.torch import SyncBatchNorm

    norm, whole = SyncBatchNorm(4, momentum=None).double(), nn.BatchNorm1d(4, momentum=None).double()
    for step in range(3):
        batch = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        whole(batch)
        norm(batch.chunk(2)[dist.get_rank()])
    pairs = ((norm.running_mean, whole.running_mean), (norm.running_var, whole.running_var))
    return max(float(((ours - theirs) / theirs).abs().max()) for ours, theirs in pairs)


def test_running_statistics_of_float64_without_momentum(tmp_path: Path) -> None:
    assert max(run_ranks(2, train_in_float64, tmp_path)) < 1e-13


def train_by_the_formulas() -> dict[str, Tensor]:
    """As on a GPU on which our kernels do not run."""
    from normgrad.torch import formulas, sync_batch_norm_function

    sync_batch_norm_function._steps = lambda data: formulas
    return train_on_rank(cases(2)["uneven"])


def test_without_our_kernels(tmp_path: Path) -> None:
    assert_one_batch_norm("by the formulas", cases(2)["uneven"], run_ranks(2, train_by_the_formulas, tmp_path))


SHORT = 4.0  # seconds that a rank waits for one that does not come


def lose_a_rank() -> tuple[str, float]:
    """Rank 3 is killed between rank 0's forward and backward pass; rank 2 is too late for rank 1's forward pass."""
    from normgrad.torch import SyncBatchNorm

    x = torch.randn(4, CHANNELS, requires_grad=True)
    SyncBatchNorm(CHANNELS)(x).sum().backward()  # so that no rank has kernels to load later
    patience = datetime.timedelta(seconds=SHORT)
    groups = [dist.new_group([0, 3], timeout=patience), dist.new_group([1, 2], timeout=patience)]
    rank = dist.get_rank()
    norm = SyncBatchNorm(CHANNELS, process_group=groups[rank in (1, 2)])
    if rank == 2:
        time.sleep(2 * SHORT)
        return "", 0.0
    start = time.monotonic()
    try:
        output = norm(x)
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        output.sum().backward()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "nothing was raised", 0.0


def test_a_lost_rank_is_an_error_and_no_hang(tmp_path: Path) -> None:
    first, second, *_ = run_ranks(4, lose_a_rank, tmp_path, killed=3)
    reason = "of all ranks: a rank has ended, or has not taken part within the process group's timeout"
    assert f"SyncBatchNorm cannot add up the sums of the gradient {reason}" in first[0]
    assert f"SyncBatchNorm cannot gather the statistics {reason}" in second[0]
    assert max(first[1], second[1]) < 2 * SHORT


def test_the_example(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "sync_batch_norm.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    path = os.pathsep.join(part for part in sys.path if part)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {line[:26].strip(): [float(cell) for cell in line[26:].split()] for line in done.stdout.splitlines()[2:6]}
    alone, plain, synchronised = rows["one process, whole batch"], rows["BatchNorm"], rows["SyncBatchNorm"]
    assert synchronised == pytest.approx(alone, abs=2e-5)
    assert plain != pytest.approx(alone, abs=1e-2)
    assert done.stdout.startswith("2 processes, with 8, 24 samples")
