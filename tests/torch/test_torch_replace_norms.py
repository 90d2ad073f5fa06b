"""``replace_norms`` changes the class of a model's norms and nothing else, and can be undone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import normgrad.torch
from normgrad.torch import replace_norms


class Residual(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.same = self.norm
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return x + self.linear(self.same(self.norm(x)))


def _model() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(Residual(), torch.nn.Unflatten(1, (4, 2)), torch.nn.GroupNorm(2, 4))


def test_modules_parameters_and_state_dict_stay_the_same_objects() -> None:
    model = _model()
    norm, weight, state = model[0].norm, model[0].norm.weight, model.state_dict()
    done = replace_norms(model)
    assert set(done) == {"0.norm", "2"}
    assert model[0].norm is norm is model[0].same is done["0.norm"]
    assert norm.weight is weight
    assert (type(norm), type(model[2])) == (normgrad.torch.LayerNorm, normgrad.torch.GroupNorm)
    assert list(model.state_dict()) == list(state)
    assert not done.left


def test_the_model_computes_the_same() -> None:
    model, x = _model(), torch.randn(5, 8)
    before = model(x)
    done = replace_norms(model)
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)
    done.undo()
    assert torch.equal(model(x), before)
    assert (type(model[0].norm), type(model[2])) == (torch.nn.LayerNorm, torch.nn.GroupNorm)


def test_hooks_dtype_and_training_mode_stay() -> None:
    model = _model().to(torch.bfloat16).eval()
    calls: list[str] = []
    model[2].register_forward_hook(lambda *_: calls.append("forward"))
    replace_norms(model)
    model(torch.randn(5, 8, dtype=torch.bfloat16))
    assert calls == ["forward"]
    assert not model[2].training
    assert model[2].weight.dtype == torch.bfloat16


def test_an_optimizer_made_before_trains_the_model() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_norms(model)
    before = model[2].weight.detach().clone()
    model(torch.randn(5, 8)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, model[2].weight)


def test_a_norm_by_itself() -> None:
    norm = torch.nn.LayerNorm(4)
    assert list(replace_norms(norm)) == [""]
    assert type(norm) is normgrad.torch.LayerNorm


def test_subclasses_and_scripted_modules_are_left_with_the_reason() -> None:
    class Fancy(torch.nn.LayerNorm):
        pass

    model = torch.nn.Sequential(Fancy(4), torch.nn.LayerNorm(4))
    done = replace_norms(model)
    assert list(done) == ["1"]
    assert f"{__name__}.{Fancy.__qualname__} is a subclass" in done.left["0"]  # libraries call theirs LayerNorm too
    assert type(model[0]) is Fancy


def test_a_second_time_there_is_nothing_to_replace() -> None:
    model = _model()
    replace_norms(model)
    again = replace_norms(model)
    assert not again
    assert not again.left
    assert repr(again) == "<Replacement: nothing>"


def test_undo_leaves_alone_what_something_else_has_changed() -> None:
    model = _model()
    done = replace_norms(model)
    other = type("Other", (torch.nn.GroupNorm,), {})
    model[2].__class__ = other
    done.undo()
    assert type(model[2]) is other


def test_undo_leaves_a_forward_that_has_been_wrapped_since() -> None:
    """It is bound to our class's, as accelerate's hooks bind it."""
    model = _model()
    done = replace_norms(model)
    forward = model[2].forward
    model[2].forward = lambda x: forward(x)
    done.undo()
    assert type(model[2]) is normgrad.torch.GroupNorm
    model[2](torch.randn(2, model[2].num_channels, 4))


def test_synchronised_norms_on_request() -> None:
    model = torch.nn.Sequential(torch.nn.SyncBatchNorm(3), torch.nn.BatchNorm1d(3))
    assert not replace_norms(model)
    done = replace_norms(model, sync_batch_norm=True)
    assert (list(done), type(model[0])) == (["0"], normgrad.torch.SyncBatchNorm)
    model.eval()(torch.randn(2, 3))
    done.undo()
    assert type(model[0]) is torch.nn.SyncBatchNorm


def test_copies_and_pickles_of_a_replaced_model() -> None:
    model = _model()
    replace_norms(model)
    assert type(copy.deepcopy(model)[2]) is normgrad.torch.GroupNorm


def test_a_module_whose_forward_is_an_attribute_is_left_with_the_reason() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.GroupNorm(2, 4), torch.nn.LayerNorm(4))
    for norm in model[:2]:
        forward = norm.forward
        norm.forward = lambda x, forward=forward: forward(x)
    done = replace_norms(model)
    assert list(done) == ["2"]
    assert set(done.left) == {"0", "1"}
    assert "forward has been replaced" in done.left["0"]
    assert type(model[0]) is torch.nn.LayerNorm
    assert repr(done) == "<Replacement: 1 LayerNorm; left: 2>"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_that_keeps_what_was_replaced_can_be_copied(copied: Callable[[Any], Any]) -> None:
    model = _model()
    model.done = replace_norms(model)
    other = copied(model)
    other.done.undo()
    assert type(other[2]) is torch.nn.GroupNorm
    assert type(model[2]) is normgrad.torch.GroupNorm
    assert dict(other.done.left) == {}


def test_anything_but_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not list"):
        replace_norms([])


def test_repr_says_that_it_was_undone() -> None:
    done = replace_norms(torch.nn.LayerNorm(4))
    assert repr(done) == "<Replacement: 1 LayerNorm>"
    done.undo()
    assert repr(done) == "<Replacement: 1 LayerNorm; undone>"
    assert repr(replace_norms(torch.nn.Linear(1, 1))) == "<Replacement: nothing>"


def test_repr_does_not_say_undone_of_modules_that_were_parametrized_since() -> None:
    norm = torch.nn.LayerNorm(4)
    done = replace_norms(norm)
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", torch.nn.Identity())  # makes a subclass
    assert isinstance(norm, normgrad.torch.LayerNorm)
    assert repr(done) == "<Replacement: 1 LayerNorm>"
    done.undo()  # leaves it alone
    assert repr(done) == "<Replacement: 1 LayerNorm>"
    torch.nn.utils.parametrize.remove_parametrizations(norm, "weight")
    done.undo()
    assert type(norm) is torch.nn.LayerNorm
    assert repr(done) == "<Replacement: 1 LayerNorm; undone>"
