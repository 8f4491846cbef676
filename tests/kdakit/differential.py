"""Does a call mean the same with the plugin as without? FLA's own function decides, with its kernels replaced.

All of FLA's binding, checks and renaming is its own code; what it hands to its kernels at the end is caught, so that
this works where Triton cannot run, for every FLA version, without tuning. For each call:

- FLA alone refuses it: with the plugin, the same exception with the same words;
- it reaches FLA's kernels, well formed: with the plugin it is served, and the results (and gradients) are those of the
  fp64 recurrence for what FLA handed over, or it reaches FLA's kernels with the very same arguments;
- it reaches FLA's kernels, but would make them read out of bounds: it is never served. It is refused in one sentence
  where nothing else can run it (CPU tensors), and left to FLA otherwise.

The places where calls run: "cpu" (the reference), "pretended" (CPU tensors that pass for those of an H200; the kernels
are replaced by the recurrence, and refuse what the real ones cannot take), and "cuda" (the real kernels).
"""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import torch

import fla_kda_backend
from fla_kda_backend import dispatch, ops, reference, serve
from fla_kda_backend.dispatch import DeviceFacts
from tests.kdakit import cases, compare, fuzz
from tests.kdakit.run import environment, expected_path

PLACES = ("cpu", "pretended", "cuda")
# Relative L2 errors against the recurrence. Arithmetic in float32 over at most some hundred tokens: a hundred times its
# rounding, far below any mistake of meaning. A result in a narrower dtype is rounded once more, each element by at most
# half a unit in its last place.
FLOAT32 = 1e-4
ROUNDED = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 0.0}
# Gradients that vanish (of q under its own norm where K = 1) are sums of terms of about one that cancel: their error is
# measured against this much per element instead.
VANISHING = 1e-2
# FLA's own bound for the gradients of g and beta, the loosest of its bounds.
CUDA_GRADIENT = 2e-2
# Two runs of one kernel: FLA's have no atomics in the forward pass.
TRITON_REPEATED = 1e-6
FORWARD_DEFAULTS = {
    "use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False, "chunk_size": 64, "use_graph": False,
    "max_num_seqs": None,
}  # fmt: skip


class Mismatch(AssertionError):
    """A call means something else with the plugin than without."""


class Reached:
    """What FLA's function returns here: its kernels would have run with these arguments."""

    def __init__(self, arguments: dict[str, Any]):
        self.arguments = arguments


class _Undefined:
    """What the pretended kernels return where the real ones only promise not to read out of bounds."""


UNDEFINED = _Undefined()


@dataclass
class Outcome:
    """What came of a call: a value or an exception, and the warnings on the way."""

    value: Any = None
    error: Exception | None = None
    warned: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        return "FLA's kernels" if isinstance(self.value, Reached) else "a result"


def observe(function: Callable, args: tuple, kwargs: dict, recipe: fuzz.Recipe, device: str = "cpu") -> Outcome:
    """Call the function in the recipe's grad mode, once."""
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    with warnings.catch_warnings(record=True) as caught, ExitStack() as stack:
        warnings.simplefilter("always")
        stack.enter_context(modes[recipe.grad_mode]())
        if recipe.autocast:
            stack.enter_context(torch.autocast(device, dtype=torch.bfloat16))
        try:
            outcome = Outcome(value=function(*args, **kwargs))
        except Exception as error:  # whatever it is, it has to be the same on the other side
            outcome = Outcome(error=error)
    outcome.warned = [str(w.message) for w in caught if w.category is DeprecationWarning]
    return outcome


# --- what FLA handed to its kernels -----------------------------------------------------------------------------------


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float))


