"""What is the right answer? The KDA recurrence in float64, token by token: the judge of every other path.

    S <- diag(exp(g_t)) S                    decay, per key channel, g_t in log space
    u  = beta_t (v_t - S^T k_t)              delta rule
    S <- S + k_t u^T
    o_t = scale S^T q_t

per value head, with a state S of K x V. Source: Kimi Linear (arXiv:2510.26692), the recurrent form of Kimi Delta
Attention. Nothing here is chunked, rescaled or approximated.
"""

from __future__ import annotations

import torch

from .gates import l2_normalise, log_decay, step_size
from .layout import sequence_bounds


def recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence above in float64, on the device of the inputs; differentiable by plain autograd.

    Autograd keeps every state: 8 * HV * K * V bytes a token and sequence. Judge long inputs under `torch.no_grad()`.

    The arguments are those of `fla.ops.kda.chunk_kda`; any float dtype. Value head `hv` reads query/key head
    `hv // (HV // H)`.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        g: `[B, T, HV, K]`; log-decay, or the raw gate with `use_gate_in_kernel`.
        beta: `[B, T, HV]`; or logits with `use_beta_sigmoid_in_kernel`.
        A_log: HV elements, any shape. dt_bias: HV * K elements, any shape.
        scale: of the queries; `K ** -0.5` when None.
        initial_state: `[N, HV, K, V]` (`[N, HV, V, K]` with `state_v_first`) for N sequences, N = B without
            `cu_seqlens`.
        cu_seqlens: `[N + 1]`, any integer dtype, B = 1.

    Returns:
        o `[B, T, HV, V]` float64, zero in rows that no sequence covers, and the final state (float64, in the layout of
        `initial_state`) or None without `output_final_state`.

    Raises:
        ValueError: malformed `cu_seqlens`, see `layout.sequence_bounds`.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    starts, lengths = sequence_bounds(cu_seqlens, B, T)
    N = len(lengths)

    # Longest sequence first: the sequences still running at step t are then a prefix, `running[t]` long.
    order = sorted(range(N), key=lambda n: -lengths[n])
    start = torch.tensor([starts[n] for n in order], dtype=torch.long, device=q.device)
    length = torch.tensor([lengths[n] for n in order], dtype=torch.long, device=q.device)
    step = torch.arange(max(lengths, default=0), device=q.device)[:, None]
    is_running = step < length
    rows = (start + step)[is_running]  # of step 0, then of step 1, ...
    running = is_running.sum(1).tolist()

    # Rows outside every sequence are dropped here, before any arithmetic: whatever they hold cannot reach a result.
    q, k, v, g, beta = (x.flatten(0, 1).index_select(0, rows).double() for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = l2_normalise(q), l2_normalise(k)
    q, k = (x.repeat_interleave(HV // H, dim=1) for x in (scale * q, k))
    decay = log_decay(g, A_log, dt_bias, use_gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound).exp()
    beta = step_size(beta, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval)

    if initial_state is None:
        S = torch.zeros(N, HV, K, V, dtype=torch.float64, device=start.device)
    else:
        S = initial_state.double()[order]
        S = S.transpose(-1, -2) if state_v_first else S

    outputs, finished = [], []
    for q_t, k_t, v_t, decay_t, beta_t in zip(*(x.split(running) for x in (q, k, v, decay, beta))):
        if len(v_t) < len(S):
            finished.append(S[len(v_t):])
            S = S[:len(v_t)]
        S = decay_t[..., None] * S
        u = beta_t[..., None] * (v_t - (k_t[..., None, :] @ S).squeeze(-2))
        S = S + k_t[..., None] * u[..., None, :]
        outputs.append((q_t[..., None, :] @ S).squeeze(-2))

    o = torch.zeros(B * T, HV, V, dtype=torch.float64, device=start.device)
    if outputs:
        o = o.index_copy(0, rows, torch.cat(outputs))
    final_state = None
    if output_final_state:
        back = torch.tensor(order, dtype=torch.long, device=start.device).argsort()
        final_state = torch.cat([S, *reversed(finished)])[back]
        final_state = final_state.transpose(-1, -2).contiguous() if state_v_first else final_state
    return o.view(B, T, HV, V), final_state
