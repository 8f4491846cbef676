"""What happens to one `chunk_kda` call, from its arguments to its result? Bind, decide, log, run.

The three ways of meeting FLA (`registration`) and the public `fla_kda_backend.chunk_kda` all go through a `Server`.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fla_kda_backend import log, ops, switches
from fla_kda_backend.call import Call, NotBindable, Signature
from fla_kda_backend.dispatch import CUDA_PATHS, SERVED_BY_US, Decision, decide, fla_refuses


class StrictModeError(RuntimeError):
    """`FLA_KDA_STRICT=1` is set and a call would have fallen back to FLA's Triton kernels."""


def _run_cuda(path: str) -> Callable[[Call], tuple]:
    def run(call: Call) -> tuple:
        return ops.chunk_kda_forward(call, path)

    return run


def _run_reference(call: Call) -> tuple:
    from fla_kda_backend import reference

    if torch.is_autocast_enabled("cpu"):  # FLA computes in the dtypes that it is given, autocast or not
        with torch.autocast("cpu", enabled=False):
            return reference.chunk_kda(call)
    return reference.chunk_kda(call)


# What each path that we serve runs.
RUNNERS: dict[str, Callable[[Call], tuple]] = {path: _run_cuda(path) for path in CUDA_PATHS}
RUNNERS["reference"] = _run_reference
assert RUNNERS.keys() == SERVED_BY_US


class _Thread(threading.local):
    left_to_fla = False


_thread = _Thread()


@contextlib.contextmanager
def left_to_fla() -> Iterator[None]:
    """Calls of FLA's function in this thread are not ours, and not logged: they have been decided on already."""
    _thread.left_to_fla = True
    try:
        yield
    finally:
        _thread.left_to_fla = False


def is_left_to_fla() -> bool:
    """Whether this thread is inside `left_to_fla`."""
    return _thread.left_to_fla


class Server:
    """Serves the calls of one `chunk_kda` function.

    A caller that cannot decide and run in one step, such as FLA's registries, asks `accepts` and then calls `run`,
    with the same arguments and in the same thread. A call that has to fail with an exception of ours is accepted, and
    raises in `run`: FLA swallows what is raised while a backend is asked.
    """

    def __init__(self, signature: Signature):
        self.signature = signature
        self._decided = threading.local()

    def decide(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Call | None, Decision, Exception | None]:
        """Bind the arguments, decide who serves them, and log it: (call, decision, the exception that it calls for)."""
        try:
            call = self.signature.bind(args, kwargs)
        except NotBindable as problem:
            call, decision, refused = None, Decision("triton", problem.reason), problem.refused
        else:
            decision, refused = decide(call), None  # FLA's checks are only looked at where they matter
        log.record("chunk_kda", decision, log.facts_of(call))
        if decision.path != "triton":
            return call, decision, None
        return call, decision, _failure(call, decision, refused)

    def accepts(self, args: tuple, kwargs: dict[str, Any]) -> tuple[bool, str | None]:
        """(whether `run` takes care of this call, why not)."""
        if is_left_to_fla():
            return False, "left to FLA by fla_kda_backend.chunk_kda"
        call, decision, error = self.decide(args, kwargs)
        if decision.path == "triton" and error is None:
            return False, decision.reason
        self._decided.pending = call, decision, error
        return True, None

    def run(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """Run the call that `accepts` has just accepted in this thread."""
        call, decision, error = self._decided.__dict__.pop("pending")
        if error is not None:
            raise error
        return self._run(call, decision, kwargs)

    def call_or(self, fallback: Callable[[str], tuple], args: tuple, kwargs: dict[str, Any]) -> tuple:
        """Decide and run in one step; `fallback(reason)` runs the calls that are not ours."""
        call, decision, error = self.decide(args, kwargs)
        if error is not None:
            raise error
        if decision.path == "triton":
            return fallback(decision.reason)
        return self._run(call, decision, kwargs)

    def _run(self, call: Call, decision: Decision, kwargs: dict[str, Any]) -> tuple:
        if self.signature.renamed_state_layout and "transpose_state_layout" in kwargs:
            warnings.warn(
                "`transpose_state_layout` is deprecated and renamed to `state_v_first`.",
                DeprecationWarning,
                stacklevel=5,  # whoever called the function that called `call_or`
            )
        return RUNNERS[decision.path](call)


def _failure(call: Call | None, decision: Decision, refused: bool | None) -> Exception | None:
    """The exception that a decision against us calls for: nobody can serve the call, or `FLA_KDA_STRICT=1` forbids
    Triton.

    A call that FLA refuses does not reach Triton: it gets FLA's own error, strict or not.
    """
    if decision.error is not None:
        return decision.error(decision.reason)
    if not switches.is_strict():
        return None
    if refused or (refused is None and fla_refuses(call)):
        return None
    return StrictModeError(f"FLA_KDA_STRICT=1: this chunk_kda call would run on Triton: {decision.reason}")
