"""How accurate is a path, in the regimes that published numbers exist for? Inputs of the accuracy table.

2048 tokens, 4 heads, a random state in; q, k, v, g, beta randn in bf16 with norms, gate and sigmoid in the kernel.
"""

import math

import torch

from .cases import HEAD_DIM, LOWER_BOUND, to_device

TOKENS = 2048
HEADS = 4
# Added to a randn gate with the bound of -5; None is the softplus gate with A_log and dt_bias as trained models start.
REGIMES: dict[str, float | None] = {"randn": 0.0, "strong": 6.0, "long-memory": -8.0, "softplus": None}


def inputs(regime: str, *, heads: int = HEADS, tokens: int = TOKENS, device="cpu", seed: int = 0) -> dict:
    """Keywords for `chunk_kda`. The first heads of a larger count hold the same values as a smaller count."""
    per_head = [one_head(regime, tokens, torch.Generator().manual_seed(seed * 1000 + head)) for head in range(heads)]
    arguments = {name: torch.cat([head[name] for head in per_head], dim=axis) for name, axis in STACKED.items()}
    arguments["dt_bias"] = arguments["dt_bias"].flatten()
    arguments = {name: to_device(value, device) for name, value in arguments.items()}
    arguments |= dict(
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        output_final_state=True,
        state_v_first=True,
    )
    if REGIMES[regime] is not None:
        arguments |= dict(safe_gate=True, lower_bound=LOWER_BOUND)
    return arguments


# The axis along which heads are joined.
STACKED = {"q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "A_log": 0, "dt_bias": 0, "initial_state": 1}


def one_head(regime: str, tokens: int, random: torch.Generator) -> dict:
    def randn(*shape):
        return torch.randn(*shape, generator=random)

    def rand(*shape):
        return torch.rand(*shape, generator=random)

    q, k, v, noise = (randn(1, tokens, 1, HEAD_DIM) for _ in range(4))
    if REGIMES[regime] is None:
        # FLA's initialisation of the layer: decay rates 1 to 16, steps log-uniform between 1e-3 and 1e-1.
        step = torch.exp(math.log(1e-3) + math.log(1e2) * rand(1, HEAD_DIM))
        A_log, dt_bias, g = torch.log(1 + 15 * rand(1)), step + torch.log(-torch.expm1(-step)), noise
    else:
        A_log, dt_bias, g = rand(1), rand(1, HEAD_DIM), noise + REGIMES[regime]
    return dict(
        q=q.bfloat16(),
        k=k.bfloat16(),
        v=v.bfloat16(),
        g=g.bfloat16(),
        beta=randn(1, tokens, 1).bfloat16(),
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=randn(1, 1, HEAD_DIM, HEAD_DIM),
    )


def first_heads(arguments: dict, heads: int) -> dict:
    """The same call with only the first heads: a slice that every path can be judged on."""
    sliced = dict(arguments)
    for name, axis in STACKED.items():
        size = heads * (HEAD_DIM if name == "dt_bias" else 1)
        sliced[name] = arguments[name].narrow(axis, 0, size).contiguous()
    return sliced
