"""Which environment variables steer the package, and what do they say? Read at every call: they work at any time."""

import os
from functools import cache

VARIABLES = (
    "FLA_KDA_BACKEND",
    "FLA_KDA_LOG",
    "FLA_KDA_STRICT",
    "FLA_KDA_FORCE",
    "FLA_DISABLE_BACKEND_DISPATCH",
    "FLA_KDA_CUDA_ARCHS",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
)


def read(name: str) -> str:
    """The value of an environment variable, "" when it is not set.

    `os.environ.get` raises and catches a KeyError for a name that is not set, a microsecond for each variable of each
    call; the mapping behind it is asked directly where there is one.
    """
    try:
        value = os.environ._data.get(_key(name))
    except AttributeError:
        return os.environ.get(name, "")
    return "" if value is None else os.environ.decodevalue(value)


@cache
def _key(name: str) -> bytes | str:
    """A variable's name in the form in which `os.environ` keeps it: encoded, or in capitals on Windows."""
    return os.environ.encodekey(name)


def backend_is_off() -> bool:
    """`FLA_KDA_BACKEND=0`: the kill switch."""
    return read("FLA_KDA_BACKEND") == "0"


def fla_dispatch_is_off() -> bool:
    """`FLA_DISABLE_BACKEND_DISPATCH=1`: FLA's own switch, which bypasses every backend."""
    return read("FLA_DISABLE_BACKEND_DISPATCH") == "1"


def is_strict() -> bool:
    """`FLA_KDA_STRICT=1`: a call that would fall back to Triton raises."""
    return read("FLA_KDA_STRICT") not in ("", "0")


def forced_path() -> str:
    """`FLA_KDA_FORCE=portable|hopper|triton`: the path of GPU calls, for experiments and bug reports; "" for none."""
    return read("FLA_KDA_FORCE")
