"""``replace_norms``: normgrad's modules in place of ``torch.nn``'s, in an existing model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch.nn import Module

from normgrad.torch.modules import Compiled, GroupNorm, LayerNorm, check_options
from normgrad.torch.sync_batch_norm import SyncBatchNorm

#: Each class of torch.nn's with the class of ours that takes its place. Ours have the same attributes.
_NORMS: dict[type[Module], type[Module]] = {torch.nn.LayerNorm: LayerNorm, torch.nn.GroupNorm: GroupNorm}
_SYNC_BATCH_NORM: dict[type[Module], type[Module]] = {torch.nn.SyncBatchNorm: SyncBatchNorm}


class Replacement(Mapping[str, Module]):
    """What :func:`replace_norms` did: the replaced modules by their names in the model."""

    def __init__(self, replaced: dict[str, Module], left: dict[str, str]) -> None:
        self._replaced = replaced
        self._left = left
        self._classes = {name: (type(module), _original(module)) for name, module in replaced.items()}

    @property
    def left(self) -> Mapping[str, str]:
        """The LayerNorms and GroupNorms of ``torch.nn`` that were left as they are, by name, each with the reason."""
        return MappingProxyType(self._left)  # made anew: it cannot be pickled with a model that keeps the replacement

    def undo(self) -> None:
        """Put ``torch.nn``'s modules back; one whose class or ``forward`` has been replaced since is left alone."""
        for name, (ours, theirs) in self._classes.items():
            module = self._replaced[name]
            if type(module) is ours and not _has_own_forward(module):
                for option in ("compiled", "autocast_dtype"):
                    module.__dict__.pop(option, None)
                module.__class__ = theirs

    def __getitem__(self, name: str) -> Module:
        return self._replaced[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._replaced)

    def __len__(self) -> int:
        return len(self._replaced)

    def __repr__(self) -> str:
        counts: dict[str, int] = {}
        for ours, _ in self._classes.values():
            counts[ours.__name__] = counts.get(ours.__name__, 0) + 1
        replaced = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"
        left = f"; left: {len(self.left)}" if self.left else ""
        is_on = any(isinstance(self._replaced[name], ours) for name, (ours, _) in self._classes.items())
        return f"<Replacement: {replaced}{left}{'' if is_on or not self._classes else '; undone'}>"


def replace_norms(
    model: Module,
    *,
    sync_batch_norm: bool = False,
    compiled: Compiled = "auto",
    autocast_dtype: torch.dtype = torch.float32,
) -> Replacement:
    """Put normgrad's modules in place of ``torch.nn.LayerNorm`` and ``GroupNorm``.

    The modules of the model stay the same objects and change their class: parameters, buffers, hooks, dtype, device,
    training mode, state dict and every reference to them (an optimizer's, a wrapper's) stay as they are.

    Parameters
    ----------
    model : Module
        The model; it is changed in place. It may be a norm itself.
    sync_batch_norm : bool
        Whether to replace ``torch.nn.SyncBatchNorm`` too. To make synchronised norms of ``BatchNorm1d`` to ``3d``, see
        :func:`convert_sync_batchnorm`.
    compiled : {"auto", "normgrad"}
        What the new modules become under ``torch.compile``: see :class:`LayerNorm`. Modules that were normgrad's
        before keep what they have.
    autocast_dtype : torch.dtype
        The dtype of the new modules' output under autocast on CUDA: see :class:`LayerNorm`.

    Returns
    -------
    Replacement
        A mapping from names to the replaced modules, with ``undo()``. Subclasses of ``torch.nn``'s norms, which may
        do more than these, modules whose ``forward`` something else has replaced, and scripted modules are left as
        they are and listed in ``left``.

    Examples
    --------
    >>> import torch, normgrad.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
    >>> done = normgrad.torch.replace_norms(model)
    >>> done
    <Replacement: 1 LayerNorm>
    >>> list(done), type(model[1]) is normgrad.torch.LayerNorm
    (['1'], True)
    >>> done.undo()
    >>> type(model[1]) is torch.nn.LayerNorm
    True
    """
    if not isinstance(model, Module):
        raise TypeError(f"replace_norms takes a torch.nn.Module, not {type(model).__name__}")
    check_options(compiled, autocast_dtype)
    known = _NORMS | (_SYNC_BATCH_NORM if sync_batch_norm else {})
    replaced: dict[str, Module] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        reason = _reason(module, known)
        if reason is not None:
            left[name] = reason
        elif type(module) in known:
            replaced[name] = module
    for module in replaced.values():
        module.__class__ = known[type(module)]
        if isinstance(module, LayerNorm | GroupNorm):
            module.compiled, module.autocast_dtype = compiled, autocast_dtype
    return Replacement(replaced, left)


def _original(module: Module) -> type[Module]:
    """Return the class of torch.nn's that a module of ours took the place of."""
    return next(theirs for theirs, ours in (_NORMS | _SYNC_BATCH_NORM).items() if type(module) is ours)


def _reason(module: Module, known: dict[type[Module], type[Module]]) -> str | None:
    """Return why a norm is left as it is; None for a module that is no norm, or one of ours."""
    if isinstance(module, tuple(known.values())):
        return None
    if isinstance(module, torch.jit.ScriptModule):
        name = module.original_name
        return f"a scripted {name}" if name in {theirs.__name__ for theirs in known} else None
    if type(module) not in known:
        if not isinstance(module, tuple(known)):
            return None
        cls = type(module)
        return f"{cls.__module__}.{cls.__qualname__} is a subclass, which may do more than torch.nn's"
    if _has_own_forward(module):
        return "its forward has been replaced, and another class would not change it"
    return None


def _has_own_forward(module: Module) -> bool:
    """Return whether ``forward`` is an attribute: libraries that offload or dispatch modules wrap the class's so."""
    return "forward" in vars(module)
