"""Who serves a call? The rules, each one a small function with its reason, in the order in which they are checked.

A rule takes a `Call` and its sizes, and returns None, or one sentence saying why the call is not ours. No rule reads
the values of a tensor on a GPU, so that deciding never waits for the device. The groups:

- `READABLE`: what can be looked at at all;
- `CUDA_DOES_NOT`: for tensors on a GPU, what our kernels do not do. Checked first there, since it is cheap and settles
  most calls that are not ours, those of training before all;
- `FLA_REFUSES`, `FLA_REFUSES_LATE`: what FLA itself refuses, left to FLA, which raises its own error;
- `NOT_OURS`: what only FLA understands, left to FLA;
- `MALFORMED`: what does not fit together. FLA does not check it, and a kernel would read out of bounds;
- `CPU_DOES_NOT`: for CPU tensors, what the reference cannot take.

A call on CPU tensors that nothing behind us can serve either is refused with an exception of ours (`Decision.error`).

Asking every rule takes as long as launching the kernels. So what the rules for a GPU say stands once more in
`usual_sizes`, as one condition that reads each attribute of a tensor once. It only ever says yes, to calls of the usual
kind: the rules decide about every other call, and they alone know the reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import torch

from fla_kda_backend import switches
from fla_kda_backend.call import Call

# The name of each path in the log, in order of preference.
PATH_LABELS = {
    "hopper": "FlashKDA Hopper",
    "portable": "FlashKDA portable",
    "reference": "torch reference",
    "triton": "Triton",
}
SERVED_BY_US = frozenset(PATH_LABELS) - {"triton"}

CUDA_HEAD_DIM = 128
# The kernels of a GPU; "hopper" needs a library built for that architecture.
CUDA_PATHS = ("hopper", "portable")
HOPPER_ARCH = "90a"
# A block of the grid for each sequence and head, some to spare for what else a launch does.
MAX_SEQUENCES_TIMES_HEADS = 2**31 - 1024
FLA_MAX_KEY_DIM = 256
FLA_CHUNK_SIZES = (32, 64)
FLAGS = (
    "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval", "safe_gate", "disable_recompute", "return_intermediate_states", "state_v_first", "use_graph",
)  # fmt: skip
_flags = attrgetter(*FLAGS)
SAFE_GATE_BOUND = -5.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a call goes, and why.

    Attributes:
        path: a key of `PATH_LABELS`.
        reason: one sentence, empty for a call that we serve.
        arch: the built architecture that serves it, such as "90a", on a CUDA path.
        error: the exception to raise with `reason`, for a call that nothing can serve.
    """

    path: str
    reason: str = ""
    arch: str | None = None
    error: type[Exception] | None = None


class Dims(NamedTuple):
    """The sizes of one call: q and k are [B, T, H, K], v is [B, T, HV, V] (V is 0 where v has no such dimension)."""

    B: int
    T: int
    H: int
    K: int
    HV: int
    V: int

    @classmethod
    def of(cls, call: Call) -> Dims | None:
        """None when q or v has too few dimensions for FLA to read its sizes from."""
        q_shape, v_shape = call.q.shape, call.v.shape
        if len(q_shape) != 4 or len(v_shape) < 3:
            return None
        sizes = (*q_shape, v_shape[2], v_shape[3] if len(v_shape) > 3 else 0)
        return tuple.__new__(cls, sizes)  # half the time of cls(*sizes)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the rules need to know of a device: its kind ("cuda", "cpu", ...) and its compute capability."""

    kind: str
    capability: tuple[int, int] | None = None


@lru_cache(maxsize=None)
def device_facts(device: torch.device) -> DeviceFacts:
    """The facts of one device, looked up once. The only place where the rules touch a GPU's driver."""
    if device.type != "cuda":
        return DeviceFacts(device.type)
    if torch.version.hip is not None:  # torch calls AMD GPUs "cuda", with capabilities that look like NVIDIA's
        return DeviceFacts("hip")
    return DeviceFacts("cuda", torch.cuda.get_device_capability(device))


