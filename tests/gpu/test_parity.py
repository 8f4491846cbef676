"""Is every caller's call served by the kernels, and right? Against the fp64 recurrence, form by form."""

import zlib

import pytest
import torch

from tests.gpu import DEVICE
from tests.kdakit import cases, compare
from tests.kdakit.run import copies_of_inputs, run_exactly, run_on_kernels, written_to

TOKENS = 200
HEADS = 2
LONG_CONTEXT_TOKENS = 32768
LONG_CONTEXT_HEADS = 4


def seed_of(case) -> int:
    return zlib.crc32(str(case).encode())


def check_against_recurrence(call: cases.BuiltCall, tolerance: compare.Tolerance) -> None:
    o, state = run_on_kernels(call.arguments)
    exact_o, exact_state = run_exactly(call.judge)

    v = call.arguments["v"]
    assert o.shape == v.shape and o.dtype == call.arguments["q"].dtype
    compare.assert_close(o[:, : call.covered], exact_o[:, : call.covered], tolerance.o, "o")
    assert not o[:, call.covered :].any(), "rows that no sequence covers must be zero"
    if exact_state is None:
        assert state is None
    else:
        assert state.shape == exact_state.shape and state.dtype == torch.float32
        compare.assert_close(state, exact_state, tolerance.state, "final_state")


@pytest.mark.parametrize("case", list(cases.all_cases()), ids=str)
def test_caller_form_is_served_and_matches_the_recurrence(case):
    call = cases.build(case, tokens=TOKENS, heads=HEADS, device=DEVICE, seed=seed_of(case))
    copies = copies_of_inputs(call.arguments)
    compare.poison_cuda_memory(DEVICE)

    check_against_recurrence(call, compare.tolerance_for(case.layout, case.gate))

    written = written_to(call.arguments, copies)
    assert not written, f"inputs were written to: {written}"


@pytest.mark.parametrize("name", cases.LONG_CONTEXT_CALLERS)
def test_long_context_with_few_heads_matches_the_recurrence(name):
    case = cases.Case(cases.caller(name), "dense", "trained")
    call = cases.build(
        case, tokens=LONG_CONTEXT_TOKENS, heads=LONG_CONTEXT_HEADS, device=DEVICE, seed=seed_of(case)
    )

    check_against_recurrence(call, compare.CUDA_FORWARD)


@pytest.mark.parametrize("name", ["1-kimi-linear", "3-kimi-k3"])
@pytest.mark.parametrize("layout", ["dense-tail", "varlen"])
def test_model_sized_head_counts_match_the_recurrence(name, layout):
    case = cases.Case(cases.caller(name), layout, "randn")
    heads = 96 if name == "3-kimi-k3" else 32
    call = cases.build(case, tokens=1000, heads=heads, device=DEVICE, seed=seed_of(case))

    check_against_recurrence(call, compare.CUDA_FORWARD)
