"""How is one call run on each side? On our kernels, with the path witnessed, on FLA's Triton, and exactly."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fla_kda_backend
from fla_kda_backend import ops
from fla_kda_backend.call import Call
from fla_kda_backend.reference import chunk_kda as chunked_reference
from fla_kda_backend.reference import recurrent_kda


def kernel_paths() -> tuple[str, ...]:
    """The dispatcher's names for the kernels that run on this GPU, the one that it should choose first."""
    has_hopper = torch.cuda.get_device_capability() == (9, 0) and "90a" in ops.library().archs
    return ("hopper", "portable") if has_hopper else ("portable",)


def expected_path() -> str:
    """The path that must serve an accepted call: the forced one, else the first."""
    return os.environ.get("FLA_KDA_FORCE") or kernel_paths()[0]


# Of the multiprocessors, the share that heads must fill to take so many turns on the Hopper kernel. Five sixths are not
# a multiple of their turns.
SHARES_IN_TURNS = {3: (3, 4), 5: (5, 6)}


def heads_in_turns(turns: int) -> int:
    """So many heads that there are multiprocessors to spare for 1 / `turns` of them at a time."""
    numerator, denominator = SHARES_IN_TURNS[turns]
    return torch.cuda.get_device_properties("cuda").multi_processor_count * numerator // denominator


def run_on_kernels(arguments: dict, path: str | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, final_state) of our CUDA kernels, in inference. Fails unless the dispatcher says that `path` served it (the
    expected one when None).

    A call that would fall back raises with the reason, instead of having Triton tune for a minute or two. Outputs hold
    NaN before the kernel writes to them.
    """
    path = path or expected_path()
    served = fla_kda_backend.dispatch_counts()[path]
    with (
        torch.no_grad(),
        environment("FLA_KDA_STRICT", "1"),
        uninitialised_memory_is_nan(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # callers that use the old name of state_v_first
        result = fla_kda_backend.chunk_kda(**arguments)
    decision = fla_kda_backend.last_dispatch()
    assert decision.path == path, f"the call ran on {decision.path} ({decision.reason}) instead of {path}"
    assert fla_kda_backend.dispatch_counts()[path] == served + 1
    return result


def copies_of_inputs(arguments: dict) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}


def written_to(arguments: dict, copies: dict[str, torch.Tensor]) -> list[str]:
    """The inputs that no longer hold the bits of their copies."""
    return [name for name, copy in copies.items() if not same_bits(copy, arguments[name])]


def run_exactly(judge: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, final_state) of the recurrence in float64, from which every error is measured."""
    with torch.no_grad():
        return recurrent_kda(**judge)


def run_exactly_in_chunks(judge: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `run_exactly` returns, to float64's own rounding, for sequences too long to go through token by token.

    This is the chunked reference in float64, which on the CPU is tested against the recurrence for every kind of gate;
    64 tokens take about as long as one does in the recurrence.
    """
    q, k, v = (judge[name].double() for name in ("q", "k", "v"))
    scale = judge.get("scale")
    described = judge | {"q": q, "k": k, "v": v, "scale": q.shape[-1] ** -0.5 if scale is None else scale}
    with torch.no_grad():
        return chunked_reference(Call(**described), state_dtype=torch.float64)


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """Memory that PyTorch allocates without writing to it (`torch.empty` and the like) holds NaN.

    PyTorch has this for tests, as a part of its deterministic mode.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory, "somebody has switched the filling off"
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """An environment variable set for a while, for switches that are read at every call."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class OperatorCalls(TorchDispatchMode):
    """Inside, the calls of our compiled operator are kept in `calls`, with their arguments by name."""

    def __init__(self):
        super().__init__()
        self.calls: list[dict] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name() == "fla_kda_backend::chunk_kda_fwd":
            names = [argument.name for argument in function._schema.arguments]
            self.calls.append(dict(zip(names, args)) | (kwargs or {}))
        return function(*args, **(kwargs or {}))


@contextmanager
def dispatch_off() -> Iterator[None]:
    """Calls inside reach FLA's own code, whatever they are."""
    fla_kda_backend.disable()
    try:
        yield
    finally:
        fla_kda_backend.enable()


def run_on_fla(arguments: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, final_state) of FLA's Triton kernels, with our backend off. Fails if the backend saw the call anyway."""
    import fla.ops.kda

    counts = dict(fla_kda_backend.dispatch_counts())
    with dispatch_off(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        result = fla.ops.kda.chunk_kda(**arguments)
    assert fla_kda_backend.dispatch_counts() == counts, "the reference call was dispatched, too"
    return result


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Whether two results are equal bit for bit, NaN included; None equals only None."""
    if left is None or right is None:
        return left is right
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return left.dtype == right.dtype and torch.equal(left.contiguous().view(integer), right.contiguous().view(integer))
