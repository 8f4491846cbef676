"""Are the kernels accurate where numbers are hard? The accuracy goals, near-collinear keys, gates of every strength."""

import math

import pytest
import torch

from tests.gpu import DEVICE
from tests.kdakit import accuracy, cases, compare
from tests.kdakit.run import run_exactly, run_on_kernels

# Measured with FLA's Triton kernels in the same regime, whose error the softplus gate must not exceed: see the accuracy
# table of docs/results, which scripts/parity.py writes. This bound is FLA's own for such results.
SOFTPLUS = compare.CUDA_FORWARD


@pytest.mark.parametrize("regime", accuracy.REGIMES)
def test_accuracy_goals_over_2048_tokens(regime):
    arguments = accuracy.inputs(regime, device=DEVICE)
    goal = compare.ACCURACY_GOALS.get(regime, SOFTPLUS)

    o, state = run_on_kernels(arguments)

    exact_o, exact_state = run_exactly(cases.judge_arguments(arguments))
    compare.assert_close(o, exact_o, goal.o, "o")
    compare.assert_close(state, exact_state, goal.state, "final_state")


def near_collinear(tokens: int, heads: int, spread: float, g: float) -> dict:
    """Keys that differ from one direction by `spread`, beta next to 1: powers of the chunk's L grow like binomials."""
    random = torch.Generator().manual_seed(1)

    def randn(*shape):
        return torch.randn(*shape, generator=random)

    direction = randn(1, 1, heads, cases.HEAD_DIM)
    shape = (1, tokens, heads, cases.HEAD_DIM)
    arguments = dict(
        q=randn(*shape).bfloat16(),
        k=(direction + spread * randn(*shape)).bfloat16(),
        v=randn(*shape).bfloat16(),
        g=torch.full(shape, g),
        beta=torch.full(shape[:3], 0.999),
        initial_state=randn(1, heads, cases.HEAD_DIM, cases.HEAD_DIM),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return {name: cases.to_device(value, DEVICE) for name, value in arguments.items()}


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.05])
@pytest.mark.parametrize("g", [0.0, -1e-3, -0.5])
def test_near_collinear_keys_stay_finite_and_accurate(spread, g):
    arguments = near_collinear(tokens=331, heads=2, spread=spread, g=g)

    o, state = run_on_kernels(arguments)

    exact_o, exact_state = run_exactly(arguments)
    # Differences of nearly equal terms: u = beta (v - S^T k) cancels, and what is left carries the operands' rounding.
    compare.assert_close(o, exact_o, 2 * compare.CUDA_FORWARD_FEW_TERMS.o, "o")
    compare.assert_close(state, exact_state, 2 * compare.CUDA_FORWARD_FEW_TERMS.state, "final_state")


