"""What is being asked? One `chunk_kda` call, bound against the signature of the installed function and normalised.

FLA's versions differ in their parameters, in the order of those parameters, and in the keywords they read out of
`**kwargs`. `Signature` holds what the installed function honours, found from the function itself and never from a
version number or a copied signature; `Signature.bind` turns the arguments of a call into a `Call`, the only form that
the rest of the package knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of one `chunk_kda` call under their newest names, with defaults filled in.

    Shapes: `q`, `k` [B, T, H, K]; `v` [B, T, HV, V]; `g` [B, T, HV, K]; `beta` [B, T, HV]; `A_log` HV values; `dt_bias`
    HV * K values or None; `initial_state` fp32 [N, HV, K, V] ([N, HV, V, K] with `state_v_first`) or None; `cu_seqlens`
    [N + 1] or None. Nothing is checked here: `dispatch.decide` does that.

    `scale` is never None. `A_log` and `dt_bias` are None unless the gate is computed in the kernel, which is when FLA
    reads them. `unknown` names the keywords given that the installed function does not honour.
    """

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    A_log: Any = None
    dt_bias: Any = None
    scale: float = 1.0
    initial_state: Any = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None
    disable_recompute: bool = False
    return_intermediate_states: bool = False
    state_v_first: bool = False
    cu_seqlens: Any = None
    cu_seqlens_cpu: Any = None
    cp_context: Any = None
    use_graph: bool = False
    max_num_seqs: int | None = None
    chunk_size: int = 64
    unknown: tuple[str, ...] = ()


# A frozen dataclass fills its fields through object.__setattr__, which costs 3 microseconds a call. A draft is the same
# object before it is frozen: the same slots, filled by plain assignment.
_Draft = make_dataclass("_Draft", [field.name for field in fields(Call)], slots=True, eq=False)


def _freeze(draft: _Draft) -> Call:
    draft.__class__ = Call
    return draft


class NotBindable(Exception):
    """A call that the installed function cannot take, or would not understand as its newest version does.

    `refused` tells the two apart: True when the installed function raises its own error for it.
    """

    def __init__(self, reason: str, refused: bool):
        super().__init__(reason)
        self.reason = reason
        self.refused = refused


# What every keyword means when it is not given. A keyword given with this value asks for nothing, so that it does no
# harm where the installed function ignores it.
DEFAULTS = {
    "A_log": None,
    "dt_bias": None,
    "scale": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "safe_gate": False,
    "lower_bound": None,
    "disable_recompute": False,
    "return_intermediate_states": False,
    "state_v_first": False,
    "transpose_state_layout": False,
    "cu_seqlens": None,
    "cu_seqlens_cpu": None,
    "cp_context": None,
    "use_graph": False,
    "max_num_seqs": None,
    "chunk_size": 64,
}
# The arguments that have no default in any version.
REQUIRED = ("q", "k", "v", "g", "beta")
KNOWN = frozenset(DEFAULTS).union(REQUIRED)
# Keywords that FLA's versions take through `**kwargs` rather than through a parameter.
THROUGH_KWARGS = frozenset({"A_log", "dt_bias", "chunk_size", "transpose_state_layout"})


