"""Models with normgrad's modules and override() in the ways large models are trained, on two ranks over gloo."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import normgrad.torch
from normgrad.torch import functional, heuristics
from support.ranks import run_ranks
from support.torch_samples import random

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

WORLD = 2
STEPS = 3


class Block(torch.nn.Module):
    """Both norms between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 12)
        self.norm = torch.nn.LayerNorm(12)
        self.groups = torch.nn.GroupNorm(3, 6)
        self.last = torch.nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.groups(self.norm(self.first(x)).unflatten(-1, (6, 2)).flatten(0, 1)).flatten(1)).view(
            x.shape
        )


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(Block(), Block())


def batch(step: int) -> torch.Tensor:
    return random(4, 5, 8, seed=step)


def take_all() -> None:
    """Small tensors are ours in this process: its heuristics are its own."""
    heuristics.MIN_FLOAT32 = 0


def prepare(use: str) -> tuple[torch.nn.Module, Any]:
    """The model, and the override if there is one."""
    take_all()
    model = make_model()
    if use == "override":
        return model, normgrad.torch.override()
    normgrad.torch.replace_norms(model)
    return model, None


def train(model: torch.nn.Module, of_rank: slice = slice(None)) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)[of_rank]).square().mean().backward()
        optimizer.step()


def expected() -> dict[str, torch.Tensor]:
    """What torch.nn's model is after the training, in one process."""
    model = make_model()
    train(model)
    return model.state_dict()


def my_rows() -> slice:
    return slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def calls_of(override: Any) -> int:
    """How many calls were ours; of modules, the test of the gradient's node says it."""
    if override is None:
        return 1
    override.undo()
    return sum(override.report().taken.values())


def ddp(use: str) -> Any:
    model, override = prepare(use)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    train(parallel, my_rows())
    return model.state_dict(), calls_of(override)


def fsdp(use: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    model, override = prepare(use)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    train(model, my_rows())
    return whole(model.state_dict()), calls_of(override)


def checkpointed(use: str) -> Any:
    from torch.utils.checkpoint import checkpoint

    model, override = prepare(use)
    states = []
    for reentrant in (False, True):
        again = copy.deepcopy(model)
        wrapped = Wrapped(again, lambda part, x, reentrant=reentrant: checkpoint(part, x, use_reentrant=reentrant))
        parallel = torch.nn.parallel.DistributedDataParallel(wrapped)
        train(parallel, my_rows())
        states.append(again.state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)
    return states[0], calls_of(override)


class Wrapped(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, call: Any) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in self.model:
            x = self.call(block, x)
        return x


def every_way(use: str) -> dict[str, Any]:
    return {job.__name__: job(use) for job in (ddp, fsdp, checkpointed)}


@pytest.mark.parametrize("use", ["modules", "override"])
def test_training_gives_the_model_of_one_process(use: str, tmp_path: Path) -> None:
    for found in run_ranks(WORLD, every_way, tmp_path, use):
        for name, (state, ours) in found.items():
            assert ours > 0, name
            torch.testing.assert_close(state, expected(), rtol=1e-5, atol=1e-6)


# DTensor and SequenceParallel


@pytest.mark.parametrize("norm", [normgrad.torch.LayerNorm(6), normgrad.torch.GroupNorm(2, 4)], ids=["rows", "groups"])
def test_what_a_collective_has_still_to_fill_is_ours(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two layers of tensor parallelism a module gets such a tensor, by itself or inside a DTensor."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    monkeypatch.setattr(heuristics, "MIN_FLOAT32", 0)
    found = []
    for make in (torch.Tensor.clone, lambda tensor: AsyncCollectiveTensor(tensor.clone())):
        x = make(random(5, 4, 6)).requires_grad_()
        output = norm(x)
        assert type(output) is torch.Tensor
        assert output.grad_fn.name().startswith("Normgrad")
        output.sin().sum().backward()
        found.append([output.detach(), x.grad])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def dtensors() -> Any:
    return norms_of_dtensors(), {use: sequence_parallel(use) for use in ("modules", "override")}


def norms_of_dtensors() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    take_all()
    calls = []
    for name in ("run_layer_norm", "run_group_norm"):
        run = getattr(functional, name)
        setattr(functional, name, lambda *args, run=run: calls.append(run) or run(*args))
    mesh = init_device_mesh("cpu", (WORLD,))
    found = []
    for norm, dims in ((normgrad.torch.LayerNorm(6), 3), (normgrad.torch.GroupNorm(2, 4), 1)):
        for dim in (*range(dims), None):
            placement = Replicate() if dim is None else Shard(dim)
            sharded = copy.deepcopy(norm)
            for name, parameter in norm.named_parameters():
                value = distribute_tensor(random(*parameter.shape), mesh, [Replicate()])
                setattr(sharded, name, torch.nn.Parameter(value))
            x = distribute_tensor(random(5, 4, 3, 6), mesh, [placement]).requires_grad_()
            output = sharded(x)
            assert output.placements == x.placements
            assert output.stride() == (72, 18, 6, 1)
            output.sin().sum().backward()
            assert sharded.weight.grad.placements == ((Replicate() if dim is None else Partial()),)
            found.append(
                [one.full_tensor().detach() for one in (output, x.grad, sharded.weight.grad, sharded.bias.grad)]
            )
    assert len(calls) == len(found), "a norm was not ours"
    # What would have to be redistributed is PyTorch's.
    x = distribute_tensor(random(5, 4, 3, 6), mesh, [Shard(3)])
    norm = normgrad.torch.LayerNorm(6, elementwise_affine=False)
    torch.testing.assert_close(norm(x).full_tensor(), norm(x.full_tensor()))
    return found


class Tokens(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def sequence_parallel(use: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        SequenceParallel,
        parallelize_module,
    )

    take_all()
    torch.manual_seed(5)
    model = Tokens()
    if use == "modules":
        normgrad.torch.replace_norms(model)
    mesh = init_device_mesh("cpu", (WORLD,))
    plan = {
        "norm": SequenceParallel(),
        "linear": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate(), use_local_output=True),
    }
    parallelize_module(model, mesh, PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)))
    parallelize_module(model, mesh, plan)
    override = normgrad.torch.override() if use == "override" else None
    x = random(2, 6, 8).requires_grad_()
    output = model(x)
    output.sin().sum().backward()
    if override is not None:
        override.undo()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return [output.detach(), *gradients], None if override is None else override.report().left