def activated_call(g: torch.Tensor, seed: int = 2) -> dict:
    random = torch.Generator().manual_seed(seed)
    shape = g.shape
    arguments = dict(
        q=torch.randn(shape, generator=random).bfloat16(),
        k=torch.randn(shape, generator=random).bfloat16(),
        v=torch.randn(shape, generator=random).bfloat16(),
        g=g,
        beta=torch.rand(shape[:3], generator=random),
        initial_state=torch.randn(shape[0], shape[2], cases.HEAD_DIM, cases.HEAD_DIM, generator=random),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return {name: cases.to_device(value, DEVICE) for name, value in arguments.items()}


def check_few_terms(arguments: dict) -> None:
    """Fail unless the kernels are as near the recurrence as results of few terms can be."""
    o, state = run_on_kernels(arguments)

    exact_o, exact_state = run_exactly(arguments)
    compare.assert_close(o, exact_o, compare.CUDA_FORWARD_FEW_TERMS.o, "o")
    compare.assert_close(state, exact_state, compare.CUDA_FORWARD_FEW_TERMS.state, "final_state")


GATES = [0.0, -1e-6, -4.9, -5.46, -5.6, -20.0, -87.0, -104.0, -1000.0, -3e38, -float("inf")]


@pytest.mark.parametrize("per_token", GATES)
def test_constant_gates_of_any_strength_are_exact(per_token):
    # -5.46 a token is where a 16-token prefix leaves fp32's exponents; -87 and -104 where a single token does.
    check_few_terms(activated_call(torch.full((1, 75, 2, cases.HEAD_DIM), per_token)))


# The decay of each chunk is one fp32 number next to 1, whose rounding (up to 2^-25 each) adds up over 4096 chunks.
SLOW_DECAY = 4096 * 2.0**-25


@pytest.mark.parametrize("per_token", [-1e-6, -3e-5])
def test_slow_gates_are_not_lost_over_65536_tokens(per_token):
    # Beside an exponent's anchor of 60 a gate of -1e-6 would vanish, and with it the 6 % that the state loses.
    arguments = activated_call(torch.full((1, 65536, 1, cases.HEAD_DIM), per_token))
    arguments |= {"beta": torch.zeros_like(arguments["beta"])}  # nothing is written to the state

    _, state = run_on_kernels(arguments)

    exact = arguments["initial_state"].double() * math.exp(per_token * 65536)
    compare.assert_close(state, exact, 2 * SLOW_DECAY, "final_state")


@pytest.mark.parametrize("position", [0, 1, 15, 16, 17, 40])
def test_keys_forgotten_by_one_steep_token_stay_forgotten(position):
    # With clamped exponents a key before the steep token would come back; here nothing before it may be seen after it.
    g = torch.full((1, 64, 2, cases.HEAD_DIM), -1e-3)
    g[:, position] = -500.0
    arguments = activated_call(g)
    other = dict(arguments, initial_state=torch.full_like(arguments["initial_state"], 1e3))
    for name in ("k", "v", "beta"):
        other[name] = arguments[name].clone()
        other[name][:, :position] = arguments[name][:, :position].flip(1) if position else arguments[name][:, :0]

    o, state = run_on_kernels(arguments)
    changed_o, changed_state = run_on_kernels(other)

    exact_o, exact_state = run_exactly(arguments)
    compare.assert_close(o, exact_o, compare.CUDA_FORWARD_FEW_TERMS.o, "o")
    compare.assert_close(changed_o[:, position:], exact_o[:, position:], compare.CUDA_FORWARD_FEW_TERMS.o, "later o")
    compare.assert_close(changed_state, exact_state, compare.CUDA_FORWARD_FEW_TERMS.state, "final_state")


# Two heads: two blocks of the Hopper kernel share each; 140: more than there are multiprocessors.
@pytest.mark.parametrize("heads", [2, 140])
@pytest.mark.parametrize("first", [0, 7, 8, 15])
@pytest.mark.parametrize("channels", [slice(0, 64), slice(64, 128), slice(30, 98)], ids=["lower", "upper", "both"])
def test_halves_of_channels_that_become_steep_within_a_chunk_are_exact(channels, first, heads):
    g = torch.full((1, 44, heads, cases.HEAD_DIM), -0.1)
    steep = torch.arange(44) % 16 >= first
    g[:, steep, :, channels] = -15.0  # neighbours still feel each other
    check_few_terms(activated_call(g))


def gates_of_every_strength(tokens: int, heads: int, together: bool) -> torch.Tensor:
    """Activated gates, each at random of one of cases.STRENGTHS; `together`: of the same for all channels."""
    random = torch.Generator().manual_seed(21)
    channels = 1 if together else cases.HEAD_DIM
    strengths = cases.any_strength((1, tokens, heads, channels), random)
    return -strengths - torch.rand((1, tokens, heads, cases.HEAD_DIM), generator=random)


# In a chunk of such gates entries are steep, far below the one before, and yet felt by the next, in every combination.
@pytest.mark.parametrize("heads", [2, 140])
@pytest.mark.parametrize("together", [False, True])
def test_gates_of_every_strength_in_one_chunk_are_exact(together, heads):
    check_few_terms(activated_call(gates_of_every_strength(300, heads, together)))


@pytest.mark.parametrize("heads", [2, 140])
@pytest.mark.parametrize("strength", cases.STRENGTHS)
def test_gates_of_one_strength_are_exact(strength, heads):
    g = -strength - torch.rand((1, 100, heads, cases.HEAD_DIM), generator=torch.Generator().manual_seed(22))
    check_few_terms(activated_call(g))


def test_channels_of_opposite_strength_in_one_chunk_are_exact():
    g = torch.zeros(1, 96, 2, cases.HEAD_DIM)
    g[..., ::2] = -200.0
    g[:, 5::7, :, 1::4] = -30.0
    check_few_terms(activated_call(g))
