"""How does `fused_recurrent_kda` (decode, short prefill) run on a CPU?

The recurrence of `recurrence.py` in float32, one token of all running sequences at a time, behind the contract of the
inner function that FLA 0.6.0 lets a backend replace, `fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd`: states
updated in place, written to slots of a pool (continuous batching), or returned. Like FLA's, it has no gradient.
"""

from __future__ import annotations

import torch

from .gates import l2_normalise, log_decay, step_size
from .layout import sequence_bounds


def declines_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: torch.Tensor | None = None,
    **unknown,
) -> str | None:
    """Why `fused_recurrent_kda_fwd` below does not serve this call, in one clause; None when it does.

    Takes the arguments of that function. Never raises for tensors; reads the values of `cu_seqlens`,
    `ssm_state_indices` and `num_accepted_tokens` only once everything is known to be on the CPU.
    """
    if unknown:
        return f"unknown argument {', '.join(sorted(unknown))}"
    tensors = {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias,
        "initial_state": initial_state, "cu_seqlens": cu_seqlens, "ssm_state_indices": ssm_state_indices,
        "num_accepted_tokens": num_accepted_tokens, "out": out,
    }  # fmt: skip
    integers = ("cu_seqlens", "ssm_state_indices", "num_accepted_tokens")
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            return f"{name} is not a tensor"
        if x.device.type != "cpu":
            return f"{name} is on {x.device}, not on the CPU"
        if name in integers and x.dtype not in (torch.int32, torch.int64):
            return f"{name} is {x.dtype}, not int32 or int64"
        if name not in integers and not x.is_floating_point():
            return f"{name} is {x.dtype}, not a float"
    return (
        _declines_shapes(q, k, v, g, beta, A_log, dt_bias, out, use_gate_in_kernel, lower_bound)
        or _declines_sequences(q, cu_seqlens)
        or _declines_states(
            q, v, initial_state, inplace_final_state, output_final_state, state_v_first, cu_seqlens,
            ssm_state_indices, num_accepted_tokens,
        )
    )  # fmt: skip


def _declines_shapes(q, k, v, g, beta, A_log, dt_bias, out, use_gate_in_kernel, lower_bound) -> str | None:
    if q.ndim != 4 or v.ndim != 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        return "q, k, v do not fit [B, T, H, K], [B, T, H, K], [B, T, HV, V]"
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    if H == 0 or HV % H:
        return f"{HV} value heads are no multiple of {H} query heads"
    if g.shape != (B, T, HV, K):
        return "g does not fit [B, T, HV, K]"
    if beta.shape not in ((B, T, HV), (B, T, HV, V)):
        return "beta does not fit [B, T, HV] or [B, T, HV, V]"
    if use_gate_in_kernel:
        if A_log is None and lower_bound is None:
            return "a softplus gate in the kernel without A_log"
        if A_log is not None and A_log.numel() != HV:
            return f"A_log has {A_log.numel()} elements, not HV = {HV}"
        if dt_bias is not None and dt_bias.numel() != HV * K:
            return f"dt_bias has {dt_bias.numel()} elements, not HV * K = {HV * K}"
    if out is not None and out.shape != v.shape:
        return "out does not have the shape of v"
    return None


def _declines_sequences(q, cu_seqlens) -> str | None:
    try:
        sequence_bounds(cu_seqlens, *q.shape[:2])
    except ValueError as error:
        return str(error)
    return None


def _declines_states(
    q, v, initial_state, inplace_final_state, output_final_state, state_v_first, cu_seqlens, ssm_state_indices,
    num_accepted_tokens,
) -> str | None:  # fmt: skip
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    lengths = sequence_bounds(cu_seqlens, B, T)[1]
    N, longest = len(lengths), max(lengths, default=0)
    if initial_state is None:
        if inplace_final_state:
            return "a state to update in place, but no initial_state"
    elif tuple(initial_state.shape[1:]) != ((HV, V, K) if state_v_first else (HV, K, V)):
        return f"initial_state of shape {list(initial_state.shape)}"
    elif ssm_state_indices is None and initial_state.shape[0] != N:
        return f"{initial_state.shape[0]} initial states for {N} sequences"
    if ssm_state_indices is None:
        return None

    if ssm_state_indices.ndim not in (1, 2) or ssm_state_indices.shape[0] < N:
        return f"ssm_state_indices of shape {list(ssm_state_indices.shape)} for {N} sequences"
    slots = _slots_by_token(ssm_state_indices)[:N]
    if slots.shape[1] < longest:
        return f"{slots.shape[1]} state indices a sequence for {longest} tokens"
    if slots.shape[1] > 1 and slots.stride(1) != 1:
        return "ssm_state_indices whose last dimension is not contiguous"
    length = torch.tensor(lengths, dtype=torch.long)
    token = torch.arange(slots.shape[1])
    is_used = token < length[:, None]
    if num_accepted_tokens is not None:
        if num_accepted_tokens.ndim != 1 or len(num_accepted_tokens) < N:
            return f"num_accepted_tokens of shape {list(num_accepted_tokens.shape)} for {N} sequences"
        accepted = num_accepted_tokens[:N]
        if bool(((accepted < 1) | (accepted > slots.shape[1]))[length > 0].any()):
            return f"num_accepted_tokens outside 1..{slots.shape[1]}"
        is_used = is_used | ((token == accepted[:, None] - 1) & (length > 0)[:, None])
    if initial_state is not None and bool(((slots < 0) | (slots >= len(initial_state)))[is_used].any()):
        return f"ssm_state_indices outside the {len(initial_state)} states"
    if not inplace_final_state:
        if not output_final_state:
            return "ssm_state_indices with nowhere to store states"
        if sum(lengths) > N:
            return "states of every token asked for, with room for one a sequence"
    return None