def problems(a: dict[str, Any], values: bool = True) -> list[str]:
    """What is wrong with arguments that FLA lets through to its kernels; `values` of cu_seqlens included."""
    wrong = [name for name in ("q", "k", "v", "g", "beta") if not _is_float(a[name])]
    if wrong:
        return [f"{', '.join(wrong)} are no floating-point tensors"]
    if a["q"].dim() != 4 or a["v"].dim() != 4:
        return ["q and v need four dimensions"]
    (B, T, H, K), (HV, V) = a["q"].shape, a["v"].shape[2:]
    found = []
    expected = {"k": (B, T, H, K), "v": (B, T, HV, V), "g": (B, T, HV, K), "beta": (B, T, HV)}
    found += [f"{name} is {list(a[name].shape)}" for name, shape in expected.items() if a[name].shape != shape]
    if H == 0 or K == 0 or HV % H:
        found.append("no heads")
    for name, count in (("A_log", HV), ("dt_bias", HV * K)):
        x = a[name]
        if x is not None and not (_is_float(x) and x.numel() == count):
            found.append(name)
    if a["use_gate_in_kernel"] and a["A_log"] is None and (a["lower_bound"] is None or not a["A_log_is_optional"]):
        found.append("no A_log")
    cu_seqlens, N = a["cu_seqlens"], B
    if cu_seqlens is not None:
        if not (isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.dtype in (torch.int32, torch.int64)):
            return [*found, "cu_seqlens is no integer tensor"]
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or B != 1:
            return [*found, "cu_seqlens has no sequences"]
        N = len(cu_seqlens) - 1
        on_host = a["cu_seqlens_cpu"]
        if on_host is not None and not (isinstance(on_host, torch.Tensor) and on_host.shape == cu_seqlens.shape):
            found.append("cu_seqlens_cpu")
        if values and cu_seqlens.device.type != "meta":
            borders = cu_seqlens.tolist()
            if borders[0] != 0 or sorted(borders) != borders or borders[-1] > T:
                found.append(f"borders {borders}")
            elif on_host is not None and "cu_seqlens_cpu" not in found:
                if on_host.device.type == "meta" or on_host.tolist() != borders:
                    found.append("cu_seqlens_cpu")
    state = a["initial_state"]
    if state is not None:
        shape = (N, HV, V, K) if a["state_v_first"] else (N, HV, K, V)
        if not (_is_float(state) and state.shape == shape):
            found.append("initial_state")
    tensors = [a[name] for name in ("k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")]
    if any(isinstance(x, torch.Tensor) and x.device != a["q"].device for x in tensors) or a["q"].device.type == "meta":
        found.append("more than one device")
    if type(a["chunk_size"]) is not int:
        found.append("chunk_size")
    return found


def refused_late(a: dict[str, Any]) -> bool:
    """Whether FLA's function fails after, or inside of, what is replaced here."""
    graph = a["use_graph"] and a["cu_seqlens"] is not None and a["max_num_seqs"] is not None
    if graph and isinstance(a["cu_seqlens"], torch.Tensor) and a["cu_seqlens"].dim():
        if a["cu_seqlens"].shape[0] - 1 != a["max_num_seqs"]:
            return True
    return bool(a["return_intermediate_states"]) and (not a["inference"] or a["disable_recompute"] is not False)


def refused_by_the_newest(a: dict[str, Any]) -> bool:
    """Whether the newest FLA refuses well-formed arguments of our own function, given under its names."""
    state, bound = a["initial_state"], a["lower_bound"]
    return (
        a["both_layouts"]
        or a["chunk_size"] not in (32, 64)
        or (state is not None and state.dtype != torch.float32)
        or bool(a["safe_gate"] and a["use_gate_in_kernel"] and (bound is None or not -5 <= bound < 0))
        or bool(a["allow_neg_eigval"] and not a["use_beta_sigmoid_in_kernel"])
        or a["q"].shape[-1] > 256
    )


def need_not_be_served(a: dict[str, Any]) -> str | None:
    """Why a well-formed call may be left to FLA on every path, or None."""
    B, T, _, K = a["q"].shape
    if a["cp_context"] is not None:
        return "context parallelism"
    if a["cu_seqlens"] is None and a["cu_seqlens_cpu"] is not None:
        return "sequences on the host alone"
    if not _is_number(a["scale"]) or not (a["lower_bound"] is None or _is_number(a["lower_bound"])):
        return "a number that is none"
    flags = (a.get(name) for name in fuzz.FLAGS)
    if not all(flag is None or isinstance(flag, int) for flag in flags):
        return "a flag that is none"
    if a["surplus"]:
        return f"not honoured: {a['surplus']}"
    if 0 in (B, *a["v"].shape[2:]):
        return "nothing to compute"
    return None


def kernels_serve(a: dict[str, Any]) -> bool:
    """Whether the CUDA kernels take these well-formed arguments."""
    fits = a["q"].shape[-1] == 128 and a["v"].shape[-1] == 128
    bf16, fp32 = torch.bfloat16, torch.float32
    fits = fits and all(a[name].dtype == bf16 for name in ("q", "k", "v"))
    fits = fits and all(a[name].dtype in (bf16, fp32) for name in ("g", "beta"))
    in_kernel = a["use_gate_in_kernel"] and a["lower_bound"] is not None
    return fits and (not in_kernel or -5 <= a["lower_bound"] < 0)