def arch_for(capability: tuple[int, int], archs: tuple[str, ...]) -> str | None:
    """The built architecture that a device of this capability runs best, or None.

    A plain architecture ("80") runs on the same major version with at least its minor one. One with the suffix "a"
    runs on exactly its own capability, and one with the suffix "f" on its family, which is the rule of a plain one.
    """
    major, minor = capability
    best, best_key = None, None
    for arch in archs:
        digits, suffix = arch.rstrip("af"), arch.lstrip("0123456789")
        arch_major, arch_minor = int(digits[:-1]), int(digits[-1])
        runs = (arch_major, arch_minor) == (major, minor) or (
            suffix != "a" and arch_major == major and arch_minor <= minor
        )
        key = (arch_minor, suffix == "a", suffix == "f")
        if runs and (best_key is None or key > best_key):
            best, best_key = arch, key
    return best


@lru_cache(maxsize=None)
def library_for(capability: tuple[int, int]) -> tuple[str | None, str]:
    """(built architecture that serves such a device, why there is none). Looked up once per capability."""
    from fla_kda_backend import ops

    library = ops.library()
    if library is None:
        return None, f"no kernels are loaded: {ops.load_error()}"
    arch = arch_for(capability, library.archs)
    if arch is not None:
        return arch, ""
    built = ", ".join(f"sm_{arch}" for arch in library.archs)
    return None, f"the kernels were built for {built} and cannot run on sm_{capability[0]}{capability[1]}"


# --- What can be looked at at all -------------------------------------------------------------------------------------


def inputs_are_tensors(call: Call, dims: None) -> str | None:
    T = torch.Tensor
    state, cu_seqlens, A_log, dt_bias = call.initial_state, call.cu_seqlens, call.A_log, call.dt_bias
    on_host = call.cu_seqlens_cpu
    if (
        isinstance(call.q, T)
        and isinstance(call.k, T)
        and isinstance(call.v, T)
        and isinstance(call.g, T)
        and isinstance(call.beta, T)
        and (state is None or isinstance(state, T))
        and (cu_seqlens is None or isinstance(cu_seqlens, T))
        and (on_host is None or isinstance(on_host, T))
        and (A_log is None or isinstance(A_log, T))
        and (dt_bias is None or isinstance(dt_bias, T))
    ):
        return None
    required, optional = ("q", "k", "v", "g", "beta"), (
        "initial_state", "cu_seqlens", "cu_seqlens_cpu", "A_log", "dt_bias",
    )  # fmt: skip
    values = [(name, getattr(call, name)) for name in required + optional]
    wrong = [name for name, x in values if not isinstance(x, T) and (x is not None or name in required)]
    return f"{', '.join(wrong)}: not a tensor"


def numbers_are_numbers(call: Call, dims: None) -> str | None:
    if not isinstance(call.scale, (float, int)):
        return f"scale is a {type(call.scale).__name__}, not a number"
    if call.lower_bound is not None and not isinstance(call.lower_bound, (float, int)):
        return f"lower_bound is a {type(call.lower_bound).__name__}, not a number"
    if call.chunk_size in FLA_CHUNK_SIZES and type(call.chunk_size) is not int:
        return f"chunk_size is a {type(call.chunk_size).__name__}, not an integer"


def flags_are_flags(call: Call, dims: None) -> str | None:
    """True, False, or the 1, 0 and None that stand for them: an operator takes nothing else for a bool."""
    for name in FLAGS:
        value = getattr(call, name)
        if value is not True and value is not False and value is not None and type(value) is not int:
            return f"{name} is a {type(value).__name__}, not a bool"


def unknown_keywords(call: Call, dims: None) -> str | None:
    if call.unknown:
        return f"not honoured by this FLA version, or unknown here: {', '.join(call.unknown)}"


# --- What FLA itself refuses ------------------------------------------------------------------------------------------


def fla_context_parallel(call: Call, dims: Dims) -> str | None:
    context = call.cp_context
    if context is None:
        return None
    if call.initial_state is not None:
        return "initial_state cannot be used with cp_context"
    if call.output_final_state is not False:
        return "output_final_state cannot be used with cp_context"
    if getattr(context, "cu_seqlens", None) is None:
        return "cp_context has no cu_seqlens"


