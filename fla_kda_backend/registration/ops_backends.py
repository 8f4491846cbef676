"""How do we register with fla-core 0.5? In the registry `kda` of `fla.ops.backends`, where FLA asks it."""

from __future__ import annotations

import sys
from importlib import import_module

from fla_kda_backend.call import Signature
from fla_kda_backend.registration.common import (
    Registration,
    RegistryEntry,
    backend_class,
    is_consulted,
    witness_class,
)
from fla_kda_backend.serve import Server

MODULE = "fla.ops.backends"
WAY = MODULE


def register() -> Registration | None:
    """Register, or return None where there is no such registry or `chunk_kda` does not ask it."""
    try:
        base = import_module(MODULE).BaseBackend
        registry = import_module("fla.ops.kda.backends").kda_registry
    except (ImportError, AttributeError):
        return None
    chunk_kda = import_module("fla.ops.kda.chunk").chunk_kda

    def register_class(backend: type) -> None:
        registry.register(backend())

    witness = RegistryEntry(witness_class(base, "chunk_kda"), register_class, registry)
    try:
        if not is_consulted(chunk_kda):
            return None
    finally:
        witness.undo()
    entry = RegistryEntry(backend_class(base, Server(Signature.of(chunk_kda))), register_class, registry)

    def is_in_force() -> bool:
        module = sys.modules.get("fla.ops.kda.chunk")
        return entry.is_in_force() and getattr(module, "chunk_kda", None) is chunk_kda

    return Registration(WAY, decodes=False, undo=entry.undo, is_in_force=is_in_force)
