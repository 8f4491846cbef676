"""What do all ways of registering share? Their result, our name and rank among backends, the methods that FLA calls
on a backend, and the witness that shows whether a registry is consulted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fla_kda_backend import log, switches
from fla_kda_backend.call import Call
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


def _class(base: type, members: dict[str, Any], name: str = BACKEND_NAME) -> type:
    """A backend class on FLA's `BaseBackend`, in force until `RegistryEntry.undo`."""

    def is_enabled(cls) -> bool:
        return cls.in_force and not switches.backend_is_off()

    common = {
        "backend_type": name,
        "package_name": None,
        "env_var": None,
        "priority": PRIORITY,
        "in_force": True,
        "is_available": classmethod(lambda cls: True),
        "is_enabled": classmethod(is_enabled),
    }
    return type("FlaKdaBackend", (base,), common | members)


def backend_class(base: type, server: Server) -> type:
    """Our backend for `chunk_kda`."""

    def chunk_kda_verifier(self, *args, **kwargs) -> tuple[bool, str | None]:
        return server.accepts(args, kwargs)

    def chunk_kda(self, *args, **kwargs) -> tuple:
        return server.run(args, kwargs)

    return _class(base, {"chunk_kda_verifier": chunk_kda_verifier, "chunk_kda": chunk_kda})


def decode_backend_class(base: type) -> type:
    """Our backend for `fused_recurrent_kda_fwd`: CPU tensors only."""

    def fused_recurrent_kda_fwd_verifier(self, *args, **kwargs) -> tuple[bool, str | None]:
        reason = declines_decode(args, kwargs)
        return reason is None, reason

    def fused_recurrent_kda_fwd(self, *args, **kwargs) -> tuple:
        return decode(args, kwargs)

    return _class(
        base,
        {
            "fused_recurrent_kda_fwd_verifier": fused_recurrent_kda_fwd_verifier,
            "fused_recurrent_kda_fwd": fused_recurrent_kda_fwd,
        },
    )


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

    described = {name: x for name, x in kwargs.items() if name in Call.__slots__}
    facts = log.facts_of(Call(**described)) if "q" in described and not args else None
    log.record("fused_recurrent_kda", Decision("reference"), facts)
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

    members = {f"{function_name}_verifier": verifier, function_name: answer}
    return _class(base, members, name=f"{BACKEND_NAME}_witness")


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
    """One of our backends in one of FLA's registries.

    Registering is public in FLA (`register` gets the class), taking out is not: it goes through the registry's own
    table where there is one of the known form, and the class is disabled from then on in any case.
    """

    def __init__(self, backend: type, register: Callable[[type], Any], registry: Any):
        self.backend, self.registry = backend, registry
        self.table = getattr(registry, "_backends", {})
        self.before = self.table.get(backend.backend_type)
        self.active_before = getattr(registry, "_active", None)
        register(backend)

    def is_in_force(self) -> bool:
        return self.backend.in_force

    def undo(self) -> None:
        self.backend.in_force = False
        name = self.backend.backend_type
        if not isinstance(self.table.get(name), self.backend):
            return
        if isinstance(getattr(self.registry, "_active", None), self.backend):
            self.registry._active = self.active_before
        if self.before is None:
            del self.table[name]
        else:
            self.table[name] = self.before
        # FLA notes in `_logged` which backends it has reported already, ours under its name.
        logged = getattr(self.registry, "_logged", set())
        logged -= {key for key in logged if name in key.split(":")}
