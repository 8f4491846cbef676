"""What does each step of the examination look at or try? All of it runs in a child process (`process.py`).

The first half collects facts. The second half calls `chunk_kda` along one path, has the path witnessed by the log, and
compares the result with the recurrence in float64: `probe`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Relative L2 errors of o and of the final state that a probe may have.
# Arithmetic in float32 rounds to about 1e-6 over the tokens of a probe; a mistake is orders of magnitude above.
CPU_BOUND = 1e-5
# FLA's own bound for o and the final state in bf16. Our kernels are at about 2e-3: bf16 outputs alone cost 1.7e-3.
CUDA_BOUND = 5e-3
# Up to 5.3e-3 were measured for FLA's Triton kernels, which round more operands to bf16. Here the question is whether
# they run at all and compute KDA, not how well.
TRITON_BOUND = 1e-2

TOKENS, HEADS, HEAD_DIM = 203, 2, 128  # the tail of 203 tokens fills no chunk of any kernel
KDA_MODULE = "fla.ops.kda"
# FLA's ways of dispatching `chunk_kda`, and the modules without which they do not exist.
REGISTRIES = {"fla.backends": ("fla.backends",), "fla.ops.backends": ("fla.ops.backends", "fla.ops.kda.backends")}

_loaded_by_torch = False


def serve(answers: int, loaded_by_torch: bool) -> None:
    """Answer the requests on stdin, one JSON object a line, into the file descriptor `answers`, until stdin ends."""
    global _loaded_by_torch
    _loaded_by_torch = loaded_by_torch
    with os.fdopen(answers, "w") as stream:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                reply = {"facts": STEPS[request["step"]](**request["arguments"])}
                text = json.dumps(reply)
            except BaseException as error:  # whatever it is, the examination goes on
                text = json.dumps({"error": describe(error)})
            stream.write(text + "\n")
            stream.flush()


def describe(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


# --- Facts ------------------------------------------------------------------------------------------------------------


def torch_facts() -> dict[str, Any]:
    """Version and kind of torch, of Triton, and whether `import torch` has loaded this package."""
    import torch

    try:
        triton = importlib.import_module("triton").__version__
    except Exception as problem:
        triton = None if isinstance(problem, ModuleNotFoundError) else describe(problem)
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": triton,
        "loads_this_package": _loaded_by_torch,
    }


def gpu_facts() -> dict[str, Any]:
    """The GPUs that torch sees, why it sees none, and the CUDA version of the driver."""
    import torch

    if torch.version.hip is not None:  # what it calls "cuda" are AMD's
        return {"available": False, "error": None, "driver_cuda": None, "devices": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    error = "; ".join(" ".join(str(warning.message).split()) for warning in caught) or None
    if not available and torch.version.cuda is not None:
        try:
            torch.cuda.init()
        except Exception as problem:
            error = describe(problem)
    devices = []
    for index in range(torch.cuda.device_count() if available else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "index": index,
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return {"available": available, "error": error, "driver_cuda": _driver_cuda(), "devices": devices}


def _driver_cuda() -> str | None:
    """The newest CUDA version that the installed driver supports, None without a driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def library_facts() -> dict[str, Any]:
    """What the compiled library was built for, or why there is none; `built` tells whether a file is there."""
    from fla_kda_backend import ops

    files = sorted((Path(ops.__file__).parent / "_C").glob("*.so"))
    library = ops.library()
    facts = {"built": bool(files), "error": ops.load_error(), "archs": None, "cuda": None, "torch": None, "mib": None}
    if library is not None:
        facts |= {
            "archs": list(library.archs),
            "cuda": library.cuda,
            "torch": library.torch,
            "mib": round(Path(library.path).stat().st_size / 2**20, 2),
        }
    return facts


def fla_facts() -> dict[str, Any]:
    """Which FLA is installed, whether its KDA can be imported, and how we are registered with it.

    `registries` are FLA's dispatch modules that have a registry for KDA, `way` the one that `chunk_kda` was found to
    ask, "attribute" when it asks none and we stand in for it, or None when we are not registered, which `error`
    explains.
    """
    from fla_kda_backend import registration, switches
    from fla_kda_backend.interface import fla_version

    facts: dict[str, Any] = {"version": fla_version(), "installed": False, "has_kda": False, "error": None}
    facts |= {"registries": [], "way": None, "decodes": False, "disabled": False}
    try:
        facts["installed"] = importlib.util.find_spec("fla") is not None
    except (ImportError, ValueError) as problem:
        facts["error"] = describe(problem)
    if not facts["installed"]:
        return facts
    try:
        kda = importlib.import_module(KDA_MODULE)
    except ModuleNotFoundError as problem:
        facts["error"] = describe(problem)
        # The package itself is missing, not something that it needs.
        facts["has_kda"] = not KDA_MODULE.startswith(problem.name or "?")
        facts["version"] = fla_version()
        return facts
    except Exception as problem:
        return facts | {"error": describe(problem), "has_kda": True}
    facts |= {"version": fla_version(), "has_kda": True}
    folder = Path(kda.__file__).parents[2]
    facts["registries"] = [name for name, needed in REGISTRIES.items() if all(_is_in(folder, x) for x in needed)]
    facts["disabled"] = switches.fla_dispatch_is_off()
    registered = registration.current()
    if registered is None and not facts["disabled"] and not switches.backend_is_off():
        try:
            registration.enable()
        except Exception as problem:
            facts["error"] = describe(problem)
        registered = registration.current()
    if registered is not None:
        facts |= {"way": registered.way, "decodes": registered.decodes}
    return facts


