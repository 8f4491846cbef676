"""How do we register with fla-core 0.6? In the registry of the function `chunk_kda`, and for decode in the registry
`kda`, both of `fla.backends`."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from fla_kda_backend.call import Signature
from fla_kda_backend.registration.common import (
    Registration,
    RegistryEntry,
    backend_class,
    decode_backend_class,
    is_consulted,
    witness_class,
)
from fla_kda_backend.serve import Server

MODULE = "fla.backends"
WAY = MODULE


def register() -> Registration | None:
    """Register, or return None where there is no such registry or `chunk_kda` does not ask it."""
    try:
        backends = import_module(MODULE)
        base, register_with = backends.BaseBackend, backends.register
    except (ImportError, AttributeError):
        return None
    chunk_kda = import_module("fla.ops.kda.chunk").chunk_kda
    decode = getattr(import_module("fla.ops.kda.fused_recurrent"), "fused_recurrent_kda_fwd", None)

    def enter(backend: type, entry_point: Any) -> RegistryEntry:
        return RegistryEntry(backend, register_with(entry_point), _registry(backends, entry_point))

    def is_asked(function: Any, entry_point: Any) -> bool:
        try:
            witness = enter(witness_class(base, function.__name__), entry_point)
        except (AttributeError, KeyError):  # there is no such function, or no registry for it
            return False
        try:
            return is_consulted(function)
        finally:
            witness.undo()

    if not is_asked(chunk_kda, chunk_kda):
        return None
    decodes = is_asked(decode, "kda")
    entries = [enter(backend_class(base, Server(Signature.of(chunk_kda))), chunk_kda)]
    if decodes:
        entries.append(enter(decode_backend_class(base), "kda"))

    def undo() -> None:
        for entry in entries:
            entry.undo()

    def is_in_force() -> bool:
        module = sys.modules.get("fla.ops.kda.chunk")
        return entries[0].is_in_force() and getattr(module, "chunk_kda", None) is chunk_kda

    return Registration(WAY, decodes=decodes, undo=undo, is_in_force=is_in_force)


def _registry(backends: ModuleType, entry_point: Any) -> Any:
    """The registry behind an entry point, which FLA keeps to itself; None where it is kept differently."""
    if isinstance(entry_point, str):
        return getattr(backends, "_operation_registries", {}).get(entry_point)
    return getattr(backends, "_function_registries", {}).get(inspect.unwrap(entry_point))
