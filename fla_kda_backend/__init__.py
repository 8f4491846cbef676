"""CUDA kernels for Kimi Delta Attention (KDA) that plug into flash-linear-attention.

Installed beside `flash-linear-attention` the package serves FLA's `chunk_kda` by itself. This module is its small
public surface; everything heavy is imported when it is first used.

    chunk_kda          the operator itself, with the signature of the newest FLA
    status             versions, way of registration, kernels, environment
    last_dispatch      the latest call and the path it took
    dispatch_counts    how many calls took each path
    enable, disable    register with FLA, and restore what was there before
"""

from fla_kda_backend import autoload

__all__ = ["__version__", "chunk_kda", "disable", "dispatch_counts", "enable", "last_dispatch", "status"]

_HOMES = {
    "__version__": "fla_kda_backend._version",
    "chunk_kda": "fla_kda_backend.interface",
    "disable": "fla_kda_backend.registration",
    "dispatch_counts": "fla_kda_backend.log",
    "enable": "fla_kda_backend.registration",
    "last_dispatch": "fla_kda_backend.log",
    "status": "fla_kda_backend.interface",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(_HOMES[name]), name)  # asked for once
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


autoload.install()
