"""Are works right that blocks go on to, where there are more of them than multiprocessors, whatever their lengths?"""

import pytest
import torch

from fla_kda_backend import ops
from tests.gpu import DEVICE
from tests.gpu.checks import check_against_recurrence_and_again, check_the_past_ignores_the_future
from tests.kdakit import cases, compare
from tests.kdakit.run import OperatorCalls, expected_path, run_exactly, run_on_kernels

FEW_CHUNKS = (0, 0, 1, 2, 3, 5, 16, 17, 40)


@pytest.fixture(autouse=True)
def blocks_that_stay():
    if expected_path() != "hopper":
        pytest.skip("only blocks of the Hopper kernel stay")


def run_staying(arguments: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, final_state) of a call with more works than the device has multiprocessors, in one launch. Fails unless all
    that is left after each block's first work was taken once."""
    with OperatorCalls() as operator:
        result = run_on_kernels(arguments)
    (call,) = operator.calls
    assert (call["turns"], call["segments"]) == (0, 1)
    B, _, heads, _ = arguments["v"].shape
    borders = arguments.get("cu_seqlens")
    works = heads * (B if borders is None else len(borders) - 1)
    assert works > ops._multiprocessors(DEVICE)
    if borders is None:
        assert call["order"] is None
    else:
        assert call["order"][0] == works  # each block also found that there is no more
    return result


def check(arguments: dict) -> None:
    check_against_recurrence_and_again(arguments, *run_staying(arguments))


def packed(name: str, gate: str, lengths: tuple[int, ...], heads: int, **changes) -> dict:
    case = cases.Case(cases.caller(name), "dense", gate)
    arguments = cases.build(case, tokens=sum(lengths) + 16, heads=heads, device=DEVICE, seed=41).arguments
    return cases.as_packed(arguments, lengths, seed=42) | changes


def lengths_of(count: int, among: tuple[int, ...], seed: int) -> tuple[int, ...]:
    random = torch.Generator().manual_seed(seed)
    return tuple(among[i] for i in torch.randint(len(among), (count,), generator=random).tolist())


@pytest.mark.parametrize("name", ["1-kimi-linear", "3-kimi-k3"])
@pytest.mark.parametrize("gate", ["randn", "mixed"])
@pytest.mark.parametrize("among, heads", [(FEW_CHUNKS, 8), ((0, 1, 130, 260), 16)], ids=["few chunks", "many chunks"])
def test_packed_sequences_match_the_recurrence(name, gate, among, heads):
    check(packed(name, gate, lengths_of(70, among, seed=1), heads))


SHORT = {"4": (4,) * 200, "1 0": (1, 0) * 100, "0 33": (0,) * 130 + (33,) * 70, "33 0": (33,) * 70 + (0,) * 130}


@pytest.mark.parametrize("lengths", SHORT.values(), ids=SHORT)
def test_short_and_empty_sequences_match_the_recurrence(lengths):
    check(packed("5-fla-default", "randn", lengths, heads=2))


def test_states_in_both_layouts_and_none():
    lengths = lengths_of(80, FEW_CHUNKS, seed=2)
    check(packed("4-fla-safe-gate", "long-memory", lengths, heads=4, state_v_first=True))
    check(packed("4-fla-safe-gate", "long-memory", lengths, heads=4, initial_state=None))
    check(packed("4-fla-safe-gate", "long-memory", lengths, heads=4, output_final_state=False))


def test_steep_gates_of_some_sequences_match_the_recurrence():
    check(packed("1-kimi-linear", "steep-some", lengths_of(60, FEW_CHUNKS, seed=3), heads=8))


@pytest.mark.parametrize("heads", [140, 401])
def test_dense_heads_match_the_recurrence(heads):
    case = cases.Case(cases.caller("3-kimi-k3"), "dense", "randn")
    check(dict(cases.build(case, tokens=100, heads=heads, device=DEVICE, seed=43).arguments))


def test_sequences_are_taken_longest_first():
    lengths = (5, 300, 0, 33, 300, 1, 64, 17, 0)
    with OperatorCalls() as operator:
        check(packed("5-fla-default", "randn", lengths, heads=32))
    for call in operator.calls:
        assert call["order"][1:].tolist() == sorted(range(len(lengths)), key=lambda i: -lengths[i])


def test_sequences_that_are_too_many_to_be_ordered_match_the_recurrence():
    lengths = lengths_of(ops.MAX_ORDERED_SEQUENCES + 200, (0, 1, 2, 3, 17), seed=4)
    with OperatorCalls() as operator:
        check(packed("5-fla-default", "randn", lengths, heads=1))
    assert all(call["order"].numel() == 1 for call in operator.calls)


def test_the_past_ignores_the_future_of_a_sequence_and_of_those_after_it():
    lengths = (200,) * 10
    check_the_past_ignores_the_future(packed("3-kimi-k3", "randn", lengths, heads=16), run_staying, start=1130)


def test_nothing_but_empty_sequences_keep_their_states():
    arguments = packed("5-fla-default", "randn", (0,) * 100, heads=2)
    _, state = run_staying(arguments)
    assert torch.equal(state, arguments["initial_state"])


def test_a_graph_replays_with_other_lengths():
    arguments = packed("3-kimi-k3", "randn", lengths_of(40, FEW_CHUNKS, seed=5), heads=8)
    borders, tokens = arguments["cu_seqlens"], arguments["q"].shape[1]
    others = torch.randint(0, tokens + 1, borders.shape, generator=torch.Generator().manual_seed(6)).sort().values
    others[0] = 0
    run_staying(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = run_on_kernels(arguments)
    for contents in (others, borders.clone()):
        borders.copy_(contents)
        graph.replay()
        exact_o, exact_state = run_exactly(cases.judge_arguments(arguments))
        compare.assert_close(o, exact_o, compare.CUDA_FORWARD.o, "o of a replay")
        compare.assert_close(state, exact_state, compare.CUDA_FORWARD.state, "final_state of a replay")