@dataclass(frozen=True, slots=True)
class Signature:
    """What one `chunk_kda` function honours.

    Attributes:
        positional: parameter names in the order in which positional arguments fill them.
        required: parameters without a default.
        honoured: every keyword that has an effect there and here, parameters and those read out of `**kwargs`.
        newer: parameters that this package does not know, with their defaults.
        takes_any_keyword: whether unknown keywords are swallowed by `**kwargs` instead of raising TypeError.
        renamed_state_layout: `transpose_state_layout` is the deprecated name of `state_v_first`, with a warning.
        grouped_values: HV may be a multiple of H (GVA); without, FLA checks that v has q's B, T and H.
        optional_A_log: `A_log` may be None when `lower_bound` is given.
    """

    positional: tuple[str, ...]
    required: tuple[str, ...]
    honoured: frozenset[str]
    newer: tuple[tuple[str, Any], ...]
    takes_any_keyword: bool
    renamed_state_layout: bool
    grouped_values: bool
    optional_A_log: bool

    @classmethod
    @lru_cache(maxsize=None)
    def of(cls, function: Callable) -> Signature:
        """Read the facts from `function`, looking through decorators that keep `__wrapped__`."""
        parameters = inspect.signature(function).parameters
        kinds = inspect.Parameter
        named = {name: p for name, p in parameters.items() if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)}
        takes_any_keyword = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
        code = getattr(inspect.unwrap(function), "__code__", None)
        # A keyword read out of **kwargs is a string constant of the function's code.
        constants = code.co_consts if code is not None else ()
        through_kwargs = {name for name in THROUGH_KWARGS if name in constants} if takes_any_keyword else set()
        return cls(
            positional=tuple(name for name, p in named.items() if p.kind is not kinds.KEYWORD_ONLY),
            required=tuple(name for name, p in named.items() if p.default is kinds.empty),
            honoured=frozenset(named) & KNOWN | through_kwargs,
            newer=tuple((name, p.default) for name, p in named.items() if name not in KNOWN),
            takes_any_keyword=takes_any_keyword,
            renamed_state_layout="state_v_first" in named and "transpose_state_layout" in through_kwargs,
            # Versions with GVA read HV from v's shape; those without demand that v has q's B, T and H.
            grouped_values=code is not None and "HV" in code.co_varnames,
            # An A_log of None came into FLA together with graph capture.
            optional_A_log="use_graph" in named,
        )

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> Call:
        """Bind and normalise the arguments of a call.

        Raises:
            NotBindable: the arguments do not fit the signature, or ask for what this FLA version does not do.
        """
        given = self._by_name(args, kwargs) if args else kwargs
        for name in self.required:
            if name not in given:
                raise NotBindable(f"the required argument {name} is missing", refused=True)
        unknown = ()
        if not self.honoured.issuperset(given):
            unknown = self._unknown(given)

        get = given.get
        state_v_first = get("state_v_first", False)
        if "transpose_state_layout" in given:
            if state_v_first and self.renamed_state_layout:
                raise NotBindable("both state_v_first and its old name transpose_state_layout are given", refused=True)
            state_v_first = state_v_first or given["transpose_state_layout"]
        q, v, scale = given["q"], given["v"], get("scale")
        use_gate_in_kernel = get("use_gate_in_kernel", False)
        A_log = dt_bias = None
        if use_gate_in_kernel:
            A_log, dt_bias = get("A_log"), get("dt_bias")
            if A_log is None and not self.optional_A_log:
                raise NotBindable("this FLA version needs A_log with use_gate_in_kernel", refused="A_log" not in given)
        if not self.grouped_values and (_rows(v) != _rows(q) or len(getattr(v, "shape", ())) != 4):
            sizes = f"v has [B, T, HV] = {_rows(v)}, q has [B, T, H] = {_rows(q)}"
            raise NotBindable(f"this FLA version has no GVA: {sizes}", refused=True)
        draft = _Draft(
            q,
            given["k"],
            v,
            given["g"],
            given["beta"],
            A_log,
            dt_bias,
            _default_scale(q) if scale is None else scale,
            get("initial_state"),
            get("output_final_state", False),
            get("use_qk_l2norm_in_kernel", False),
            use_gate_in_kernel,
            get("use_beta_sigmoid_in_kernel", False),
            get("allow_neg_eigval", False),
            get("safe_gate", False),
            get("lower_bound"),
            get("disable_recompute", False),
            get("return_intermediate_states", False),
            state_v_first,
            get("cu_seqlens"),
            get("cu_seqlens_cpu"),
            get("cp_context"),
            get("use_graph", False),
            get("max_num_seqs"),
            get("chunk_size", 64),
            unknown,
        )
        return _freeze(draft)

    def _by_name(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        if len(args) > len(self.positional):
            raise NotBindable(f"{len(args)} positional arguments, the most is {len(self.positional)}", refused=True)
        given = dict(zip(self.positional, args))
        twice = sorted(given.keys() & kwargs.keys())
        if twice:
            raise NotBindable(f"multiple values for {', '.join(twice)}", refused=True)
        return given | kwargs

    def _unknown(self, given: dict[str, Any]) -> tuple[str, ...]:
        """Names in `given` that have no effect in this version, or none here, although their value asks for one."""
        unknown, newer = [], dict(self.newer)
        for name, value in given.items():
            if name in self.honoured:
                continue
            if not self.takes_any_keyword and name not in newer:
                raise NotBindable(f"unexpected keyword argument {name}", refused=True)
            defaults = newer if name in newer else DEFAULTS
            if name not in defaults or value is not defaults[name]:
                unknown.append(name)
        return tuple(sorted(unknown))


def _rows(tensor: Any) -> list[int]:
    """The sizes of [B, T, heads, dim] without the last."""
    return list(getattr(tensor, "shape", ())[:3])


def _default_scale(q: Any) -> float:
    """K ** -0.5; 1.0 where q has no K, which is a call that no path serves."""
    shape = getattr(q, "shape", ())
    return shape[-1] ** -0.5 if len(shape) and shape[-1] > 0 else 1.0
