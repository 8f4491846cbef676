"""What do all ways of registering share? Their result, our name and rank among backends, the methods that FLA calls
on a backend, and the witness that shows whether a registry is consulted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fla_kda_backend import log, switches
from fla_kda_backend.dispatch import Decision
from fla_kda_backend.serve import Server

BACKEND_NAME = "fla_kda_backend"
# Lower wins. Behind Triton-Ascend (0), which is alone on its devices; ahead of FLA's FlashKDA (3) and TileLang (5).
PRIORITY = 1


@dataclass(frozen=True, slots=True)
class Registration:
    """One registration that is in force.

    Attributes:
        way: "fla.backends", "fla.ops.backends" or "attribute".
        decodes: whether decode (`fused_recurrent_kda`) on CPU tensors comes to us too.
        undo: restores what was there before.
        is_in_force: whether the FLA in `sys.modules` is still the one we registered with.
    """

    way: str
    decodes: bool
    undo: Callable[[], None]
    is_in_force: Callable[[], bool]


def backend_class(base: type, server: Server) -> type:
    """Our backend for `chunk_kda`, on FLA's `BaseBackend`."""

    class FlaKdaBackend(base):
        backend_type = BACKEND_NAME
        package_name = None
        env_var = None
        priority = PRIORITY

        @classmethod
        def is_available(cls) -> bool:
            return True

        @classmethod
        def is_enabled(cls) -> bool:
            return not switches.backend_is_off()

        def chunk_kda_verifier(self, *args, **kwargs) -> tuple[bool, str | None]:
            return server.accepts(args, kwargs)

        def chunk_kda(self, *args, **kwargs) -> tuple:
            return server.run(args, kwargs)

    return FlaKdaBackend


def decode_backend_class(base: type) -> type:
    """Our backend for `fused_recurrent_kda_fwd`, on FLA's `BaseBackend`: CPU tensors only."""

    class FlaKdaDecodeBackend(base):
        backend_type = BACKEND_NAME
        package_name = None
        env_var = None
        priority = PRIORITY

        @classmethod
        def is_available(cls) -> bool:
            return True

        @classmethod
        def is_enabled(cls) -> bool:
            return not switches.backend_is_off()

        def fused_recurrent_kda_fwd_verifier(self, *args, **kwargs) -> tuple[bool, str | None]:
            reason = declines_decode(args, kwargs)
            return reason is None, reason

        def fused_recurrent_kda_fwd(self, *args, **kwargs) -> tuple:
            return decode(args, kwargs)

    return FlaKdaDecodeBackend


def declines_decode(args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Why decode of this call is left to FLA; decode on a GPU always is."""
    q = args[0] if args else kwargs.get("q")
    if not getattr(q, "is_cpu", False):
        return "decode is only served for CPU tensors"
    from fla_kda_backend import reference

    return reference.declines_decode(*args, **kwargs)


def decode(args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Serve a decode call that was not declined."""
    from fla_kda_backend import reference

    log.record("fused_recurrent_kda", Decision("reference"), None)
    return reference.fused_recurrent_kda_fwd(*args, **kwargs)


class _Witness:
    """Stands for the tensors of a call that only a consulted backend can answer: there is nothing to compute with."""

    __slots__ = ()


class _Consulted(Exception):
    """Raised by the witness's backend, through FLA's dispatcher, to the one who called with the witness."""


WITNESS = _Witness()


def witness_class(base: type, function_name: str) -> type:
    """A backend that answers calls with the witness, by raising, and declines every other."""

    def verifier(self, *args, **kwargs) -> tuple[bool, str | None]:
        return (True, None) if kwargs.get("q") is WITNESS else (False, "not a witness")

    def answer(self, *args, **kwargs):
        raise _Consulted

    members = {
        "backend_type": f"{BACKEND_NAME}_witness",
        "package_name": None,
        "env_var": None,
        "priority": PRIORITY,
        "is_available": classmethod(lambda cls: True),
        "is_enabled": classmethod(lambda cls: True),
        f"{function_name}_verifier": verifier,
        function_name: answer,
    }
    return type("FlaKdaBackendWitness", (base,), members)


def is_consulted(function: Callable) -> bool:
    """Whether calling `function` asks the registry in which a witness backend has just been registered."""
    try:
        function(q=WITNESS, k=WITNESS, v=WITNESS, g=WITNESS, beta=WITNESS)
    except _Consulted:
        return True
    except Exception:  # the function's own code, which can do nothing with a witness
        return False
    return False


class RegistryEntry:
    """One backend in one of FLA's registries, and what it replaced. Registering is public in FLA, taking out is not."""

    def __init__(self, registry: Any, backend: Any):
        self.registry, self.backend = registry, backend
        self.before = registry._backends.get(backend.backend_type)
        self.active_before = getattr(registry, "_active", None)
        registry.register(backend)

    def is_in_force(self) -> bool:
        return self.registry._backends.get(self.backend.backend_type) is self.backend

    def undo(self) -> None:
        if not self.is_in_force():
            return
        if self.before is None:
            del self.registry._backends[self.backend.backend_type]
        else:
            self.registry._backends[self.backend.backend_type] = self.before
        if getattr(self.registry, "_active", None) is self.backend:
            self.registry._active = self.active_before
        # FLA notes in `_logged` which backends it has reported already, ours under its name.
        name = self.backend.backend_type
        self.registry._logged = {key for key in self.registry._logged if name not in key.split(":")}
