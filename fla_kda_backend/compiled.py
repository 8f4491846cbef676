"""How does `torch.compile` see `chunk_kda`? As one operator: it knows the shapes of the results, and looks no further.

The operator decides, logs and runs when the compiled code runs, exactly as a call outside `torch.compile`: switches,
counters and devices count at that moment. A call that it cannot stand for (one that needs gradients, one with an
object among its arguments) breaks the graph and runs as ever; `fullgraph=True` refuses it.
"""

from __future__ import annotations

from typing import Any

import torch

# The arguments of the operator and their types in PyTorch's schemas: those of `chunk_kda` without cp_context, and
# the keywords that it takes through **kwargs.
PARAMETERS = {
    "q": "Tensor",
    "k": "Tensor",
    "v": "Tensor",
    "g": "Tensor",
    "beta": "Tensor",
    "scale": "float?",
    "initial_state": "Tensor?",
    "output_final_state": "bool",
    "use_qk_l2norm_in_kernel": "bool",
    "use_gate_in_kernel": "bool",
    "use_beta_sigmoid_in_kernel": "bool",
    "allow_neg_eigval": "bool",
    "safe_gate": "bool",
    "lower_bound": "float?",
    "disable_recompute": "bool",
    "return_intermediate_states": "bool",
    "state_v_first": "bool",
    "cu_seqlens": "Tensor?",
    "cu_seqlens_cpu": "Tensor?",
    "use_graph": "bool",
    "max_num_seqs": "SymInt?",
    "A_log": "Tensor?",
    "dt_bias": "Tensor?",
    "chunk_size": "SymInt?",
    "transpose_state_layout": "bool?",
}
# Left out where the caller left them out: giving them has a meaning of its own.
_ABSENT_WHEN_NONE = ("chunk_size", "transpose_state_layout")
_PYTHON_TYPES = {
    "Tensor": (torch.Tensor,),
    "bool": (bool,),
    "float": (float, int, torch.SymFloat, torch.SymInt),
    "SymInt": (int, torch.SymInt),
}
_DEFAULTS = {"Tensor": "", "bool": "=False"}
_SCHEMA = ", ".join(f"{kind} {name}{_DEFAULTS.get(kind, '=None')}" for name, kind in PARAMETERS.items())


def chunk_kda(arguments: dict[str, Any]) -> tuple:
    """What `fla_kda_backend.chunk_kda` returns for its arguments by name, in code that is being compiled."""
    if why_not_an_operator(arguments) is not None:
        from fla_kda_backend.graph_break import serve_outside_the_graph

        return serve_outside_the_graph(arguments)
    given = {name: x for name, x in arguments.items() if name != "cp_context"}
    results = torch.ops.fla_kda_backend.chunk_kda(**given)
    if arguments["output_final_state"]:
        return tuple(results)
    return (results[0], None, *results[1:])


def why_not_an_operator(arguments: dict[str, Any]) -> str | None:
    """Why a call cannot be an operator of a graph, or None. Asks for nothing that depends on the values of tensors."""
    if arguments["cp_context"] is not None:
        return "cp_context is given"
    for name, x in arguments.items():
        if name == "cp_context":
            continue
        if name not in PARAMETERS:
            return f"the keyword {name} is unknown"
        kind = PARAMETERS[name]
        if x is None and kind.endswith("?") and name not in _ABSENT_WHEN_NONE:
            continue
        if not isinstance(x, _PYTHON_TYPES[kind.removesuffix("?")]):
            return f"{name} is a {type(x).__name__}"
        if kind.startswith("Tensor") and torch.is_grad_enabled() and x.requires_grad:
            return "gradients are needed"
    if arguments["q"].dim() != 4 or arguments["v"].dim() != 4:
        return "q or v does not have four dimensions"
    if arguments["return_intermediate_states"] and arguments["cu_seqlens"] is not None:
        return "how many intermediate states there are depends on the values of cu_seqlens"
    return None


def _by_name(values: tuple) -> dict[str, Any]:
    """The operator's arguments; PyTorch leaves trailing ones out where they have their default."""
    defaults = {name: False if kind == "bool" else None for name, kind in PARAMETERS.items()}
    return defaults | dict(zip(PARAMETERS, values))


@torch.library.custom_op("fla_kda_backend::chunk_kda", mutates_args=(), schema=f"({_SCHEMA}) -> Tensor[]")
def _operator(*values) -> list[torch.Tensor]:
    from fla_kda_backend.interface import serve

    arguments = _by_name(values)
    for name in _ABSENT_WHEN_NONE:
        if arguments[name] is None:
            del arguments[name]
    return [result for result in serve(arguments) if result is not None]


@_operator.register_fake
def _shapes_of_results(*values) -> list[torch.Tensor]:
    given = _by_name(values)
    q, k, v, cu_seqlens = given["q"], given["k"], given["v"], given["cu_seqlens"]
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (V, K) if given["state_v_first"] or given["transpose_state_layout"] else (K, V)
    results = [q.new_empty((B, T, HV, V))]
    if given["output_final_state"]:
        results.append(q.new_empty((N, HV, *state), dtype=torch.float32))
    if given["return_intermediate_states"]:
        chunk = given["chunk_size"] or 64
        results.append(k.new_empty((B, (T + chunk - 1) // chunk, HV, *state)))
    return results
