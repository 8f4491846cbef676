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
        base = backends.BaseBackend
    except (ImportError, AttributeError):
        return None
    chunk_kda = import_module("fla.ops.kda.chunk").chunk_kda
    registry = _registry_of(backends, chunk_kda)
    if registry is None or not _asks(base, registry, chunk_kda):
        return None
    backend = backend_class(base, Server(Signature.of(chunk_kda)))()

    decode = getattr(import_module("fla.ops.kda.fused_recurrent"), "fused_recurrent_kda_fwd", None)
    inner_registry = getattr(backends, "_operation_registries", {}).get("kda")
    decodes = decode is not None and inner_registry is not None and _asks(base, inner_registry, decode)

    entries = [RegistryEntry(registry, backend)]
    if decodes:
        entries.append(RegistryEntry(inner_registry, decode_backend_class(base)()))

    def undo() -> None:
        for entry in entries:
            entry.undo()

    def is_in_force() -> bool:
        module = sys.modules.get("fla.ops.kda.chunk")
        return entries[0].is_in_force() and getattr(module, "chunk_kda", None) is chunk_kda

    return Registration(WAY, decodes=decodes, undo=undo, is_in_force=is_in_force)


def _registry_of(backends: ModuleType, function: Any) -> Any:
    return getattr(backends, "_function_registries", {}).get(inspect.unwrap(function))


def _asks(base: type, registry: Any, function: Any) -> bool:
    witness = RegistryEntry(registry, witness_class(base, function.__name__)())
    try:
        return is_consulted(function)
    finally:
        witness.undo()
