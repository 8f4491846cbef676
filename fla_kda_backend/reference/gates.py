"""How do raw q, k, g and beta become the normalised keys, log-decays and step sizes of the recurrence?

Every function works in the dtype it is told to use and is differentiable. Formulas: Kimi Linear (arXiv:2510.26692),
section on Kimi Delta Attention, and the argument descriptions of `fla.ops.kda.chunk_kda` (fla-core 0.6.0).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

L2NORM_EPS = 1e-6
# Above this softplus(x) equals x in float64 (exp(-40) is below half an ulp of 40); torch's default of 20 does not.
_SOFTPLUS_LINEAR_FROM = 40.0
# An infinite raw gate saturates either gate just as this does, without the inf * 0 of an infinite factor's gradient.
_RAW_GATE_LIMIT = 1e30


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """`x / sqrt(sum(x²) + 1e-6)` over the last dimension, in x's dtype."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)


def log_decay(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    *,
    use_gate_in_kernel: bool,
    lower_bound: float | None,
) -> torch.Tensor:
    """Log-space decay of the recurrence, per token, value head and key channel.

    Args:
        g: `[..., HV, K]`, already in the dtype to compute in. Log-decay (<= 0, -inf included) when
            `use_gate_in_kernel` is false, else the raw gate.
        A_log: HV elements in any shape, or None, which stands for `exp(A_log) = 1`.
        dt_bias: HV * K elements in any shape, or None.
        use_gate_in_kernel: whether `g` is raw.
        lower_bound: None picks the softplus gate, a number the bounded gate.

    Returns:
        `g` unchanged, or `-exp(A_log) * softplus(g + dt_bias)`,
        or `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`; `[..., HV, K]`.
    """
    if not use_gate_in_kernel:
        return g
    HV, K = g.shape[-2:]
    x = g if dt_bias is None else g + dt_bias.to(g.dtype).reshape(HV, K)
    x = x.clamp(-_RAW_GATE_LIMIT, _RAW_GATE_LIMIT)
    rate = torch.ones((), dtype=g.dtype, device=g.device) if A_log is None else A_log.to(g.dtype).reshape(HV, 1).exp()
    if lower_bound is None:
        return -rate * F.softplus(x, threshold=_SOFTPLUS_LINEAR_FROM)
    return lower_bound * torch.sigmoid(rate * x)


def step_size(beta: torch.Tensor, *, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> torch.Tensor:
    """`beta` as given, `sigmoid(beta)`, or `2 * sigmoid(beta)` with `allow_neg_eigval`; same shape and dtype."""
    if not use_beta_sigmoid_in_kernel:
        return beta
    return 2 * beta.sigmoid() if allow_neg_eigval else beta.sigmoid()
