"""Does the past ignore the future? Outputs before a changed token are bit-identical, and a prompt may come in parts."""

import math

import pytest
import torch

from tests.gpu import DEVICE
from tests.gpu.test_numbers import activated_call, gates_of_every_strength
from tests.kdakit import cases, compare
from tests.kdakit.run import run_exactly, run_exactly_in_chunks, run_on_kernels, same_bits

TOKENS = 180
KERNEL_CHUNK = 16
STARTS = (1, 7, 15, 16, 17, 31, 47, 48, 63, 64, 65, 100, 127, 128, 170)
# NaN spreads through the products of its own chunk (0 * NaN); earlier chunks must not see it.
FUTURES = {"other": STARTS, "steep": STARTS, "nan": (64, 128)}


def with_future(arguments: dict, start: int, kind: str) -> dict:
    """The call with everything from token `start` on replaced."""
    changed = dict(arguments)
    random = torch.Generator().manual_seed(start)
    for name in ("q", "k", "v", "g", "beta"):
        tensor = changed[name] = arguments[name].clone()
        future = torch.randn(tensor[:, start:].shape, generator=random)
        if kind == "nan":
            future = torch.full_like(future, math.nan)
        elif name == "g":
            activated = not arguments.get("use_gate_in_kernel")
            future = (-90.0 if activated else 30.0) * future.abs() if kind == "steep" else -future.abs()
        tensor[:, start:] = future.to(tensor.dtype)
    return changed


@pytest.mark.parametrize("name", ["1-kimi-linear", "3-kimi-k3", "5-fla-default"])
@pytest.mark.parametrize("gate", ["randn", "strong", "mixed"])
@pytest.mark.parametrize("future", FUTURES)
def test_outputs_before_a_changed_token_are_bit_identical(name, gate, future):
    case = cases.Case(cases.caller(name), "dense-tail", gate)
    arguments = cases.build(case, tokens=TOKENS, heads=2, device=DEVICE, seed=11).arguments
    o, _ = run_on_kernels(arguments)

    for start in FUTURES[future]:
        changed, _ = run_on_kernels(with_future(arguments, start, future))
        assert same_bits(o[:, :start], changed[:, :start]), f"a future from token {start} on changed the past"
        if future != "nan":
            assert not torch.equal(o[:, start:], changed[:, start:])


@pytest.mark.parametrize("heads", [2, 140])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("future", ["other", "steep"])
def test_outputs_before_a_changed_token_are_bit_identical_after_gates_of_every_strength(future, together, heads):
    arguments = activated_call(gates_of_every_strength(TOKENS, heads, together))
    o, _ = run_on_kernels(arguments)

    for start in range(32, 48):
        changed, _ = run_on_kernels(with_future(arguments, start, future))
        assert same_bits(o[:, :start], changed[:, :start]), f"a future from token {start} on changed the past"


def test_a_later_mild_gate_brings_back_nothing_that_was_forgotten():
    # Where all gates forget everything, pairs of tokens are left out; were they decided on together, the mild gates would
    # bring earlier ones back. Token 1 writes nothing, so that its own output does not cover up what they would add.
    arguments = activated_call(torch.full((1, 16, 2, cases.HEAD_DIM), -80.0))
    arguments |= {"v": arguments["v"].clone(), "initial_state": torch.zeros_like(arguments["initial_state"])}
    arguments["v"][:, 1] = 0
    mild = dict(arguments, g=arguments["g"].clone())
    mild["g"][:, 8:] = -1.0

    o, _ = run_on_kernels(arguments)
    changed, _ = run_on_kernels(mild)

    assert same_bits(o[:, :8], changed[:, :8]), "gates from token 8 on changed the past"


def run_in_parts(arguments: dict, borders: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, final_state) of a prompt that is cut at `borders`, with the state carried from part to part."""
    parts, state = [], arguments.get("initial_state")
    for start, end in zip((0, *borders), (*borders, arguments["q"].shape[1]), strict=True):
        part = cases.with_tokens(arguments, slice(start, end)) | {"initial_state": state}
        o, state = run_on_kernels(part)
        parts.append(o)
    return torch.cat(parts, dim=1), state


@pytest.mark.parametrize("name", ["1-kimi-linear", "3-kimi-k3", "5-fla-default"])
@pytest.mark.parametrize("gate", ["randn", "long-memory", "trained"])
@pytest.mark.parametrize("borders", [(1024,), (512, 1024, 1536), (7, 100, 1999)], ids=str)
def test_a_prompt_in_parts_with_the_state_carried_agrees_with_one_call(name, gate, borders):
    case = cases.Case(cases.caller(name), "dense", gate)
    arguments = cases.build(case, tokens=2048, heads=2, device=DEVICE, seed=12).arguments
    whole_o, whole_state = run_on_kernels(arguments)

    split_o, state = run_in_parts(arguments, borders)

    exact_o, exact_state = run_exactly(cases.judge_arguments(arguments))
    compare.assert_close(split_o, exact_o, compare.CUDA_FORWARD.o, "o in parts")
    compare.assert_close(state, exact_state, compare.CUDA_FORWARD.state, "final_state in parts")
    if all(border % KERNEL_CHUNK == 0 for border in borders):  # the same chunks, and a state carried in fp32
        assert same_bits(split_o, whole_o), "o in parts differs from o of one call"
        assert same_bits(state, whole_state), "final_state in parts differs from that of one call"


def test_a_prompt_of_32768_tokens_in_four_parts_agrees_with_one_call():
    case = cases.Case(cases.caller("3-kimi-k3"), "dense", "long-memory")
    arguments = cases.build(case, tokens=32768, heads=1, device=DEVICE, seed=13).arguments
    whole_o, whole_state = run_on_kernels(arguments)

    split_o, state = run_in_parts(arguments, (8192, 16384, 24576))

    exact_o, exact_state = run_exactly_in_chunks(cases.judge_arguments(arguments))
    for what, o, final in (("one call", whole_o, whole_state), ("four parts", split_o, state)):
        compare.assert_close(o, exact_o, compare.CUDA_FORWARD.o, f"o of {what}")
        compare.assert_close(o[:, -1024:], exact_o[:, -1024:], compare.CUDA_FORWARD.o, f"the last rows of {what}")
        compare.assert_close(final, exact_state, compare.CUDA_FORWARD.state, f"final_state of {what}")