def served_by(a: dict[str, Any], place: str) -> str:
    """The path of accepted arguments."""
    if place == "cpu":
        return "reference"
    return "hopper" if place == "pretended" else expected_path()


def kernels_need_not_serve(a: dict[str, Any]) -> bool:
    """What the CUDA path may decline: gradients, intermediate states, tensors of other classes."""
    tensors = [x for x in a.values() if isinstance(x, torch.Tensor)]
    needs_gradients = a["grad"] and any(x.requires_grad for x in tensors)
    inputs = [a[name] for name in ("q", "k", "v", "g", "beta")]
    plain = all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in inputs)
    return needs_gradients or bool(a["return_intermediate_states"]) or not plain


def is_stable(a: dict[str, Any]) -> bool:
    """Whether the recurrence damps an error instead of blowing it up, until it overflows: what can be compared.

    The state is multiplied by exp(g) (1 - beta k k^T) a token, which shrinks nothing and grows nothing while g is at
    most 0 and beta |k|^2 at most 2.
    """
    with torch.no_grad():
        k, beta, g = (torch.nan_to_num(a[name].float()) for name in ("k", "beta", "g"))
        squared = 1.0 if a["use_qk_l2norm_in_kernel"] or not k.numel() else k.square().sum(-1).max().item()
        if a["use_beta_sigmoid_in_kernel"] or not beta.numel():
            step = 2.0 if a["allow_neg_eigval"] else 1.0
        else:
            step = max(beta.max().item(), 0.0) if beta.min() > -0.01 else math.inf
        decays = bool(a["use_gate_in_kernel"]) or not g.numel() or g.max().item() <= 0
    return decays and step * squared <= 2.05 and (not isinstance(a["scale"], float) or math.isfinite(a["scale"]))


def judge(a: dict[str, Any]) -> tuple:
    """(o, final_state or None[, h]) of the recurrence in float64 for what FLA handed to its kernels."""
    names = (
        "A_log", "dt_bias", "scale", "initial_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "lower_bound", "state_v_first", "cu_seqlens",
    )  # fmt: skip
    inputs = [a[name] for name in ("q", "k", "v", "g", "beta")]
    options = {name: a[name] for name in names}
    o, state = reference.recurrent_kda(*inputs, **options, output_final_state=bool(a["output_final_state"]))
    if not a["return_intermediate_states"]:
        return o, state
    return o, state, _entering_states(inputs, options, a)


def _entering_states(inputs: list, options: dict, a: dict) -> torch.Tensor:
    """[B, NT, HV, ...]: the state that enters each chunk of each sequence, by running the recurrence chunk by chunk."""
    B, T = a["q"].shape[:2]
    borders = [0, T] if a["cu_seqlens"] is None else a["cu_seqlens"].tolist()
    HV, (K, V) = a["v"].shape[2], (a["q"].shape[3], a["v"].shape[3])
    empty = torch.zeros(B, HV, *((V, K) if a["state_v_first"] else (K, V)), dtype=torch.float64, device=a["q"].device)
    entering = []
    for n, (start, end) in enumerate(zip(borders, borders[1:])):
        given = a["initial_state"]
        state = empty if given is None else given.double() if a["cu_seqlens"] is None else given[n : n + 1].double()
        for at in range(start, end, a["chunk_size"]):
            entering.append(state)
            rows = slice(at, min(end, at + a["chunk_size"]))
            changes = dict(initial_state=state, cu_seqlens=None, output_final_state=True)
            state = reference.recurrent_kda(*(x[:, rows] for x in inputs), **(options | changes))[1]
    return torch.stack(entering, dim=1) if entering else empty.new_empty((B, 0, *empty.shape[1:]))


# --- comparing --------------------------------------------------------------------------------------------------------