def norms_of_whole_tensors() -> list[list[torch.Tensor]]:
    found = []
    for norm, count in ((torch.nn.LayerNorm(6), 4), (torch.nn.GroupNorm(2, 4), 2)):
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.copy_(random(*parameter.shape))
        x = random(5, 4, 3, 6).requires_grad_()
        output = norm(x)
        output.sin().sum().backward()
        found += [[output.detach(), x.grad, norm.weight.grad, norm.bias.grad]] * count
    return found


def test_dtensors_and_sequence_parallel(tmp_path: Path) -> None:
    """The modules run on shards; the override leaves DTensors to PyTorch, and says so."""
    torch.manual_seed(5)
    model = Tokens()
    output = model(random(2, 6, 8))
    output.sin().sum().backward()
    right = [output.detach(), *(parameter.grad for parameter in model.parameters())]
    for norms, parallel in run_ranks(WORLD, dtensors, tmp_path):
        torch.testing.assert_close(norms, norms_of_whole_tensors())
        for found, _ in parallel.values():
            torch.testing.assert_close(found, right)
        left = parallel["override"][1]
        assert list(left["layer_norm"]) == ["a tensor is of a subclass, or not in strided memory"]


# Checkpoints


def saved_and_loaded(folder: str) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model, _ = prepare("modules")
    fully_shard(model)
    train(model, my_rows())
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    plain = make_model()  # torch.nn's, with other weights
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    fully_shard(plain)
    state = get_model_state_dict(plain)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(plain, state)
    return whole(plain.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_loads_into_pytorchs_modules(tmp_path: Path) -> None:
    for state in run_ranks(WORLD, saved_and_loaded, tmp_path, str(tmp_path / "checkpoint")):
        torch.testing.assert_close(state, expected(), rtol=1e-5, atol=1e-6)


# Trainers

USES = pytest.mark.parametrize("use", ["modules", "override"])


@contextmanager
def in_use(model: torch.nn.Module, use: str) -> Iterator[None]:
    """The model's norms are normgrad's, in one of the two ways; the override has taken each call."""
    if use == "modules":
        assert normgrad.torch.replace_norms(model)
        yield
        return
    with normgrad.torch.override() as override:
        yield
    assert override.report().taken
    assert not override.report().left


@USES
@pytest.mark.filterwarnings("ignore")  # the library's own
def test_lightning(use: str, small_tensors_are_ours: None, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, x: torch.Tensor, _: int) -> torch.Tensor:
            return self.model(x).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    data = torch.utils.data.DataLoader([batch(step) for step in range(STEPS)], batch_size=None)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path
    )
    with in_use(module, use):
        trainer.fit(module, data)
    torch.testing.assert_close(module.model.state_dict(), expected(), rtol=1e-5, atol=1e-6)


@USES
@pytest.mark.filterwarnings("ignore")  # the library's own
def test_transformers_trainer(use: str, small_tensors_are_ours: None, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    losses = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
        arguments = transformers.TrainingArguments(tmp_path, max_steps=3, report_to=[], use_cpu=True, seed=0)
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        with in_use(model, use) if ours else nullcontext():
            losses.append(trainer.train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