def fla_varlen(call: Call, dims: Dims) -> str | None:
    cu_seqlens = call.cu_seqlens
    if cu_seqlens is None:
        return None
    if dims.B != 1:
        return f"cu_seqlens needs a batch size of 1, got {dims.B}"
    state, borders = call.initial_state, cu_seqlens.shape[:1]
    if state is not None and not borders:
        return "cu_seqlens has 0 dimensions, and with initial_state its length is needed"
    if state is not None and state.shape[:1] != (borders[0] - 1,):
        return f"initial_state has shape {_shape(state)}, its first size must be that of {borders[0] - 1} sequences"


def fla_state_dtype(call: Call, dims: Dims) -> str | None:
    if call.initial_state is not None and call.initial_state.dtype != torch.float32:
        return f"initial_state is {_name(call.initial_state.dtype)}, not float32"


def fla_gate_parameters(call: Call, dims: Dims) -> str | None:
    if call.use_gate_in_kernel and call.A_log is None and call.lower_bound is None:
        return "use_gate_in_kernel needs A_log or lower_bound"


def fla_chunk_size(call: Call, dims: Dims) -> str | None:
    if call.chunk_size not in FLA_CHUNK_SIZES:
        return f"chunk_size {call.chunk_size} is neither 32 nor 64"


def fla_safe_gate(call: Call, dims: Dims) -> str | None:
    if not (call.safe_gate and call.use_gate_in_kernel):
        return None
    if call.lower_bound is None:
        return "safe_gate with the gate in the kernel needs lower_bound"
    if not SAFE_GATE_BOUND <= call.lower_bound < 0:
        return f"lower_bound {call.lower_bound} is outside [-5, 0)"


def fla_neg_eigval(call: Call, dims: Dims) -> str | None:
    if call.allow_neg_eigval and not call.use_beta_sigmoid_in_kernel:
        return "allow_neg_eigval needs use_beta_sigmoid_in_kernel"


def fla_shapes(call: Call, dims: Dims) -> str | None:
    B, T, H, K, HV, _ = dims
    if call.k.shape != (B, T, H, K):
        return f"k has shape {_shape(call.k)}, q has {_shape(call.q)}"
    if not 0 < K <= FLA_MAX_KEY_DIM:
        return f"head_dim K={K} is outside 1..{FLA_MAX_KEY_DIM}"
    if H == 0 or HV % H:
        return f"HV={HV} value heads are not a multiple of H={H} heads"
    if call.g.shape != (B, T, HV, K):
        return f"g has shape {_shape(call.g)} instead of [{B}, {T}, {HV}, {K}]"
    if call.beta.shape != (B, T, HV):
        return f"beta has shape {_shape(call.beta)} instead of [{B}, {T}, {HV}]"


def fla_graph_sequences(call: Call, dims: Dims) -> str | None:
    if not call.use_graph or call.max_num_seqs is None or call.cu_seqlens is None:
        return None
    if call.cu_seqlens.numel() - 1 != call.max_num_seqs:
        return f"cu_seqlens holds {call.cu_seqlens.numel() - 1} sequences, max_num_seqs is {call.max_num_seqs}"


def fla_intermediate_states(call: Call, dims: Dims) -> str | None:
    if not call.return_intermediate_states:
        return None
    if not torch.is_inference_mode_enabled():
        return "return_intermediate_states is only allowed in inference mode"
    if call.disable_recompute is not False:
        return "return_intermediate_states must be used with disable_recompute=False"


# --- What only FLA understands ----------------------------------------------------------------------------------------


def context_parallel(call: Call, dims: Dims) -> str | None:
    if call.cp_context is not None:
        return "context parallelism (cp_context) is not supported"


def sequences_on_the_host_alone(call: Call, dims: Dims) -> str | None:
    if call.cu_seqlens is None and call.cu_seqlens_cpu is not None:
        return "cu_seqlens_cpu is given without cu_seqlens"


