"""By which way does the installed FLA let us in? Decided by what it does, not by its version number.

Each way is tried in turn: it registers, then calls FLA's function with a witness that only a consulted backend can
answer. A registry that exists but is never asked (fla-core 0.5.1 and 0.5.2 with torch before 2.11) is left, and the
next way is tried.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

from fla_kda_backend import switches
from fla_kda_backend.registration import attribute, fla_backends, ops_backends
from fla_kda_backend.registration.common import Registration

WAYS: tuple[Callable[[], Registration | None], ...] = (
    fla_backends.register,
    ops_backends.register,
    attribute.register,
)


def register() -> Registration | None:
    """Register by the first way that works; None when FLA's own switch forbids every backend.

    Raises:
        ImportError: FLA's KDA cannot be imported, or has no `chunk_kda`.
    """
    chunk = import_module("fla.ops.kda.chunk")
    if not hasattr(chunk, "chunk_kda"):
        raise ImportError("fla.ops.kda.chunk has no chunk_kda")
    if dispatch_is_off():
        return None
    for way in WAYS:
        registration = way()
        if registration is not None:
            return registration
    raise ImportError("fla.ops.kda.chunk.chunk_kda cannot be replaced")


def dispatch_is_off() -> bool:
    """`FLA_DISABLE_BACKEND_DISPATCH=1`, now or when FLA was imported, which is when FLA reads it."""
    if switches.fla_dispatch_is_off():
        return True
    modules = (sys.modules.get(name) for name in (fla_backends.MODULE, ops_backends.MODULE))
    return any(getattr(module, "_DISPATCH_DISABLED", False) for module in modules)