def _agree(what: str, actual: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, bound: float, floor=0.0) -> None:
    """Fail unless `actual` has the shape of `exact`, this dtype, and an error below the bound (none for inf)."""
    if actual.shape != exact.shape:
        raise Mismatch(f"{what} has shape {list(actual.shape)} instead of {list(exact.shape)}")
    if actual.dtype != dtype:
        raise Mismatch(f"{what} is {actual.dtype} instead of {dtype}")
    if bound == math.inf:
        return
    actual, exact = actual.detach().double(), exact.detach().double()
    # What overflows in the dtype of the result is not judged beyond that.
    finite = exact.abs() < torch.finfo(dtype).max / 2
    if not torch.equal(actual[finite].isfinite(), torch.ones_like(actual[finite], dtype=torch.bool)):
        raise Mismatch(f"{what} is not finite where it should be")
    actual, exact = actual[finite], exact[finite]
    error = torch.linalg.vector_norm(actual - exact)
    size = torch.linalg.vector_norm(exact) + floor * math.sqrt(exact.numel())
    if not error <= bound * size + 1e-12:
        raise Mismatch(f"{what}: error {float(error / size):.2e} relative to its size, above {bound:.1e}")


def _bound(dtype: torch.dtype, place: str, what: str) -> float:
    if place == "cuda" and what == "gradient":
        return CUDA_GRADIENT
    if place == "cuda":
        return getattr(compare.CUDA_FORWARD_FEW_TERMS, what)
    return FLOAT32 + ROUNDED[dtype]


def check_results(value: Any, a: dict[str, Any], place: str) -> None:
    """A served result against the recurrence, gradients included where they are needed."""
    exact = judge(a)
    if not isinstance(value, tuple) or len(value) != len(exact):
        raise Mismatch(f"the result is a {type(value).__name__} instead of {len(exact)} values")
    o, state, dtype = value[0], value[1], a["q"].dtype
    # A NaN within a sequence may spread through the whole of it. Rows outside of every sequence do not get here.
    stable = is_stable(a) and not any(x is not None and x.isnan().any() for x in exact)

    def bound_of(dtype: torch.dtype, what: str) -> float:
        return _bound(dtype, place, what) if stable else math.inf

    _agree("o", o, exact[0], dtype, bound_of(dtype, "o"))
    if (state is None) != (exact[1] is None):
        raise Mismatch(f"final_state is {'missing' if state is None else 'given although not asked for'}")
    if state is not None:
        _agree("final_state", state, exact[1], torch.float32, bound_of(torch.float32, "state"))
    if len(exact) == 3:
        _agree("h", value[2], exact[2], a["k"].dtype, bound_of(a["k"].dtype, "state"))
    leaves = {name: x for name, x in a.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    if a["grad"] and leaves:
        actual, expected = _gradients(value, leaves), _gradients(exact, leaves)
        for name, leaf in leaves.items():
            bound = bound_of(leaf.dtype, "gradient")
            _agree(f"the gradient of {name}", actual[name], expected[name], leaf.dtype, bound, VANISHING)


def _gradients(results: tuple, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    loss = torch.zeros((), dtype=torch.float64)
    for x in results:
        if x is not None:
            # Quarters, which every dtype holds exactly: the gradient that arrives at a result is not rounded.
            weights = torch.randint(-8, 9, x.shape, generator=random).double().to(x.device) / 4
            loss = loss.to(x.device) + (x.double() * weights).sum()
    if not loss.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found)
    }


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.device.type == "meta":
        return True
    return torch.equal(*(x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in (left, right)))


def _same_arguments(left: dict[str, Any], right: dict[str, Any]) -> bool:
    if left.keys() != right.keys():
        return False
    for name, x in left.items():
        y = right[name]
        if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
            if x is not y:
                return False
        elif x is not y and x != y and not (x != x and y != y):  # NaN is like NaN here
            return False
    return True


# --- the installed FLA with its kernels replaced ----------------------------------------------------------------------


