"""What does the package offer by itself? `chunk_kda` without going through FLA, and `status`."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from functools import cache
from importlib import metadata
from typing import Any

import torch

from fla_kda_backend import compiled, registration, switches
from fla_kda_backend._version import __version__
from fla_kda_backend.call import DEFAULTS, REQUIRED, THROUGH_KWARGS, Signature
from fla_kda_backend.serve import Server, left_to_fla


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs,
) -> tuple:
    """Kimi Delta Attention over whole sequences, with the arguments of the newest `fla.ops.kda.chunk_kda`.

    Per value head, with a state S [K, V], for each token t (Kimi Linear, arXiv:2510.26692):

        S <- diag(exp(g_t)) S;  u = beta_t (v_t - S^T k_t);  S <- S + k_t u^T;  o_t = scale S^T q_t

    Under `torch.compile` a call without gradients is one operator, with no break in the graph; see `compiled`.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V]; HV is a multiple of H, and value head hv reads query head hv // (HV // H).
        g: [B, T, HV, K], log-decays (natural logarithm, at most 0), or the raw gate with `use_gate_in_kernel`.
        beta: [B, T, HV], step sizes, or logits with `use_beta_sigmoid_in_kernel`.
        scale: K ** -0.5 when None.
        initial_state: fp32 [N, HV, K, V], [N, HV, V, K] with `state_v_first`; N is B, or the number of sequences.
        output_final_state: whether to return the final state.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum(x ** 2) + 1e-6) first.
        use_gate_in_kernel: g becomes -exp(A_log) softplus(g + dt_bias), or with `lower_bound`
            lower_bound sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: beta becomes sigmoid(beta), twice that with `allow_neg_eigval`.
        allow_neg_eigval: see `use_beta_sigmoid_in_kernel`, which it needs.
        safe_gate: the caller's word that every log-decay lies in [-5, 0).
        lower_bound: see `use_gate_in_kernel`.
        disable_recompute: keep more for the backward pass; changes no result.
        return_intermediate_states: return h too, in inference mode only.
        state_v_first: layout of the states.
        cu_seqlens: int32 or int64 [N + 1], borders of the sequences packed into B = 1.
        cu_seqlens_cpu: the same on the CPU; changes no result.
        cp_context: FLA's context parallelism; served by FLA alone.
        use_graph, max_num_seqs: for graph capture with a padded `cu_seqlens` of max_num_seqs + 1 entries.
        **kwargs: `A_log` (HV values, None only with `lower_bound`), `dt_bias` (HV * K values or None), `chunk_size`
            (32 or 64, the spacing of h), `transpose_state_layout` (old name of `state_v_first`).

    Returns:
        (o, final_state), with `return_intermediate_states` (o, final_state, h): o [B, T, HV, V] in q's dtype, zero in
        rows of no sequence; final_state fp32 in the layout of `initial_state`, or None; h [B, NT, HV, K, V] in k's
        dtype.

    Raises:
        ValueError: CPU tensors that do not fit together.
        RuntimeError: neither this package nor an installed FLA can serve the call; the message says why.
        Exception: whatever the installed FLA raises for a call that is left to it.
    """
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "scale": scale,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "safe_gate": safe_gate,
        "lower_bound": lower_bound,
        "disable_recompute": disable_recompute,
        "return_intermediate_states": return_intermediate_states,
        "state_v_first": state_v_first,
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_cpu": cu_seqlens_cpu,
        "cp_context": cp_context,
        "use_graph": use_graph,
        "max_num_seqs": max_num_seqs,
        **kwargs,
    }
    if torch.compiler.is_compiling():
        return compiled.chunk_kda(arguments)
    return serve(arguments)


def serve(arguments: dict[str, Any]) -> tuple:
    """Decide and run `chunk_kda` for its arguments by name."""
    if switches.backend_is_off():
        return _call_fla(arguments, "FLA_KDA_BACKEND=0")
    return _server().call_or(lambda reason: _call_fla(arguments, reason), (), arguments)


@cache
def _server() -> Server:
    """The server of `chunk_kda` above, which honours what the newest FLA honours."""
    signature = Signature.of(chunk_kda)
    return Server(
        replace(
            signature,
            honoured=signature.honoured | THROUGH_KWARGS,
            renamed_state_layout=True,
            grouped_values=True,
            optional_A_log=True,
        )
    )


def _call_fla(arguments: dict[str, Any], reason: str) -> tuple:
    """Leave a call to the installed FLA, unless it would understand it differently."""
    try:
        from fla.ops.kda import chunk_kda as fla_chunk_kda
    except ImportError as problem:
        raise RuntimeError(f"chunk_kda cannot be served: {reason}; and there is no FLA to fall back to") from problem
    signature = Signature.of(fla_chunk_kda)
    honoured = signature.honoured.union(name for name, _ in signature.newer)
    # What is not asked for need not be passed: an older FLA has no parameter for it.
    asked = {name: x for name, x in arguments.items() if name in REQUIRED or x is not DEFAULTS.get(name, arguments)}
    if "transpose_state_layout" in arguments and "state_v_first" in honoured:  # there it warns or is refused, even False
        asked["transpose_state_layout"] = arguments["transpose_state_layout"]
    if "state_v_first" in asked and "state_v_first" not in honoured:
        asked.setdefault("transpose_state_layout", asked.pop("state_v_first"))
    ignored = sorted(asked.keys() - honoured)
    if ignored:
        raise RuntimeError(f"chunk_kda cannot be served: {reason}; and the installed FLA ignores {', '.join(ignored)}")
    with left_to_fla():
        return fla_chunk_kda(**asked)


def status() -> dict[str, Any]:
    """What is installed, registered and loaded in this process, for people and for bug reports.

    Returns:
        version: of this package. torch, cuda: of torch, and the CUDA version that it was built for or None.
        fla: the version of FLA, None without. registration: "fla.backends", "fla.ops.backends", "attribute", or None
        while nothing is registered (FLA's KDA has not been imported, or something forbids it). decodes: whether
        decode on CPU tensors comes here. library: path, archs, cuda and torch of the loaded kernels, or None.
        library_error: why there are none, or None. environment: the variables of this package and of FLA's dispatch
        that are set.
    """
    from fla_kda_backend import ops

    library, registered = ops.library(), registration.current()
    return {
        "version": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "fla": fla_version(),
        "registration": None if registered is None else registered.way,
        "decodes": registered is not None and registered.decodes,
        "library": None if library is None else {name: getattr(library, name) for name in LIBRARY_FACTS},
        "library_error": ops.load_error(),
        "environment": {name: switches.read(name) for name in switches.VARIABLES if switches.read(name)},
    }


LIBRARY_FACTS = ("path", "archs", "cuda", "torch")


def fla_version() -> str | None:
    """The version of the FLA that is imported, else of the one that is installed, None without."""
    imported = getattr(sys.modules.get("fla"), "__version__", None)
    if imported is not None:
        return imported
    for distribution in ("fla-core", "flash-linear-attention"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None