def _is_in(folder: Path, module: str) -> bool:
    """Whether a module exists below this folder; FLA's namespace may reach into other installations, too."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).is_relative_to(folder)


# --- Probes -----------------------------------------------------------------------------------------------------------


def probe(path: str, device: str) -> dict[str, Any]:
    """Call `chunk_kda` on `device` along one path and compare the result with the recurrence in float64.

    Args:
        path: "reference", "portable" or "hopper": ours, through `fla_kda_backend.chunk_kda`, with every switch of the
            environment set aside; "fla": FLA's function as users' programs call it, the environment as it is, whichever
            of our paths serves it; "triton": FLA's function with this package taken out.
        device: as torch names it.

    Returns:
        path: what the log says, "triton" for FLA alone. arch: the built architecture that ran, or None. o_error,
        state_error: relative L2 errors, None where the result is not finite. bound: the largest that is accepted.
        seconds: of the call. problem: one sentence, None when all is well.
    """
    import torch

    arguments = inputs(torch.float32 if device == "cpu" else torch.bfloat16)
    on_device = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    began = time.perf_counter()
    with torch.no_grad():
        results, dispatch = _CALLS.get(path, _call_ours)(path, on_device)
        results = [x.cpu() for x in results]  # waits for the device
    seconds = time.perf_counter() - began
    served_by = "triton" if dispatch is None else dispatch.path
    bound = TRITON_BOUND if path == "triton" else CPU_BOUND if device == "cpu" else CUDA_BOUND
    facts = judge(results, arguments, bound)
    if path not in ("fla", served_by):
        facts["problem"] = f"the call ran on {served_by} instead: {dispatch.reason}"
    return facts | {
        "path": served_by,
        "arch": None if dispatch is None else dispatch.arch,
        "bound": bound,
        "seconds": round(seconds, 3),
    }


def inputs(dtype) -> dict[str, Any]:
    """A call that every FLA version takes and every path of ours serves: gate and beta given, a state in and out."""
    import torch

    random = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=random)

    q, k, v, gate = (randn(1, TOKENS, HEADS, HEAD_DIM) for _ in range(4))
    return dict(
        q=q.to(dtype),
        k=k.to(dtype),
        v=v.to(dtype),
        g=-5 * torch.sigmoid(gate),
        beta=torch.sigmoid(randn(1, TOKENS, HEADS)),
        initial_state=randn(1, HEADS, HEAD_DIM, HEAD_DIM),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def judge(results: list, arguments: dict[str, Any], bound: float) -> dict[str, Any]:
    """Errors of (o, final_state) from the float64 recurrence, and the problem if one of them is above `bound`."""
    from fla_kda_backend.reference import recurrent_kda

    errors, problem = {}, None
    for name, result, exact in zip(("o", "state"), results, recurrent_kda(**arguments), strict=True):
        error = float((result.double() - exact).norm() / exact.norm())
        errors[f"{name}_error"] = error if math.isfinite(error) else None
        if problem is None and not error <= bound:
            problem = f"{name} is wrong: its relative error is {error:.1e}, the bound {bound:.0e}"
    return errors | {"problem": problem}


def _call_ours(path: str, arguments: dict[str, Any]) -> tuple:
    import fla_kda_backend

    forced = "" if path == "reference" else path
    with environment(FLA_KDA_BACKEND="1", FLA_KDA_STRICT="1", FLA_KDA_FORCE=forced, FLA_KDA_LOG="0"):
        results = fla_kda_backend.chunk_kda(**arguments)
    return results, fla_kda_backend.last_dispatch()


def _call_fla(path: str, arguments: dict[str, Any]) -> tuple:
    import fla_kda_backend

    chunk_kda = importlib.import_module(KDA_MODULE).chunk_kda
    before = sum(fla_kda_backend.dispatch_counts().values())
    with environment(FLA_KDA_STRICT="1", FLA_KDA_LOG="0"):  # with the reason, and without waiting for Triton
        results = chunk_kda(**arguments)
    if sum(fla_kda_backend.dispatch_counts().values()) == before:
        raise RuntimeError("FLA served the call alone, without asking this package")
    return results, fla_kda_backend.last_dispatch()


def _call_triton(path: str, arguments: dict[str, Any]) -> tuple:
    import fla_kda_backend

    chunk_kda = importlib.import_module(KDA_MODULE).chunk_kda
    before = fla_kda_backend.dispatch_counts()
    fla_kda_backend.disable()
    try:
        results = chunk_kda(**arguments)
    finally:
        fla_kda_backend.enable()
    if fla_kda_backend.dispatch_counts() != before:
        raise RuntimeError("this package was asked although it had been taken out")
    return results, None


_CALLS = {"fla": _call_fla, "triton": _call_triton}


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """These environment variables set for a while; the switches are read at every call."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


STEPS = {"torch": torch_facts, "gpu": gpu_facts, "library": library_facts, "fla": fla_facts, "probe": probe}