class Installed:
    """FLA's `chunk_kda` with our plugin beside it, at one of the `PLACES`. To be used inside of `installed(place)`."""

    def __init__(self, place: str, forward: Callable):
        import fla.ops.kda

        self.place, self.device = place, "cuda" if place == "cuda" else "cpu"
        self.function = fla.ops.kda.chunk_kda
        self.order = _positional(inspect.unwrap(self.function))
        self.public_order = _positional(fla_kda_backend.chunk_kda)
        self.forward_names = list(inspect.signature(inspect.unwrap(forward)).parameters)[1:]

    def reach(self, *args: Any) -> Reached:
        """Stands in for `ChunkKDAFunction.apply`."""
        return Reached(dict(zip(self.forward_names, args, strict=True)))

    def canonical(self, reached: Reached, recipe: fuzz.Recipe) -> dict[str, Any]:
        """The arguments of FLA's kernels under their newest names, and what else the rules above ask for."""
        a = FORWARD_DEFAULTS | reached.arguments
        if "transpose_state_layout" in a:
            a["state_v_first"] = a.pop("transpose_state_layout")
        return a | self._circumstances(recipe)

    def _circumstances(self, recipe: fuzz.Recipe, newest: bool = False) -> dict[str, Any]:
        read = {*(self.public_order if newest else self.order), "A_log", "dt_bias"}
        if "state_v_first" in read:
            read |= {"chunk_size", "transpose_state_layout"}
        return {
            # Keywords that FLA ignores although they ask for something.
            "surplus": sorted(n for n, x in recipe.keywords.items() if n not in read and not _asks_for_nothing(n, x)),
            "A_log_is_optional": newest or "use_graph" in self.order,
            "inference": recipe.grad_mode == "inference",
            "grad": recipe.grad_mode == "grad",
        }

    def check(self, recipe: fuzz.Recipe, public: bool = False) -> str:
        """What came of the call, with the plugin: "refused by FLA", "served", "left to FLA", "refused", "strict".

        Args:
            public: the call is one of `fla_kda_backend.chunk_kda`, which understands everything as the newest FLA does
                whatever version is installed.

        Raises:
            Mismatch: the call means something else with the plugin than without.
        """
        if public and self.order.keys() != self.public_order.keys():
            return self._check_newer_than_installed(recipe)
        args, kwargs = recipe.build(self.order, self.device)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        before = [x._version for x in tensors]
        # A kernel that writes to an input leaves no trace but the values.
        copies = [x.detach().clone() for x in tensors] if self.place == "cuda" else []
        with environment("FLA_KDA_BACKEND", "0"):
            off = observe(self.function, args, kwargs, recipe, self.device)
        if off.error is None and not isinstance(off.value, Reached):
            raise Mismatch("the plugin does not stay away when it is switched off")
        counted = fla_kda_backend.dispatch_counts()
        if self.place == "cuda":
            compare.poison_cuda_memory(megabytes=32)
        with environment("FLA_KDA_STRICT", "1" if recipe.strict else "0"):
            on = observe(fla_kda_backend.chunk_kda if public else self.function, args, kwargs, recipe, self.device)
            if self.place == "cuda":
                torch.cuda.synchronize()  # a kernel that reads out of bounds fails here, and not in a later call
        counts = fla_kda_backend.dispatch_counts()
        asked = sum(counts.values()) - sum(counted.values())
        if public and not asked and isinstance(on.error, TypeError):  # Python's own, before the first line of ours
            self._refused_by_both(off, on)
            return "refused by FLA"
        if asked != 1:
            raise Mismatch(f"the plugin has been asked {asked} times")
        changed = [x for x, copy in zip(tensors, copies) if not _same_bytes(x, copy)]
        if changed or [x._version for x in tensors] != before:
            raise Mismatch("an input was written to")
        path = next(path for path in counts if counts[path] != counted[path])
        if public and type(on.error) is RuntimeError and "the installed FLA ignores" in str(on.error):
            if self._circumstances(recipe)["surplus"]:
                return "refused"
        return self._verdict(recipe, off, on, path)

    def _check_newer_than_installed(self, recipe: fuzz.Recipe) -> str:
        """A call of the public function beside an older FLA: served as the newest FLA means it, or never run."""
        args, kwargs = recipe.build(self.public_order, self.device)
        on = observe(fla_kda_backend.chunk_kda, args, kwargs, recipe, self.device)
        try:
            bound = inspect.signature(fla_kda_backend.chunk_kda).bind(*args, **kwargs)
        except TypeError as problem:
            if not isinstance(on.error, TypeError):
                raise Mismatch(f"{problem}, but it is {on}") from problem
            return "refused by FLA"
        bound.apply_defaults()
        a = FORWARD_DEFAULTS | {"A_log": None, "dt_bias": None} | bound.arguments | bound.arguments["kwargs"]
        a["both_layouts"] = bool(a["state_v_first"]) and "transpose_state_layout" in a
        if "transpose_state_layout" in a and not a["state_v_first"]:
            a["state_v_first"] = a["transpose_state_layout"]
        if not a["use_gate_in_kernel"]:
            a["A_log"] = a["dt_bias"] = None
        if a["scale"] is None and isinstance(a["q"], torch.Tensor) and a["q"].dim() == 4 and a["q"].shape[-1]:
            a["scale"] = a["q"].shape[-1] ** -0.5
        if a["cp_context"] is not None:  # its sequences take the place of those given
            a["cu_seqlens"] = getattr(a["cp_context"], "cu_seqlens", None)
            on_host = getattr(a["cp_context"], "cu_seqlens_cpu", None)
            a["cu_seqlens_cpu"] = a["cu_seqlens_cpu"] if on_host is None else on_host
        a |= self._circumstances(recipe, newest=True)
        if isinstance(on.value, Reached):
            reached = {n: x for n, x in self.canonical(on.value, recipe).items() if n in on.value.arguments}
            asked = {name: a[name] for name in reached}
            if not _same_arguments(reached, asked) or a["surplus"]:
                raise Mismatch("an older FLA is asked for something else")
            return "left to FLA"
        wrong = problems(a)
        if on.error is None:
            self._may_serve(a, on, wrong, not wrong and refused_late(a), "reference")
            return "served"
        if not (wrong or refused_late(a) or need_not_be_served(a) or refused_by_the_newest(a)):
            raise Mismatch(f"not served, although nothing speaks against it: {on}")
        return "refused"

    def _verdict(self, recipe: fuzz.Recipe, off: Outcome, on: Outcome, path: str) -> str:
        served = on.error is None and not isinstance(on.value, Reached)
        if served != (path != "triton") and not (on.error is not None and path != "triton"):
            raise Mismatch(f"{on} came from the path {path}")
        if off.error is not None:
            if recipe.strict and isinstance(on.error, serve.StrictModeError):
                return "strict"
            self._refused_by_both(off, on)
            return "refused by FLA"
        a = self.canonical(off.value, recipe)
        wrong, late = problems(a), refused_late(a)
        if served:
            self._may_serve(a, on, wrong, late, path)
            if on.warned != off.warned:
                raise Mismatch(f"warnings differ: {on.warned} and {off.warned}")
            return "served"
        if isinstance(on.value, Reached):
            if recipe.strict and not late:  # what FLA refuses gets FLA's own error
                raise Mismatch("strict mode let a call through to FLA's kernels")
            if not _same_arguments(on.value.arguments, off.value.arguments):
                raise Mismatch("FLA's kernels are reached with other arguments")
            if on.warned != off.warned:
                raise Mismatch(f"warnings differ: {on.warned} and {off.warned}")
            self._may_decline(a, wrong, late)
            return "left to FLA"
        if path != "triton":
            raise Mismatch(f"accepted for {path}, and then: {on}")
        if isinstance(on.error, serve.StrictModeError) and recipe.strict:
            self._may_decline(a, wrong, late)
            return "strict"
        if self.place != "cpu":
            raise Mismatch(f"a call on a GPU that FLA would run fails: {on}")
        if not (wrong or late):
            raise Mismatch(f"refused although nothing is wrong with it: {on}")
        expected = (ValueError, AssertionError) if wrong and late else ValueError if wrong else AssertionError
        if not isinstance(on.error, expected) or "\n" in str(on.error):
            raise Mismatch(f"{wrong} ends in {on}")
        return "refused"

    def _refused_by_both(self, off: Outcome, on: Outcome) -> None:
        if on.error is None:
            raise Mismatch(f"FLA refuses with {off}, with the plugin it is {on}")
        if type(on.error) is not type(off.error) or str(on.error) != str(off.error):
            raise Mismatch(f"FLA refuses with {off}, with the plugin it is {on}")
        if on.warned != off.warned:
            raise Mismatch(f"warnings differ: {on.warned} and {off.warned}")

    def _may_serve(self, a: dict, on: Outcome, wrong: list[str], late: bool, path: str) -> None:
        on_gpu = self.place != "cpu"
        # On a GPU nobody reads the borders before the launch: the kernels only promise to stay within bounds.
        if wrong and not (on_gpu and not problems(a, values=False)):
            raise Mismatch(f"served although {', '.join(wrong)}")
        if late:
            raise Mismatch("served although FLA refuses it after its kernels")
        if a["surplus"]:
            raise Mismatch(f"served although {a['surplus']} are not honoured")
        if on_gpu and not kernels_serve(a):
            raise Mismatch(f"{path} accepted what the kernels do not take")
        expected = served_by(a, self.place)
        if path != expected:
            raise Mismatch(f"served by {path} instead of {expected}")
        if wrong:
            return
        check_results(on.value, a, self.place)

    def _may_decline(self, a: dict, wrong: list[str], late: bool) -> None:
        if wrong or late or need_not_be_served(a):
            return
        if self.place != "cpu" and (not kernels_serve(a) or kernels_need_not_serve(a)):
            return
        raise Mismatch(f"not served, although nothing speaks against it: {fla_kda_backend.last_dispatch()}")