@torch.no_grad()
def fused_recurrent_kda_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: torch.Tensor | None = None,
    **unknown,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FLA 0.6.0's inner decode function for CPU tensors: same arguments, order, defaults and results.

    Args (beyond those of `recurrence.recurrent_kda`):
        beta: `[B, T, HV]`, or one step size per value channel, `[B, T, HV, V]`.
        initial_state: any float dtype; N states, or a pool of states with `ssm_state_indices`.
        inplace_final_state: write final states into `initial_state` (the default, as in FLA); else a new float32 tensor
            with `output_final_state`.
        ssm_state_indices: `[N]` or `[N, tokens]`, slots of the pool. Sequence n starts from slot `[n, 0]`, or
            `[n, num_accepted_tokens[n] - 1]`, and the state after its token i goes to slot `[n, i]` (not in place: to
            the row of that token in the returned states). Sequences without tokens touch nothing.
        num_accepted_tokens: `[N]`, with `ssm_state_indices`.
        out: written with the outputs when given, `[B, T, HV, V]`; only rows that a sequence covers.

    Returns:
        o in v's dtype (or `out`), zero in rows that no sequence covers, and the states: `initial_state` itself when
        updated in place, a new float32 `[N, HV, K, V]` (V-first: `[N, HV, V, K]`) with `output_final_state`, else
        None.

    Raises:
        ValueError: with the reason of `declines_decode`.
    """
    reason = declines_decode(
        q, k, v, g, beta, A_log, dt_bias, initial_state, scale, output_final_state, inplace_final_state,
        state_v_first, cu_seqlens, ssm_state_indices, num_accepted_tokens, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, out, **unknown,
    )  # fmt: skip
    if reason is not None:
        raise ValueError(f"fused_recurrent_kda_fwd on the CPU does not serve this call: {reason}.")

    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    starts, lengths = sequence_bounds(cu_seqlens, B, T)
    N = len(lengths)
    start, length = torch.tensor(starts, dtype=torch.long), torch.tensor(lengths, dtype=torch.long)

    out = torch.zeros_like(v) if out is None else out
    states = None
    if inplace_final_state:
        states = initial_state
    elif output_final_state:
        states = q.new_zeros((N, HV, V, K) if state_v_first else (N, HV, K, V), dtype=torch.float32)

    slots = None
    first = torch.arange(N)  # where each sequence's initial state is
    if ssm_state_indices is not None:
        has_tokens = length > 0  # the others own no slot
        start, length = start[has_tokens], length[has_tokens]
        slots = _slots_by_token(ssm_state_indices)[:N][has_tokens].long()
        first = slots[:, 0]
        if num_accepted_tokens is not None:
            first = slots.gather(1, num_accepted_tokens[:N][has_tokens, None].long() - 1).squeeze(1)
    if initial_state is None:
        S = q.new_zeros((len(length), HV, K, V), dtype=dtype)
    else:
        S = _transposed(initial_state[first].to(dtype), state_v_first)

    for t in range(max(lengths, default=0)):
        n = (length > t).nonzero().flatten()  # the sequences with a token t
        row = start[n] + t
        b_t = torch.div(row, T, rounding_mode="floor"), row % T
        q_t, k_t, v_t, g_t, beta_t = (x[b_t].to(dtype) for x in (q, k, v, g, beta))
        if use_qk_l2norm_in_kernel:
            q_t, k_t = l2_normalise(q_t), l2_normalise(k_t)
        q_t, k_t = (x.repeat_interleave(HV // H, dim=1) for x in (scale * q_t, k_t))
        g_t = log_decay(g_t, A_log, dt_bias, use_gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound)
        beta_t = step_size(
            beta_t, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval
        )
        beta_t = beta_t if beta_t.ndim == v_t.ndim else beta_t[..., None]

        S_t = S[n] * g_t.exp()[..., None]
        u = beta_t * (v_t - (k_t[..., None, :] @ S_t).squeeze(-2))
        S_t += k_t[..., None] * u[..., None, :]
        S[n] = S_t
        out[b_t] = (q_t[..., None, :] @ S_t).squeeze(-2).to(out.dtype)
        if slots is not None:
            states[slots[n, t] if inplace_final_state else row] = _transposed(S_t, state_v_first).to(states.dtype)

    if slots is None and states is not None:
        states.copy_(_transposed(S, state_v_first))
    return out, states


def _slots_by_token(ssm_state_indices: torch.Tensor) -> torch.Tensor:
    return ssm_state_indices if ssm_state_indices.ndim == 2 else ssm_state_indices[:, None]


def _transposed(states: torch.Tensor, state_v_first: bool) -> torch.Tensor:
    return states.transpose(-1, -2) if state_v_first else states
