"""Are we registered with FLA, and how? `enable`, `disable`, and what is in force now."""

from __future__ import annotations

import threading

from fla_kda_backend import autoload
from fla_kda_backend.registration.pick import Registration, register

__all__ = ["Registration", "current", "disable", "enable", "fla_was_loaded"]

_lock = threading.RLock()
_current: Registration | None = None


def enable() -> str | None:
    """Serve FLA's `chunk_kda` with this package: at once when FLA's KDA has been imported, else as soon as it is.

    This happens by itself when torch or this package is imported; `enable()` is for after `disable()`, or for a process
    started with `FLA_KDA_BACKEND=0`. That variable still keeps every call away while it is "0".

    Returns:
        How we are registered ("fla.backends", "fla.ops.backends" or "attribute"), or None when FLA has not been
        imported yet or `FLA_DISABLE_BACKEND_DISPATCH=1` forbids it.

    Raises:
        ImportError: FLA's KDA was imported but cannot be used.
    """
    autoload.add_hook()
    with _lock:
        if _current is None and autoload.fla_is_loaded():
            fla_was_loaded()  # the hook has failed: let the reason be seen
        return None if _current is None else _current.way


def disable() -> None:
    """Take us out of FLA: its registries and functions are as if this package had never been there.

    Names that were bound to our stand-in elsewhere (FLA without a live registry) run FLA's function from now on.
    """
    global _current
    with _lock:
        autoload.remove_hook()
        if _current is not None:
            registration, _current = _current, None
            registration.undo()


def current() -> Registration | None:
    """What is in force, None when nothing is."""
    return _current


def fla_was_loaded() -> None:
    """Register with the FLA that has just been imported (or imported anew)."""
    global _current
    with _lock:
        if _current is not None:
            if _current.is_in_force():
                return
            _current.undo()
            _current = None
        _current = register()
