"""How the tests of the reference call it: `Call`s from keywords, random inputs, steep gates, tolerances with reasons."""

import torch

from fla_kda_backend.call import Call
from fla_kda_backend.reference import chunk_kda, recurrent_kda
from tests.kdakit import cases

INF = float("inf")

# Relative L2 errors against the fp64 recurrence.
FLOAT64 = 1e-12  # the same sums in another order: thousands of ulps of room, far below any mistake of method
FLOAT32 = 5e-6  # sums over K and over a chunk in fp32, 2^-24 each; FLOAT32 / 2^-24 is about 80 ulps
BFLOAT16 = 2.5e-3  # rounding an exact result to bf16 once costs 1.7e-3 on average, 3.9e-3 for the worst element

# Keywords that change neither o nor the final state.
SHAPES_NO_RESULT = ("chunk_size", "return_intermediate_states", "use_graph", "max_num_seqs", "cu_seqlens_cpu")


def call_of(arguments: dict) -> Call:
    """The normalised call of keywords for `chunk_kda`, as a caller spells them."""
    fields = cases.judge_arguments(arguments)
    fields["safe_gate"] = arguments.get("safe_gate", False)
    fields.setdefault("scale", arguments["q"].shape[-1] ** -0.5)
    return Call(**fields)


def run_chunk(state_dtype=torch.float32, **arguments) -> tuple:
    return chunk_kda(call_of(arguments), state_dtype=state_dtype)


def run_judge(**arguments) -> tuple:
    judged = cases.judge_arguments(arguments)
    return recurrent_kda(**{name: value for name, value in judged.items() if name not in SHAPES_NO_RESULT})


def random_arguments(
    tokens: int,
    *,
    lengths: list[int] | None = None,
    batch: int = 1,
    heads: int = 2,
    value_heads: int | None = None,
    key_dim: int = 16,
    value_dim: int = 12,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict:
    """Keywords with an activated gate between -3 and 0, a state in and out, and q and k to be normalised."""
    random = torch.Generator().manual_seed(seed)

    def randn(*shape) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    value_heads = heads if value_heads is None else value_heads
    states = batch if lengths is None else len(lengths)
    arguments = {
        "q": randn(batch, tokens, heads, key_dim),
        "k": randn(batch, tokens, heads, key_dim),
        "v": randn(batch, tokens, value_heads, value_dim),
        "g": -3 * randn(batch, tokens, value_heads, key_dim).sigmoid(),
        "beta": randn(batch, tokens, value_heads).sigmoid(),
    }
    arguments = {name: x.to(dtype) for name, x in arguments.items()}
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    arguments["initial_state"] = randn(states, value_heads, key_dim, value_dim).to(state_dtype)
    arguments.update(output_final_state=True, use_qk_l2norm_in_kernel=True)
    if lengths is not None:
        arguments["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    return arguments


def steepen(g: torch.Tensor, gates: str) -> None:
    """Make activated gates [B, T, HV, K] steep, in place, in one of the ways named below."""
    if gates == "all-80":
        g.fill_(-80)
    elif gates == "one-channel-80":
        g.mul_(1e-3)
        g[..., 5] = -80
    elif gates == "bursts":  # mild decays right after enormous ones: a difference of two sums would lose them
        g.mul_(1e-2)
        g[:, ::9] = -1e6
    elif gates == "one-head-inf":
        g[:, 40:, 1] = -INF
    elif gates == "some-inf":
        g[:, 3::17, :, ::3] = -INF
    elif gates == "inf-among-none":
        g.zero_()
        g[:, 3::17, :, ::3] = -INF
    elif gates == "last-token-inf":
        g[:, -1] = -INF
    elif gates == "all-inf":
        g.fill_(-INF)
    else:
        raise ValueError(f"unknown way {gates!r}")