# --- What does not fit together ---------------------------------------------------------------------------------------


def values_fit_queries(call: Call, dims: Dims) -> str | None:
    if call.v.shape != (dims.B, dims.T, dims.HV, dims.V):
        return f"v has shape {_shape(call.v)}, its B and T must be those of q, {_shape(call.q)}"


def sequences_are_well_formed(call: Call, dims: Dims) -> str | None:
    cu_seqlens = call.cu_seqlens
    if cu_seqlens is None:
        return None
    shape = cu_seqlens.shape
    if len(shape) != 1:
        return f"cu_seqlens has {len(shape)} dimensions instead of 1"
    if shape[0] < 2:
        return f"cu_seqlens has {shape[0]} entries, it needs at least 2"
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        return f"cu_seqlens is {_name(cu_seqlens.dtype)}, neither int32 nor int64"
    if cu_seqlens.device != call.q.device:
        return f"cu_seqlens is on {cu_seqlens.device}, q is on {call.q.device}"
    on_host = call.cu_seqlens_cpu
    if on_host is not None and on_host.shape != shape:
        return f"cu_seqlens_cpu and cu_seqlens differ in shape, {_shape(on_host)} and {_shape(cu_seqlens)}"


def state_fits(call: Call, dims: Dims) -> str | None:
    state = call.initial_state
    if state is None:
        return None
    B, _, _, K, HV, V = dims
    sequences = B if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    expected = (sequences, HV, V, K) if call.state_v_first else (sequences, HV, K, V)
    if state.shape != expected:
        return f"initial_state has shape {_shape(state)} instead of {list(expected)}"


def gate_parameters_fit(call: Call, dims: Dims) -> str | None:
    A_log, dt_bias = call.A_log, call.dt_bias
    if A_log is not None and A_log.numel() != dims.HV:
        return f"A_log has {A_log.numel()} values instead of HV={dims.HV}"
    if dt_bias is not None and dt_bias.numel() != dims.HV * dims.K:
        return f"dt_bias has {dt_bias.numel()} values instead of HV*K={dims.HV * dims.K}"


def one_device(call: Call, dims: Dims) -> str | None:
    device = call.q.device
    if call.k.device == call.v.device == call.g.device == call.beta.device == device:
        state, A_log, dt_bias = call.initial_state, call.A_log, call.dt_bias
        if (
            (state is None or state.device == device)
            and (A_log is None or A_log.device == device)
            and (dt_bias is None or dt_bias.device == device)
        ):
            return None
    for name in ("k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"):
        tensor = getattr(call, name)
        if tensor is not None and tensor.device != device:
            return f"{name} is on {tensor.device}, q is on {device}"


# --- What the path of the device does not do --------------------------------------------------------------------------


def cpu_dtypes(call: Call, dims: Dims) -> str | None:
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias"):
        tensor = getattr(call, name)
        if tensor is not None and not tensor.is_floating_point():
            return f"{name} is {_name(tensor.dtype)}, not a floating-point tensor"


def cpu_sequence_values(call: Call, dims: Dims) -> str | None:
    """Only for CPU tensors, whose values can be read without waiting for a device."""
    if call.cu_seqlens is None:
        return None
    borders, T = call.cu_seqlens.tolist(), dims.T
    if borders[0] != 0:
        return f"cu_seqlens starts at {borders[0]} instead of 0"
    for index, (start, end) in enumerate(zip(borders, borders[1:])):
        if end < start:
            return f"cu_seqlens decreases from {start} to {end} at entry {index + 1}"
    if borders[-1] > T:
        return f"cu_seqlens ends at {borders[-1]}, beyond T={T}"
    on_host = call.cu_seqlens_cpu
    if on_host is not None and on_host.device.type != "cpu":
        return f"cu_seqlens_cpu is on {on_host.device}"
    if on_host is not None and on_host.tolist() != borders:
        return "cu_seqlens_cpu and cu_seqlens differ in their values"