def _asks_for_nothing(name: str, value: Any) -> bool:
    defaults = fuzz.PLAIN_DEFAULTS | dict.fromkeys(fuzz.FLAGS, False)
    return name in defaults and value is defaults[name]


def _positional(function: Callable) -> dict[str, Any]:
    """The parameters that can be given by position, and their defaults."""
    parameters = inspect.signature(function).parameters
    return {name: p.default for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}


@contextmanager
def installed(place: str) -> Iterator[Installed]:
    """The installed FLA with its kernels replaced, and our plugin in force."""
    import fla.ops.kda.chunk

    original = fla.ops.kda.chunk.ChunkKDAFunction
    fla_kda_backend.enable()
    fla_installed = Installed(place, original.forward)
    replaced = type("ChunkKDAFunction", (), {"apply": staticmethod(fla_installed.reach)})
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(fla.ops.kda.chunk, "ChunkKDAFunction", replaced))
        if place == "pretended":
            facts = DeviceFacts("cuda", (9, 0))
            stack.enter_context(mock.patch.object(dispatch, "device_facts", lambda device: facts))
            stack.enter_context(mock.patch.object(dispatch, "library_for", lambda capability: ("90a", "")))
            kernels = {path: _pretended_kernel for path in dispatch.CUDA_PATHS}
            stack.enter_context(mock.patch.dict(serve.RUNNERS, kernels))
        yield fla_installed


