"""Which backend computes a problem."""

from __future__ import annotations

from importlib import import_module

from normgrad.contract.plan import Backend, Problem
from normgrad.contract.status import NO_KERNEL, quote
from normgrad.cuda.devices import problem as cuda_problem
from normgrad.environment import variable

ENVIRONMENT = "NORMGRAD_BACKEND"

#: Backends by name, with the module that holds each (its ``backend``) and the device type it computes on.
BACKENDS = {
    "cpu": ("normgrad.cpu.backend", "cpu"),
    "reference": ("normgrad.reference", "cpu"),
    "cuda": ("normgrad.cuda.backend", "cuda"),
}
_DEFAULT = {"cpu": "cpu", "cuda": "cuda"}


def load(name: str) -> Backend:
    """The backend of that name; ImportError says what is missing."""
    module, _ = BACKENDS[name]
    backend: Backend = import_module(module).backend
    return backend


#: The name of the backend that the environment asks for.
requested_backend = variable(ENVIRONMENT)


def chosen(device_type: str) -> str | None:
    """The name of the backend for a device type: the environment's choice, or the fastest there is."""
    name = requested_backend()
    if not name:
        return _DEFAULT.get(device_type)
    if name not in BACKENDS:
        raise ValueError(f"{ENVIRONMENT} is {name!r}, and must be one of {', '.join(BACKENDS)}")
    return name if BACKENDS[name][1] == device_type else None


def backend_for(problem: Problem) -> Backend:
    """The backend that computes a problem; where there is none, status 561003."""
    device_type = problem.device.partition(":")[0]
    name = chosen(device_type)
    if name is None:
        choice = requested_backend()
        reason = f" with {ENVIRONMENT}={choice}" if choice else ""
        raise problem.signature.error(None, f"there is no backend for {problem.device}{reason}", NO_KERNEL)
    if name == "cuda":
        missing = cuda_problem(int(problem.device.partition(":")[2] or 0))
        if missing is not None:
            text = f"the backend cuda does not run on {problem.device}: {quote(missing)}"
            raise problem.signature.error(None, text, NO_KERNEL)
    try:
        return load(name)
    except ImportError as error:
        raise problem.signature.error(
            None, f"the backend {name} for {problem.device} cannot be loaded: {quote(error)}", NO_KERNEL
        ) from error
