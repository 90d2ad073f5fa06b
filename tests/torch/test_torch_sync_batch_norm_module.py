"""The module SyncBatchNorm and the conversion of models, in one process."""

from __future__ import annotations

import copy
import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize, prune

from normgrad.torch import SyncBatchNorm, convert_sync_batchnorm
from support.processes import run_python

BATCH_NORMS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm]
OPTIONS = [
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"eps": 0.1, "momentum": 0.5},
    {"dtype": torch.float64},
]


def trained(norm: Any, steps: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if norm.weight is None else norm.weight.dtype
    found: dict[str, Any] = {}
    for step in range(steps):
        x = torch.randn(4, 3, 5, generator=generator).to(dtype).requires_grad_()
        output = norm(x)
        output.pow(3).sum().backward()
        found |= {f"output {step}": output.detach(), f"gradient {step}": x.grad}
    norm.eval()
    return found | {"evaluation": norm(x).detach()} | norm.state_dict()


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_the_arguments_are_pytorchs() -> None:
    theirs = inspect.signature(nn.SyncBatchNorm).parameters
    ours = inspect.signature(SyncBatchNorm).parameters
    assert list(ours)[:-1] == list(theirs)[: len(ours) - 1]
    assert all(ours[name].default == theirs[name].default for name in list(ours)[:-1])
    with pytest.raises(TypeError, match="colour"):
        SyncBatchNorm(3, colour="blue")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_text_is_pytorchs(options: dict[str, Any]) -> None:
    assert repr(SyncBatchNorm(3, **options)) == repr(nn.SyncBatchNorm(3, **options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_without_a_process_group_it_is_batch_norm_bit_for_bit(options: dict[str, Any]) -> None:
    assert_same(trained(SyncBatchNorm(3, **options)), trained(nn.BatchNorm1d(3, **options)))


def test_in_a_group_of_one_it_is_batch_norm_bit_for_bit(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1)
    try:
        assert_same(trained(SyncBatchNorm(3)), trained(nn.BatchNorm1d(3)))
        assert_same(trained(SyncBatchNorm(3, process_group=dist.new_group([0]))), trained(nn.BatchNorm1d(3)))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("other", BATCH_NORMS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_state_dicts_go_both_ways(other: Any, options: dict[str, Any]) -> None:
    ours, theirs = SyncBatchNorm(3, **options), other(3, **options)
    for source, target in ((ours, theirs), (theirs, ours)):
        for value in source.state_dict().values():
            value.copy_(torch.rand(value.shape) * 9)
        target.load_state_dict(source.state_dict())
        assert_same(target.state_dict(), source.state_dict())


@pytest.mark.parametrize("other", BATCH_NORMS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_converted_layer_keeps_everything(other: Any, options: dict[str, Any]) -> None:
    norm = other(3, **options).eval()
    for value in norm.state_dict().values():
        value.copy_(torch.rand(value.shape) * 9)
    norm.requires_grad_(False)
    converted = convert_sync_batchnorm(norm)
    assert type(converted) is SyncBatchNorm
    assert (converted.training, converted.eps, converted.momentum) == (False, norm.eps, norm.momentum)
    assert (converted.affine, converted.track_running_stats) == (norm.affine, norm.track_running_stats)
    assert converted.weight is norm.weight
    assert converted.bias is norm.bias
    assert converted.running_mean is norm.running_mean
    assert converted.running_var is norm.running_var
    assert converted.num_batches_tracked is norm.num_batches_tracked
    assert_same(converted.state_dict(), norm.state_dict())


def test_a_converted_layer_stays_on_its_device() -> None:
    converted = convert_sync_batchnorm(nn.BatchNorm1d(3, device="meta"))
    assert {str(value.device) for value in converted.state_dict().values()} == {"meta"}
    converted = convert_sync_batchnorm(nn.BatchNorm1d(3))
    assert {str(value.device) for value in converted.state_dict().values()} == {"cpu"}


@pytest.mark.skipif(
    "bias" not in inspect.signature(nn.BatchNorm1d).parameters, reason="this PyTorch has no such option"
)
def test_a_layer_without_bias() -> None:
    converted = convert_sync_batchnorm(nn.BatchNorm1d(3, bias=False))
    assert converted.bias is None
    assert_same(trained(converted), trained(nn.BatchNorm1d(3, bias=False)))


def test_a_converted_model() -> None:
    shared = nn.BatchNorm1d(2)
    inner = nn.ModuleDict({"norm": nn.BatchNorm2d(4), "other": nn.GroupNorm(2, 4), "shared": shared})
    model = nn.Sequential(nn.Linear(3, 2), shared, inner, nn.Sequential(nn.ReLU(), shared)).train()
    model.register_module("nothing", None)
    inner.eval()
    names = list(model.state_dict())
    converted = convert_sync_batchnorm(model, process_group="a group")
    assert converted is model
    assert list(model.state_dict()) == names
    kinds = {name: type(module).__name__ for name, module in model.named_modules(remove_duplicate=False)}
    assert [name for name, kind in kinds.items() if kind == "SyncBatchNorm"] == ["1", "2.norm", "2.shared", "3.1"]
    assert kinds["2.other"] == "GroupNorm"
    assert model[1] is model[2]["shared"] is model[3][1]
    assert model[1].process_group == "a group"
    assert not model[2]["norm"].training
    layer = model[1]
    again = convert_sync_batchnorm(model)
    assert again[1] is layer
    assert layer.process_group == "a group"
    assert convert_sync_batchnorm(model, process_group="another")[1].process_group == "another"


@pytest.mark.parametrize("kind", [SyncBatchNorm, nn.SyncBatchNorm])
def test_a_synchronised_layer_keeps_its_process_group(kind: Any) -> None:
    assert convert_sync_batchnorm(kind(2, process_group="a group")).process_group == "a group"
    assert convert_sync_batchnorm(kind(2, process_group="a group"), "another").process_group == "another"


class WithActivation(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


class OtherDefaults(nn.BatchNorm2d):
    def __init__(self, num_features: int) -> None:
        super().__init__(num_features, eps=0.5)


def test_a_subclass_that_does_more_is_refused_before_anything_is_changed() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ModuleDict({"norm": WithActivation(3)}))
    with pytest.raises(ValueError, match=r"1\.norm is a WithActivation, whose forward is its own"):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d
    model = nn.Sequential(nn.BatchNorm2d(3), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="no number of channels"):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d
    converted = convert_sync_batchnorm(OtherDefaults(3))
    assert (type(converted), converted.eps) == (SyncBatchNorm, 0.5)


def pruned(norm: nn.Module) -> None:
    prune.random_unstructured(norm, "weight", 0.5)


def parametrized(norm: nn.Module) -> None:
    parametrize.register_parametrization(norm, "bias", nn.Tanh())


def wrapped(norm: nn.Module) -> None:
    norm.forward = norm.forward


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (pruned, "1 is a BatchNorm1d, whose weight is no parameter"),
        (parametrized, "1 is a ParametrizedBatchNorm1d, whose bias is no parameter"),
        (wrapped, "1 is a BatchNorm1d, whose forward is its own"),
    ],
)
def test_a_layer_that_does_more_is_refused_before_anything_is_changed(change: Any, text: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    change(model[1])
    with pytest.raises(ValueError, match=text):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d


def test_a_subclass_of_ours_stays() -> None:
    class Mine(SyncBatchNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).relu()

    norm = Mine(3)
    assert convert_sync_batchnorm(norm) is norm


def test_a_subclass_converts_to_itself() -> None:
    class Mine(SyncBatchNorm):
        pass

    assert type(Mine.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)))[0]) is Mine


def test_a_layer_that_does_not_know_its_channels_yet_is_refused() -> None:
    with pytest.raises(
        ValueError, match="0 is a LazyBatchNorm1d, which has no number of channels yet: run the model once"
    ):
        convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_it_is_not_pytorchs_which_data_parallel_training_on_the_cpu_refuses() -> None:
    assert not isinstance(SyncBatchNorm(3), nn.SyncBatchNorm)
    assert isinstance(SyncBatchNorm(3), nn.modules.batchnorm._BatchNorm)


def test_copies_and_files() -> None:
    norm = SyncBatchNorm(3)
    file = io.BytesIO()
    torch.save(norm, file)
    file.seek(0)
    for again in (copy.deepcopy(norm), torch.load(file, weights_only=False)):
        assert_same(trained(again), trained(copy.deepcopy(norm)))


@pytest.mark.parametrize(
    ("shape", "text"),
    [((3,), "expected at least 2D input"), ((2, 4, 5), "expected 3 channels"), ((2, 0), "expected 3")],
)
def test_wrong_shapes(shape: tuple[int, ...], text: str) -> None:
    for norm in (SyncBatchNorm(3), SyncBatchNorm(3).eval()):
        with pytest.raises(ValueError, match=text):
            norm(torch.zeros(shape))


def test_gloo_is_known_by_the_device_that_it_serves(tmp_path: Path) -> None:
    """On tensors of a GPU its collectives end the process, so they are given tensors of the host."""
    code = f"""
import warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from normgrad.torch.internals import is_gloo
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
name = dist.group.WORLD.group_name
compiled = torch.compile(lambda x: x + is_gloo(name, "cuda"), fullgraph=True, backend="aot_eager")
print(is_gloo(name, "cpu"), is_gloo(name, "cuda"), compiled(torch.zeros(1)).item())
dist.destroy_process_group()
"""
    assert run_python(code) == "True True 1.0\n"