def _pretended_kernel(call: Any) -> Any:
    a = {name: getattr(call, name) for name in type(call).__slots__} | {"A_log_is_optional": True}
    wrong = problems(a, values=False)
    if wrong or not kernels_serve(a) or 0 in call.v.shape[:1] + call.v.shape[2:]:
        raise Mismatch(f"the kernels were given what they cannot take: {wrong}")
    _bind_to_operator(call)
    if problems(a):
        return UNDEFINED
    o, state, *h = judge(a)
    state = None if state is None else state.float()
    return (o.to(call.q.dtype), state, *(x.to(call.k.dtype) for x in h))


def _bind_to_operator(call: Any) -> None:
    """Fail unless the real operator takes the arguments: for CPU tensors it then says that it is for CUDA alone."""
    if ops.library() is None:
        return
    try:
        ops.chunk_kda_forward(call, "portable")
    except NotImplementedError:
        return
    raise Mismatch("the operator is expected to run on CUDA alone")


# --- many calls -------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """A call that fails, made small."""

    place: str
    number: int
    problem: str
    recipe: fuzz.Recipe


def domain_of(place: str) -> fuzz.Domain:
    return {"cpu": fuzz.CPU, "pretended": fuzz.GPU, "cuda": fuzz.LARGE_GPU}[place]


def recipe_of(place: str, seed: int | str, number: int, mishaps: bool = True) -> fuzz.Recipe:
    """Call `number` of a run: it does not depend on those before it."""
    return fuzz.generate(Random(f"{place}-{seed}-{number}"), domain_of(place), mishaps)


def run(
    place: str,
    calls: int,
    seed: int,
    *,
    public: bool = False,
    first: int = 0,
    most_failures: int = 5,
    make_small: bool = True,
) -> tuple[Counter, list[Found]]:
    """(what came of how many calls, the failures, made small unless that is not wanted)."""
    counts: Counter[str] = Counter()
    failures: list[Found] = []
    with installed(place) as fla_installed:
        for number in range(first, first + calls):
            recipe = recipe_of(place, seed, number)
            verdict, problem = verdict_on(fla_installed, recipe, public)
            counts[verdict] += 1
            if problem is None:
                continue
            if not make_small:
                failures.append(Found(place, number, problem, recipe))
                break
            kind = _kind(problem)
            small = fuzz.shrink(recipe, lambda r, kind=kind: _kind(verdict_on(fla_installed, r, public)[1]) == kind)
            failures.append(Found(place, number, verdict_on(fla_installed, small, public)[1] or problem, small))
            if len(failures) >= most_failures:
                break
    return counts, failures


