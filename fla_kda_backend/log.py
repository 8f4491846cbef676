"""Which path did a call take, and why? The log on stderr (`FLA_KDA_LOG`), the counters, and the last dispatch.

`FLA_KDA_LOG=1` prints one line per distinct decision, `all` one per call, `json` one JSON object per call. Nothing
needs to be set up: lines go to stderr. The same facts are there for programs in `last_dispatch()` and
`dispatch_counts()`. No tensor is kept alive by any of this.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from fla_kda_backend import switches
from fla_kda_backend.dispatch import PATH_LABELS, Decision

# Lines printed by FLA_KDA_LOG=1 before it falls silent: reasons name sizes, so that a program may have no end of them.
MAX_DISTINCT_LINES = 1000

_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One call and where it went.

    Attributes:
        operator: "chunk_kda" or "fused_recurrent_kda".
        path: "portable", "reference" or "triton", a key of `dispatch.PATH_LABELS`.
        reason: why it was not ours, one sentence; empty for a call that we served.
        arch: the built architecture that served it, such as "90a"; None off the GPU.
        B, T, H, HV, K, V: the sizes of q [B, T, H, K] and v [B, T, HV, V]; None when they could not be read.
        dtype: that of q, "bf16", "fp32", ...
        gate: "given", "softplus" or "bounded" (the formula used for the gate).
        beta: "given", "sigmoid" or "2sigmoid".
        state: "none", "k_first" or "v_first".
        varlen: number of sequences in `cu_seqlens`, None without.
    """

    operator: str
    path: str
    reason: str
    arch: str | None
    B: int | None = None
    T: int | None = None
    H: int | None = None
    HV: int | None = None
    K: int | None = None
    V: int | None = None
    dtype: str | None = None
    gate: str | None = None
    beta: str | None = None
    state: str | None = None
    varlen: int | None = None

    def __str__(self) -> str:
        label = PATH_LABELS[self.path] + (f" (sm_{self.arch})" if self.arch else "")
        shape = self._shape()
        if self.reason:
            shape = f": {self.reason} | {shape}" if shape else f": {self.reason}"
        elif shape:
            shape = f" {shape}"
        return f"[fla_kda_backend] {self.operator} -> {label}{shape}"

    def _shape(self) -> str:
        if self.B is None:
            return ""
        sizes = f"B={self.B} T={self.T} H={self.H} HV={self.HV} K={self.K} V={self.V} {self.dtype}"
        varlen = "" if self.varlen is None else f" varlen={self.varlen}"
        return f"{sizes} gate={self.gate} beta={self.beta} state={self.state}{varlen}"

    def _kind(self) -> tuple:
        """Equal for calls whose lines would differ only in B, T and the number of sequences."""
        return (
            self.operator, self.path, self.reason, self.arch, self.H, self.HV, self.K, self.V, self.dtype, self.gate,
            self.beta, self.state, self.varlen is None,
        )  # fmt: skip


_lock = threading.Lock()
_counts: Counter[tuple[str, str]] = Counter()
_last: dict[str, tuple[Decision, tuple | None]] = {}
_printed: set[tuple] = set()


def record(operator: str, decision: Decision, facts: tuple | None) -> None:
    """Count a decision and, when asked to, print it. `facts` comes from `facts_of`; None for an unreadable call."""
    with _lock:
        _counts[operator, decision.path] += 1
        _last[operator] = decision, facts
    mode = switches.read("FLA_KDA_LOG")
    if mode and mode != "0":
        _print(_describe(operator, decision, facts), mode)


def last_dispatch(operator: str = "chunk_kda") -> Dispatch | None:
    """The latest call of an operator in this process, from any thread, and the path it took; None before the first.

    Args:
        operator: "chunk_kda", or "fused_recurrent_kda" (decode; only calls that were served here are recorded).
    """
    with _lock:
        latest = _last.get(operator)
    return None if latest is None else _describe(operator, *latest)


def dispatch_counts(operator: str = "chunk_kda") -> dict[str, int]:
    """How many calls of an operator took each path in this process, with a key for every path.

    Args:
        operator: "chunk_kda", or "fused_recurrent_kda" (decode; only calls that were served here are recorded).
    """
    with _lock:
        return {path: _counts[operator, path] for path in PATH_LABELS}


def reset() -> None:
    """Forget every count, the last dispatch, and which lines were printed."""
    with _lock:
        _counts.clear()
        _last.clear()
        _printed.clear()


def facts_of(call: Any) -> tuple | None:
    """What the log needs of a call, in a few cheap reads: the rest is worked out when somebody looks."""
    try:
        cu_seqlens = call.cu_seqlens
        return (
            call.q.shape,
            call.v.shape,
            call.q.dtype,
            call.use_gate_in_kernel,
            call.lower_bound is not None,
            call.use_beta_sigmoid_in_kernel,
            call.allow_neg_eigval,
            call.initial_state is not None or call.output_final_state,
            call.state_v_first,
            None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        )
    except (AttributeError, IndexError):  # not tensors: such a call is declined, and logged without sizes
        return None


def _describe(operator: str, decision: Decision, facts: tuple | None) -> Dispatch:
    if facts is None or len(facts[0]) != 4 or len(facts[1]) != 4:
        return Dispatch(operator, decision.path, decision.reason, decision.arch)
    q_shape, v_shape, dtype, gate_in_kernel, bounded, beta_in_kernel, doubled, has_state, v_first, varlen = facts
    B, T, H, K = q_shape
    HV, V = v_shape[2:]
    name = str(dtype).removeprefix("torch.")
    return Dispatch(
        operator,
        decision.path,
        decision.reason,
        decision.arch,
        *(B, T, H, HV, K, V),
        dtype=_SHORT_DTYPES.get(name, name),
        gate=("bounded" if bounded else "softplus") if gate_in_kernel else "given",
        beta=("2sigmoid" if doubled else "sigmoid") if beta_in_kernel else "given",
        state=("v_first" if v_first else "k_first") if has_state else "none",
        varlen=varlen,
    )


def _print(dispatch: Dispatch, mode: str) -> None:
    if mode == "json":
        line = json.dumps({**asdict(dispatch), "label": PATH_LABELS[dispatch.path]})
    else:
        line = str(dispatch)
    kind = dispatch._kind()
    with _lock:
        if mode not in ("all", "json"):
            if kind in _printed or len(_printed) > MAX_DISTINCT_LINES:
                return
            _printed.add(kind)
            if len(_printed) > MAX_DISTINCT_LINES:
                line = "[fla_kda_backend] too many distinct decisions, no more are shown (FLA_KDA_LOG=all shows all)"
        write(line)


def write(line: str) -> None:
    """Write one line to stderr. A closed or missing stderr is no reason to fail a call."""
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        pass
