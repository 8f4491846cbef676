"""Does the error budget emulate KDA? Without its roundings it is the recurrence, and each rounding moves the result."""

import pytest

from scripts import error_budget
from tests.kdakit import accuracy, cases
from tests.kdakit.compare import assert_close, relative_l2
from tests.kdakit.run import run_exactly
from tests.reference_calls import FLOAT32

TOKENS, HEADS = 80, 2


def inputs_and_exact(regime: str):
    arguments = accuracy.inputs(regime, tokens=TOKENS, heads=HEADS)
    exact_o, exact_state = run_exactly(cases.judge_arguments(arguments))
    return error_budget.activated(arguments), exact_o[0].transpose(0, 1), exact_state[0].mT


@pytest.mark.parametrize("regime", accuracy.REGIMES)
@pytest.mark.parametrize("kernel", error_budget.ROUNDED)
def test_without_rounding_it_is_the_recurrence(kernel, regime):
    call, exact_o, exact_state = inputs_and_exact(regime)
    o, state = error_budget.emulate(kernel, call, exact=error_budget.ROUNDED[kernel])
    assert_close(o, exact_o, FLOAT32, "o")
    assert_close(state, exact_state, FLOAT32, "final_state")


@pytest.mark.parametrize("kernel", error_budget.ROUNDED)
def test_every_operand_is_rounded_somewhere(kernel):
    call, exact_o, exact_state = inputs_and_exact("long-memory")
    names = error_budget.ROUNDED[kernel]
    for name in names:
        others = tuple(other for other in names if other != name)
        o, state = error_budget.emulate(kernel, call, exact=others, two_terms=())
        assert relative_l2(o, exact_o) > 10 * FLOAT32 or relative_l2(state, exact_state) > 10 * FLOAT32, name