def verdict_on(fla_installed: Installed, recipe: fuzz.Recipe, public: bool = False) -> tuple[str, str | None]:
    """(what came of a call, "failed" included, and what is wrong with it in one line or None)."""
    try:
        return fla_installed.check(recipe, public), None
    except Mismatch as problem:
        return "failed", str(problem)
    except Exception as problem:  # the check itself has failed, which is a failure, too
        return "failed", f"the check fails: {type(problem).__name__}: {problem}"


def _kind(problem: str | None) -> str | None:
    """The same for problems that differ in numbers and sizes alone."""
    return None if problem is None else "".join(c for c in problem.split("|")[0] if not c.isdigit())[:60]




def record(place: str, calls: int, seed: int | str, first: int = 0) -> dict:
    """A run as plain data, for scripts/fuzz.py. The place "public" is our own `chunk_kda` on CPU tensors."""
    import fla

    began = time.monotonic()
    is_public = place == "public"
    outcomes, failures = run("cpu" if is_public else place, calls, f"{place}-{seed}", public=is_public, first=first)
    return dict(
        place=place,
        fla=fla.__version__,
        calls=calls,
        outcomes=dict(outcomes),
        seconds=round(time.monotonic() - began, 1),
        failures=[dict(number=f.number, problem=f.problem, python=as_python(f, is_public)) for f in failures],
    )


def as_python(found: Found, public: bool = False) -> str:
    """A program that makes a failing call again."""
    call = f"    fla_installed.check({found.recipe!r}{', public=True' if public else ''})"
    head = ["from tests.kdakit import fuzz", "from tests.kdakit.differential import installed"]
    return "\n".join([*head, f"with installed({found.place!r}) as fla_installed:", call])


# --- FLA's real Triton kernels ----------------------------------------------------------------------------------------

# One variant of FLA's kernels, that of parity.py: each further one would be tuned for minutes.
TRITON_CALLER, TRITON_HEADS = "1-kimi-linear", 32


def record_triton(calls: int, seed: int | str) -> dict:
    """Calls on a GPU that we decline, on FLA's real kernels with the plugin on and off, as `record` does."""
    import fla

    began, outcomes, failures = time.monotonic(), Counter(), []
    for number in range(calls):
        description, problem = _check_triton(Random(f"triton-{seed}-{number}"), number)
        outcomes["left to FLA" if problem is None else "failed"] += 1
        if problem is not None:
            failures.append(dict(number=number, problem=problem, python=f"# {description}"))
    seconds = round(time.monotonic() - began, 1)
    return dict(
        place="triton", fla=fla.__version__, calls=calls, outcomes=dict(outcomes), seconds=seconds, failures=failures
    )


def _check_triton(random: Random, number: int) -> tuple[str, str | None]:
    """(which call it was, what is wrong with it or None)."""
    import fla.ops.kda

    case = cases.Case(cases.caller(TRITON_CALLER), random.choice(("dense", "dense-tail", "dense-batch")), "randn")
    tokens, seed = random.choice((32, 64, 96, 256)), random.randrange(1000)
    why = ("surplus keyword", "forced", "intermediate states")[number % 3]
    description = f"{case}, {tokens} tokens, seed {seed}, {why}"
    arguments = cases.build(case, tokens=tokens, heads=TRITON_HEADS, device="cuda", seed=seed).arguments
    if why == "surplus keyword":
        arguments["window"] = 4
    if why == "intermediate states":
        arguments["return_intermediate_states"] = True

    def once() -> tuple:
        compare.poison_cuda_memory()
        with torch.inference_mode():
            return fla.ops.kda.chunk_kda(**arguments)

    with environment("FLA_KDA_BACKEND", "0"):
        off = once()
    with environment("FLA_KDA_FORCE", "triton") if why == "forced" else nullcontext():
        on = once()
    decision = fla_kda_backend.last_dispatch()
    if decision.path != "triton" and why != "intermediate states":
        return description, f"served by {decision.path}"
    if len(on) != len(off):
        return description, f"{len(on)} results instead of {len(off)}"
    # The same kernels; or ours, where intermediate states are served.
    for name, x, y in zip(("o", "final_state", "h"), on, off):
        error = compare.relative_l2(x, y.double())
        bound = TRITON_REPEATED if decision.path == "triton" else compare.CUDA_FORWARD_FEW_TERMS.o
        if x.dtype != y.dtype or not error <= bound:
            return description, f"{name} differs by {error:.2e}"
    return description, None
