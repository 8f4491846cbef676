"""Are heads that share the GPU's spare multiprocessors in turns as exact as others?"""

import pytest
import torch

from fla_kda_backend import ops
from tests.gpu import DEVICE
from tests.gpu.checks import check_against_recurrence_and_again, check_the_past_ignores_the_future
from tests.kdakit import cases
from tests.kdakit.run import SHARES_IN_TURNS, OperatorCalls, expected_path, heads_in_turns, run_on_kernels


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    if expected_path() != "hopper":
        pytest.skip("only the Hopper kernel runs heads in turns")
    monkeypatch.setattr(ops, "MIN_TURN_TOKENS", 16)


def build(name: str, gate: str, turns: int, tokens: int, **changes) -> dict:
    case = cases.Case(cases.caller(name), "dense", gate)
    arguments = cases.build(case, tokens=tokens, heads=heads_in_turns(turns), device=DEVICE, seed=31).arguments
    return arguments | changes


def run_in_turns(arguments: dict, turns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, final_state) of a call that the Hopper kernel, and no other, must run in so many turns."""
    with OperatorCalls() as operator:
        result = run_on_kernels(arguments)
    assert [(call["turns"], call["segments"]) for call in operator.calls] == [(turns, 1)]
    return result


def check(arguments: dict, turns: int) -> None:
    check_against_recurrence_and_again(arguments, *run_in_turns(arguments, turns))


@pytest.mark.parametrize("turns", SHARES_IN_TURNS)
@pytest.mark.parametrize("name", ["1-kimi-linear", "3-kimi-k3"])
@pytest.mark.parametrize("gate", ["randn", "mixed"])
def test_dense_calls_in_turns_match_the_recurrence(name, gate, turns):
    check(build(name, gate, turns, tokens=500), turns)


@pytest.mark.parametrize("tokens", [80, 101, 130])  # segments of no, one and two chunks among them, and a tail
def test_segments_of_few_chunks(tokens):
    check(build("5-fla-default", "randn", 5, tokens, initial_state=None, output_final_state=True), 5)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_packed_sequences_in_turns_match_the_recurrence(v_first, with_state):
    lengths = (400, 7, 0, 130, 250)
    heads = heads_in_turns(3) // len(lengths) + 1
    case = cases.Case(cases.caller("4-fla-safe-gate"), "dense", "long-memory")
    arguments = cases.build(case, tokens=sum(lengths) + 16, heads=heads, device=DEVICE, seed=32).arguments
    arguments = cases.as_packed(arguments, lengths) | {"state_v_first": v_first}
    if not with_state:
        arguments["initial_state"] = None
    turns = ops.count_turns(heads * len(lengths), sum(lengths) // len(lengths), ops._multiprocessors(DEVICE))
    assert turns > 2
    check(arguments, turns)
    assert not run_on_kernels(arguments)[0][:, sum(lengths) :].any(), "rows of no sequence"


def test_the_past_ignores_the_future_across_turns():
    arguments = build("3-kimi-k3", "long-memory", 3, tokens=500)
    check_the_past_ignores_the_future(arguments, lambda arguments: run_in_turns(arguments, 3), start=333)