def cuda_plain_tensors(call: Call, dims: Dims) -> str | None:
    for tensor in (call.q, call.k, call.v, call.g, call.beta):
        kind = type(tensor)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            return f"tensors of type {kind.__name__} are not supported"


def cuda_gradients(call: Call, dims: Dims) -> str | None:
    if not torch.is_grad_enabled():  # off under no_grad and under inference_mode
        return None
    state, A_log, dt_bias = call.initial_state, call.A_log, call.dt_bias
    if (
        call.q.requires_grad
        or call.k.requires_grad
        or call.v.requires_grad
        or call.g.requires_grad
        or call.beta.requires_grad
        or (state is not None and state.requires_grad)
        or (A_log is not None and A_log.requires_grad)
        or (dt_bias is not None and dt_bias.requires_grad)
    ):
        return "gradients are needed, and the CUDA path has no backward yet"


def cuda_head_dim(call: Call, dims: Dims) -> str | None:
    K, V = dims.K, dims.V
    if K != CUDA_HEAD_DIM:
        return f"head_dim K={K} is not supported ({CUDA_HEAD_DIM})"
    if V != CUDA_HEAD_DIM:
        return f"head_dim V={V} is not supported ({CUDA_HEAD_DIM})"


def cuda_has_heads(call: Call, dims: Dims) -> str | None:
    if dims.B == 0 or dims.HV == 0:
        return f"a call with B={dims.B} and HV={dims.HV} has nothing to compute"


def cuda_dtypes(call: Call, dims: Dims) -> str | None:
    bf16, fp32 = torch.bfloat16, torch.float32
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        if tensor.dtype is not bf16:
            return f"{name} is {_name(tensor.dtype)}, not bfloat16"
    for name, tensor in (("g", call.g), ("beta", call.beta)):
        dtype = tensor.dtype
        if dtype is not bf16 and dtype is not fp32:
            return f"{name} is {_name(dtype)}, neither bfloat16 nor float32"
    for name, tensor in (("A_log", call.A_log), ("dt_bias", call.dt_bias)):
        if tensor is not None and not tensor.is_floating_point():
            return f"{name} is {_name(tensor.dtype)}, not a floating-point tensor"


def cuda_lower_bound(call: Call, dims: Dims) -> str | None:
    if call.use_gate_in_kernel and call.lower_bound is not None and not SAFE_GATE_BOUND <= call.lower_bound < 0:
        return f"lower_bound {call.lower_bound} is outside [-5, 0)"


def cuda_sizes(call: Call, dims: Dims) -> str | None:
    sequences = dims.B if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    if sequences * dims.HV >= MAX_SEQUENCES_TIMES_HEADS:
        return f"{sequences} sequences of HV={dims.HV} heads are more than one launch can hold"


def cuda_results(call: Call, dims: Dims) -> str | None:
    if call.return_intermediate_states:
        return "return_intermediate_states is not supported on CUDA yet"


READABLE = (inputs_are_tensors, numbers_are_numbers, flags_are_flags, unknown_keywords)
CUDA_DOES_NOT = (
    cuda_gradients,
    cuda_plain_tensors,
    cuda_head_dim,
    cuda_has_heads,
    cuda_dtypes,
    cuda_lower_bound,
    cuda_results,
)
FLA_REFUSES = (
    fla_context_parallel,
    fla_varlen,
    fla_state_dtype,
    fla_gate_parameters,
    fla_chunk_size,
    fla_safe_gate,
    fla_neg_eigval,
    fla_shapes,
)
# Checked by FLA after its kernels have run, which on CPU tensors they never do.
FLA_REFUSES_LATE = (fla_graph_sequences, fla_intermediate_states)
NOT_OURS = (context_parallel, sequences_on_the_host_alone)
MALFORMED = (values_fit_queries, sequences_are_well_formed, state_fits, gate_parameters_fit, one_device)
CUDA_CANNOT_HOLD = (cuda_sizes,)
CPU_DOES_NOT = (cpu_dtypes, cpu_sequence_values)

