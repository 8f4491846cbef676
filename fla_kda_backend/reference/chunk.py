"""How does chunked KDA run on a CPU, differentiably and exactly for any gates?

Per chunk of C tokens of one value head, state S (K x V) coming in, with G_i the sum of log-decays from the chunk's
start to token i (Kimi Linear, arXiv:2510.26692, the chunkwise form):

    Qd = scale q exp(G_i)     Kd = k exp(G_i)     Kr = k exp(G_last - G_i)
    L  = beta_i sum_d k_i k_j exp(G_i - G_j), i > j        P = scale sum_d q_i k_j exp(G_i - G_j), i >= j
    U  = (I + L)^-1 beta (V - Kd S)
    O  = Qd S + P U
    S <- diag(exp(G_last)) S + Kr^T U

No exponent is ever positive and none is a difference of two sums, so that no gate, not even -inf, overflows, cancels or
meets a 0 * inf, in the forward or the backward pass: `_decayed_products` halves the chunk over and over, and a pair
(i, j) that a border separates decays by exp(border..i) exp(j..border), both plain sums of log-decays and both at most
1. Rows that do not exist (a chunk's tail) are replaced by zeros before any arithmetic, never multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .gates import l2_normalise, log_decay, step_size
from .layout import sequence_bounds

if TYPE_CHECKING:
    from ..call import Call

# Intra-chunk work covers as many chunks at once as hold about this many elements of k: enough to fill the vector units,
# small enough to stay in a cache of a few MiB.
_GROUP_ELEMENTS = 1 << 20


def chunk_kda(call: Call, *, state_dtype: torch.dtype = torch.float32) -> tuple:
    """Chunked KDA in plain PyTorch for one normalised `chunk_kda` call; the graph for autograd is torch's own.

    Computes in float32, or in float64 when q, k or v is float64. `call.cp_context` must be None; `use_graph`,
    `max_num_seqs`, `safe_gate` and `cu_seqlens_cpu` change nothing here.

    Args:
        call: q, k `[B, T, H, K]`; v `[B, T, HV, V]`; g `[B, T, HV, K]`; beta `[B, T, HV]`; `A_log` HV elements or None;
            `dt_bias` HV * K elements or None; `initial_state` `[N, HV, K, V]` (V-first: `[N, HV, V, K]`) or None;
            `cu_seqlens` `[N + 1]` of any integer dtype or None. Any float dtypes, strides, K and V. Never written to.
        state_dtype: dtype of the final state; float32 is FLA's contract.

    Returns:
        `(o, final_state)`, or `(o, final_state, h)` with `call.return_intermediate_states`: o `[B, T, HV, V]` in q's
        dtype, zero in rows that no sequence covers; the final state in the layout of `initial_state`, or None without
        `call.output_final_state`; h `[B, NT, HV, K, V]` (V-first: last two swapped) in k's dtype, the state entering
        each chunk of `call.chunk_size` tokens, sequence after sequence.

    Raises:
        AssertionError: `return_intermediate_states` outside `torch.inference_mode()` or with `disable_recompute`.
        ValueError: malformed `cu_seqlens`, see `layout.sequence_bounds`.
    """
    if call.return_intermediate_states:
        assert torch.is_inference_mode_enabled(), "return_intermediate_states is only allowed in inference mode"
        assert not call.disable_recompute, "return_intermediate_states must be used with disable_recompute=False"

    B, T, H, K = call.q.shape
    HV, V = call.v.shape[2:]
    layout = _ChunkLayout(*sequence_bounds(call.cu_seqlens, B, T), call.chunk_size, call.q.device)
    float64 = torch.float64 in (call.q.dtype, call.k.dtype, call.v.dtype)
    dtype = torch.float64 if float64 else torch.float32

    N = layout.num_sequences
    if call.initial_state is None:
        S = torch.zeros(N, HV, K, V, dtype=dtype, device=call.q.device)
    else:
        S = call.initial_state.to(dtype).index_select(0, layout.order)
        S = S.transpose(-1, -2).contiguous() if call.state_v_first else S

    outputs, entering, finished = [], [], []
    for Q, Kd, Kr, V_, Tb, P, decay in _chunk_factors(call, layout, dtype):
        n = len(V_)
        if n < len(S):
            finished.append(S[n:])
            S = S[:n]
        if call.return_intermediate_states:
            entering.append(S.to(call.k.dtype))
        C = V_.shape[-2]
        from_state = torch.cat((Q, Kd), -2) @ S
        U = Tb @ (V_ - from_state[..., C:, :])
        outputs.append((from_state[..., :C, :] + P @ U).to(call.q.dtype))
        S = decay[..., None] * S + Kr.transpose(-1, -2) @ U

    o = layout.scatter(outputs, call.q.new_zeros(B * T, HV, V)).view(B, T, HV, V)
    final_state = None
    if call.output_final_state:
        final_state = torch.cat([S, *reversed(finished)]).index_select(0, layout.order.argsort()).to(state_dtype)
        final_state = final_state.transpose(-1, -2).contiguous() if call.state_v_first else final_state
    if not call.return_intermediate_states:
        return o, final_state

    h = torch.cat(entering) if entering else S.new_empty((0, HV, K, V), dtype=call.k.dtype)
    h = h.index_select(0, layout.chunks_by_sequence())
    h = h.transpose(-1, -2).contiguous() if call.state_v_first else h
    return o, final_state, h.unflatten(0, (B, -1)) if len(h) else h.reshape(B, 0, *h.shape[1:])


class _ChunkLayout:
    """Chunks of all sequences in the order of the recurrence: the first chunk of every sequence, then the second, ...

    Sequences are sorted by falling length (`order`), so that those with a chunk at step s are the first `running[s]`.
    The chunk length is `chunk_size`, or the power of two that covers the longest sequence if that is shorter.
    """

    def __init__(self, starts: list[int], lengths: list[int], chunk_size: int, device: torch.device):
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        longest = max(lengths, default=0)
        self.num_sequences = len(lengths)
        self.chunk = min(chunk_size, 1 << max(longest - 1, 0).bit_length())
        self.order = torch.tensor(order, dtype=torch.long, device=device)
        start = torch.tensor(starts, dtype=torch.long, device=device)[self.order]
        end = start + torch.tensor(lengths, dtype=torch.long, device=device)[self.order]

        step = torch.arange(-(-longest // self.chunk), device=device)[:, None]
        is_running = start + step * self.chunk < end  # [steps, N]
        self.running = is_running.sum(1).tolist()
        self._step, self._sorted_sequence = is_running.nonzero(as_tuple=True)
        rows = (start + step * self.chunk)[is_running][:, None] + torch.arange(self.chunk, device=device)
        self.exists = rows < end[self._sorted_sequence][:, None]  # [chunks, C]
        self._is_full = bool(self.exists.all())
        self._rows = torch.where(self.exists, rows, 0).flatten()

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, ...]` to `[chunks, C, ...]`, rows that do not exist being zero."""
        x = x.flatten(0, 1)
        return self.keep_existing(x.index_select(0, self._rows).unflatten(0, (-1, self.chunk)), self.exists)

    def keep_existing(self, x: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
        """Select zero in the rows of `[chunks, C, ...]` where `exists` (`[chunks, C]`) is false."""
        if self._is_full:
            return x
        return torch.where(exists.view(*exists.shape, *[1] * (x.ndim - 2)), x, 0)

    def groups(self, per_chunk: int) -> list[list[int]]:
        """`running`, cut into runs of consecutive steps with about `_GROUP_ELEMENTS` elements in each."""
        groups, chunks = [], 0
        for n in self.running:
            if not groups or (chunks + n) * per_chunk > _GROUP_ELEMENTS:
                groups.append([])
                chunks = 0
            groups[-1].append(n)
            chunks += n
        return groups

    def scatter(self, outputs: list[torch.Tensor], into: torch.Tensor) -> torch.Tensor:
        """Per step `[n, HV, C, V]` to rows of `into` (`[B * T, HV, V]`); rows of no sequence keep what `into` has."""
        if not outputs:
            return into
        rows = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
        if self._is_full:
            return into.index_copy(0, self._rows, rows)
        exists = self.exists.flatten()
        return into.index_copy(0, self._rows[exists], rows[exists])

    def chunks_by_sequence(self) -> torch.Tensor:
        """The permutation that puts the chunks in the caller's order: by sequence, then by step."""
        return (self.order[self._sorted_sequence] * (len(self.running) + 1) + self._step).argsort()


def _chunk_factors(call: Call, layout: _ChunkLayout, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield, step by step, what the recurrence over chunks needs, each `[n, HV, ...]` for the n sequences running:

    Qd, Kd, Kr `[C, K]`; V `[C, V]`; (I + L)^-1 diag(beta), P `[C, C]`; exp(G_last) `[K]`.
    """
    H, K = call.q.shape[2:]
    HV = call.v.shape[2]
    groups = layout.groups(per_chunk=layout.chunk * HV * K)
    sizes = [sum(group) for group in groups]
    inputs = (*(layout.gather(x) for x in (call.q, call.k, call.v, call.g, call.beta)), layout.exists)
    for group, *tensors, exists in zip(groups, *(x.split(sizes) for x in inputs)):
        q, k, v, g, beta = (x.to(dtype) for x in tensors)
        if call.use_qk_l2norm_in_kernel:
            q, k = l2_normalise(q), l2_normalise(k)
        g = log_decay(
            g, call.A_log, call.dt_bias, use_gate_in_kernel=call.use_gate_in_kernel, lower_bound=call.lower_bound
        )
        g = layout.keep_existing(g, exists)  # the activation of a zero is not zero
        beta = step_size(
            beta,
            use_beta_sigmoid_in_kernel=call.use_beta_sigmoid_in_kernel,
            allow_neg_eigval=call.allow_neg_eigval,
        )
        q, k = (x.repeat_interleave(HV // H, dim=2) for x in (call.scale * q, k))
        q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))  # heads before tokens

        KK, P, up_to, after = _decayed_products(q, k, g)
        eye = torch.eye(layout.chunk, dtype=dtype, device=q.device).expand_as(P)
        inverse = torch.linalg.solve_triangular(beta[..., None] * KK, eye, upper=False, unitriangular=True)
        from_start = up_to.exp()
        factors = (
            q * from_start, k * from_start, k * after.exp(), v, inverse * beta[..., None, :], P, from_start[..., -1, :]
        )
        yield from zip(*(x.split(group) for x in factors))


def _decayed_products(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Products of tokens within a chunk under the decay between them, and the decays to the chunk's borders.

    Blocks double from one token to the whole chunk; two neighbours join into one with the block of products across
    their border below the diagonal.

    Args:
        q, k, g: `[..., C, K]`, C a power of two; g in log space.

    Returns:
        sum_d k_i k_j exp(G_i - G_j) for i > j, else 0, and sum_d q_i k_j exp(G_i - G_j) for i >= j, else 0;
        `[..., C, C]`.
        Log-decay from the chunk's start up to and with each token, and from after it to the chunk's end; `[..., C, K]`.
    """
    C = q.shape[-2]
    up_to, after = g, torch.zeros_like(g)
    QK = (q * k).sum(-1)[..., None, None]  # [..., blocks, size, size], here C blocks of one token
    KK = torch.zeros_like(QK)
    size = 1
    while size < C:
        (_, q_high), (k_low, k_high), (up_to_low, up_to_high), (after_low, after_high) = (
            x.unflatten(-2, (C // size // 2, 2, size)).unbind(-3) for x in (q, k, up_to, after)
        )
        decay = up_to_high.exp()
        column = (k_low * after_low.exp()).transpose(-1, -2)
        KK = _join(KK, (k_high * decay) @ column)
        QK = _join(QK, (q_high * decay) @ column)
        up_to = torch.cat((up_to_low, up_to_low[..., -1:, :] + up_to_high), -2).flatten(-3, -2)
        after = torch.cat((after_low + up_to_high[..., -1:, :], after_high), -2).flatten(-3, -2)
        size *= 2
    return KK.squeeze(-3), QK.squeeze(-3), up_to, after


def _join(blocks: torch.Tensor, across: torch.Tensor) -> torch.Tensor:
    """Diagonal blocks `[..., 2n, s, s]` and the blocks below them `[..., n, s, s]` to blocks `[..., n, 2s, 2s]`."""
    low, high = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return torch.cat((torch.cat((low, torch.zeros_like(across)), -1), torch.cat((across, high), -1)), -2)
