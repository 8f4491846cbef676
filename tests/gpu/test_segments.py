"""Are sequences that are cut into segments, to fill the GPU with few heads, as exact as whole ones?"""

import pytest
import torch

from tests.gpu import DEVICE
from tests.gpu.checks import check_against_recurrence_and_again, check_the_past_ignores_the_future
from tests.kdakit import cases
from tests.kdakit.run import OperatorCalls, expected_path, run_on_kernels

HEADS, TOKENS = 2, 8192
# Sequences of which one is longer than all its segments, one is shorter than a chunk, one is empty.
LENGTHS = (11000, 7, 0, 3001, 8000)


def build(name: str, gate: str, **changes) -> dict:
    case = cases.Case(cases.caller(name), "dense", gate)
    return cases.build(case, tokens=TOKENS, heads=HEADS, device=DEVICE, seed=21).arguments | changes


def run_in_segments(arguments: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, final_state) of a call that the Hopper kernel, and no other, must cut."""
    with OperatorCalls() as operator:
        result = run_on_kernels(arguments)
    cut = expected_path() == "hopper"
    assert [call["segments"] > 1 for call in operator.calls] == [cut], "the call is not cut as it should be"
    return result


def check(arguments: dict) -> None:
    if expected_path() != "hopper":
        pytest.skip("only the Hopper kernel cuts sequences into segments")
    check_against_recurrence_and_again(arguments, *run_in_segments(arguments))


@pytest.mark.parametrize("name", ["1-kimi-linear", "3-kimi-k3", "5-fla-default"])
@pytest.mark.parametrize("gate", ["randn", "long-memory", "trained", "mixed"])
def test_dense_calls_in_segments_match_the_recurrence(name, gate):
    check(build(name, gate))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_packed_sequences_in_segments_match_the_recurrence(v_first, with_state):
    total = sum(LENGTHS)
    case = cases.Case(cases.caller("4-fla-safe-gate"), "dense", "long-memory")
    arguments = cases.build(case, tokens=total + 16, heads=HEADS, device=DEVICE, seed=22).arguments
    arguments = cases.as_packed(cases.with_tokens(arguments, slice(total)), LENGTHS) | {"state_v_first": v_first}
    if not with_state:
        arguments["initial_state"] = None
    check(arguments)


def test_no_final_state_and_a_tail_in_segments():
    arguments = build("1-kimi-linear", "long-memory", initial_state=None, output_final_state=False)
    check(cases.with_tokens(arguments, slice(-5)))


def test_the_past_ignores_the_future_across_segments():
    arguments = build("3-kimi-k3", "long-memory")
    check_the_past_ignores_the_future(arguments, run_in_segments, start=3333)