# Rules that `usual_sizes` answers for: a change of one of them is a change there, too. Every other rule, so every
# new one, is asked after it.
_COVERED = frozenset({
    inputs_are_tensors, numbers_are_numbers, flags_are_flags, unknown_keywords, cuda_plain_tensors, cuda_head_dim,
    cuda_has_heads, cuda_dtypes, cuda_lower_bound, cuda_results, fla_context_parallel, fla_varlen, fla_state_dtype,
    fla_gate_parameters, fla_chunk_size, fla_safe_gate, fla_neg_eigval, fla_shapes, context_parallel,
    sequences_on_the_host_alone, values_fit_queries, sequences_are_well_formed, state_fits, gate_parameters_fit,
    one_device, fla_graph_sequences, fla_intermediate_states, cuda_sizes,
})  # fmt: skip
_not_covered = tuple(
    rule
    for rules in (READABLE, CUDA_DOES_NOT, FLA_REFUSES, NOT_OURS, MALFORMED, FLA_REFUSES_LATE, CUDA_CANNOT_HOLD)
    for rule in rules
    if rule not in _COVERED
)

_REFERENCE = Decision("reference")


@lru_cache(maxsize=64)
def _cuda_decision(arch: str, forced: str) -> Decision:
    """Which kernel runs a call that the rules let through, on the built architecture of its device.

    The Hopper kernel is the faster one wherever it runs. `forced` is the value of `FLA_KDA_FORCE`, "" for none.
    """
    if forced == "":
        return Decision("hopper" if arch == HOPPER_ARCH else "portable", arch=arch)
    if forced == "portable" or (forced == "hopper" and arch == HOPPER_ARCH):
        return Decision(forced, arch=arch)
    if forced == "hopper":
        return Decision("triton", f"FLA_KDA_FORCE=hopper, but sm_{arch} has the portable kernel alone")
    if forced == "triton":
        return Decision("triton", "FLA_KDA_FORCE=triton")
    return Decision("triton", f"FLA_KDA_FORCE={forced} is none of {', '.join(CUDA_PATHS)}, triton")


def usual_sizes(call: Call) -> Dims | None:
    """The sizes of a call of the usual kind, which no rule of `_COVERED` stops on a GPU; None says nothing of one.

    None is also the answer to calls that are merely rare, such as those with flags that are no bools.
    """
    if not _options_are_usual(call):
        return None
    q, k, v, g, beta, state = call.q, call.k, call.v, call.g, call.beta, call.initial_state
    A_log, dt_bias, cu_seqlens = call.A_log, call.dt_bias, call.cu_seqlens
    Tensor, bf16, fp32 = torch.Tensor, torch.bfloat16, torch.float32
    for tensor in (q, k, v, g, beta):
        if type(tensor) is not Tensor:
            return None
    for tensor in (state, A_log, dt_bias, cu_seqlens):
        if tensor is not None and not isinstance(tensor, Tensor):
            return None
    q_shape, v_shape, device = q.shape, v.shape, q.device
    if len(q_shape) != 4 or len(v_shape) != 4:
        return None
    (B, T, H, K), (_, _, HV, V), N = q_shape, v_shape, q_shape[0]
    if cu_seqlens is not None:
        borders = cu_seqlens.shape
        if (
            B != 1
            or len(borders) != 1
            or cu_seqlens.dtype not in (torch.int32, torch.int64)
            or cu_seqlens.device != device
        ):
            return None
        N = borders[0] - 1
    if (
        K == V == CUDA_HEAD_DIM
        and 0 < N * HV < MAX_SEQUENCES_TIMES_HEADS
        and H > 0
        and HV % H == 0
        and k.shape == q_shape
        and v_shape == (B, T, HV, V)
        and g.shape == (B, T, HV, K)
        and beta.shape == (B, T, HV)
        and q.dtype is bf16
        and k.dtype is bf16
        and v.dtype is bf16
        and g.dtype in (bf16, fp32)
        and beta.dtype in (bf16, fp32)
        and k.device == v.device == g.device == beta.device == device
        # K and V are the same, so that the two layouts of a state have one shape.
        and (state is None or (state.shape == (N, HV, K, V) and state.dtype is fp32 and state.device == device))
        and (A_log is None or (A_log.numel() == HV and A_log.dtype.is_floating_point and A_log.device == device))
        and (
            dt_bias is None
            or (dt_bias.numel() == HV * K and dt_bias.dtype.is_floating_point and dt_bias.device == device)
        )
    ):
        return tuple.__new__(Dims, (B, T, H, K, HV, V))
    return None


