"""How do we serve a FLA that asks no registry (fla-core 0.4, and 0.5.1 and 0.5.2 with a torch where their dispatch is
dead)? By standing in for the function itself, under every name that leads to it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import torch

from fla_kda_backend import switches
from fla_kda_backend.call import Signature
from fla_kda_backend.registration.common import Registration
from fla_kda_backend.serve import Server, is_left_to_fla

WAY = "attribute"


def register() -> Registration:
    """Stand in for `chunk_kda`. Decode is left alone: these versions fail on CPU tensors before its inner function."""
    chunk_kda = import_module("fla.ops.kda.chunk").chunk_kda
    stand_in = StandIn(chunk_kda)

    def is_in_force() -> bool:
        module = sys.modules.get("fla.ops.kda.chunk")
        return getattr(module, "chunk_kda", None) is stand_in.function

    return Registration(WAY, decodes=False, undo=stand_in.undo, is_in_force=is_in_force)


class StandIn:
    """A function that takes the place of `chunk_kda` in every module that has bound it by some name.

    Calls go to the original after `undo` and while a switch is off, also through names that were bound to the stand-in
    where no one can find them (closures, instance attributes).
    """

    def __init__(self, original: Callable):
        self.original = original
        self.in_force = True
        server = Server(Signature.of(original))

        def chunk_kda(*args, **kwargs):
            passed_on = is_left_to_fla() or switches.backend_is_off() or switches.fla_dispatch_is_off()
            if passed_on or not self.in_force:
                return original(*args, **kwargs)
            return server.call_or(lambda reason: original(*args, **kwargs), args, kwargs)

        # `functools.wraps` would copy the marks that torch.compiler.disable has left on the original, by which
        # torch.compiler.disable would find the original's code under our function and skip ours.
        functools.update_wrapper(chunk_kda, original, updated=())
        self.function = torch.compiler.disable(chunk_kda)
        _rebind(original, self.function)

    def undo(self) -> None:
        self.in_force = False
        _rebind(self.function, self.original)


def _rebind(old: Callable, new: Callable) -> None:
    """Let every module-level name that is bound to `old` be bound to `new`."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        names = module.__dict__
        for name in [name for name, value in list(names.items()) if value is old]:
            names[name] = new