def _options_are_usual(call: Call) -> bool:
    """The part of `usual_sizes` that looks at no tensor."""
    for flag in _flags(call):
        if flag is not True and flag is not False:
            return False
    lower_bound = call.lower_bound
    if lower_bound is None:
        bound_is_right = not call.use_gate_in_kernel or (call.A_log is not None and not call.safe_gate)
    else:
        bound_is_right = isinstance(lower_bound, (float, int)) and SAFE_GATE_BOUND <= lower_bound < 0
    return (
        bound_is_right
        and isinstance(call.scale, (float, int))
        and type(call.chunk_size) is int
        and call.chunk_size in FLA_CHUNK_SIZES
        and (call.use_beta_sigmoid_in_kernel or not call.allow_neg_eigval)
        and not call.return_intermediate_states
        and not call.use_graph
        and call.cp_context is None
        and call.cu_seqlens_cpu is None
        and not call.unknown
    )


def decide(call: Call) -> Decision:
    """Decide which path serves `call`. Pure: nothing is computed, logged or read from a GPU."""
    dims = usual_sizes(call)
    if dims is not None and _first(_not_covered, call, dims) is None:
        device = device_facts(call.q.device)
        if device.kind == "cuda":
            arch, reason = library_for(device.capability)
            if arch is None:
                return Decision("triton", reason)
            return _cuda_decision(arch, switches.forced_path())
    reason = _first(READABLE, call, None)
    if reason is not None:
        return Decision("triton", reason)
    dims = Dims.of(call)
    if dims is None:
        return Decision("triton", _wrong_dimensions(call))
    device = device_facts(call.q.device)
    if device.kind == "cuda":
        return _decide_cuda(call, dims, device)
    if device.kind == "cpu":
        return _decide_cpu(call, dims)
    return Decision("triton", f"tensors on a {device.kind} device are not supported")


def _decide_cuda(call: Call, dims: Dims, device: DeviceFacts) -> Decision:
    arch, reason = library_for(device.capability)
    if arch is None:
        return Decision("triton", reason)
    for rules in (CUDA_DOES_NOT, FLA_REFUSES, NOT_OURS, MALFORMED, FLA_REFUSES_LATE, CUDA_CANNOT_HOLD):
        reason = _first(rules, call, dims)
        if reason is not None:
            return Decision("triton", reason)
    return _cuda_decision(arch, switches.forced_path())


def _decide_cpu(call: Call, dims: Dims) -> Decision:
    for rules, error in (
        (FLA_REFUSES, None),
        (NOT_OURS, None),
        (MALFORMED, ValueError),
        (FLA_REFUSES_LATE, AssertionError),
        (CPU_DOES_NOT, ValueError),
    ):
        reason = _first(rules, call, dims)
        if reason is not None:
            return Decision("triton", reason, error=error)
    return _REFERENCE


def fla_refuses(call: Call) -> bool:
    """Whether FLA's own checks refuse `call`, so that it raises its own error and runs nothing."""
    if _first(READABLE, call, None) is not None:
        return False
    dims = Dims.of(call)
    return dims is None or any(_first(rules, call, dims) for rules in (FLA_REFUSES, FLA_REFUSES_LATE))


def _first(rules: tuple[Callable[[Call, Dims], str | None], ...], call: Call, dims: Dims | None) -> str | None:
    for rule in rules:
        reason = rule(call, dims)
        if reason is not None:
            return reason
    return None


def _wrong_dimensions(call: Call) -> str:
    return f"q has {call.q.dim()} and v {call.v.dim()} dimensions instead of 4"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)
