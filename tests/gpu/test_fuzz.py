"""Are random calls right on the kernels, and do those that are not ours reach FLA as they were?

FLA's own function decides what each call means; its Triton kernels, which would tune themselves for minutes, are
replaced. scripts/fuzz.py makes as many calls as one has time for, and a few on the real Triton kernels.
"""

import pytest

from tests.kdakit import differential
from tests.kdakit.run import environment, expected_path

pytest.importorskip("fla.ops.kda", reason="flash-linear-attention is not installed")

CALLS = 40


@pytest.mark.parametrize("seed", range(6))
def test_random_calls_mean_the_same_with_the_plugin_as_without(seed):
    with environment("FLA_KDA_FORCE", expected_path()):
        outcomes, failures = differential.run("cuda", CALLS, f"gpu {seed}")
    assert not failures, "\n\n".join(f"{f.problem}\n{differential.as_python(f)}" for f in failures)
    assert sum(outcomes.values()) == CALLS
    assert outcomes["served"] >= CALLS // 8 and outcomes["left to FLA"] and outcomes["refused by FLA"], outcomes


def test_random_calls_without_mishaps_are_nearly_all_served():
    served = 0
    with differential.installed("cuda") as fla_installed:
        for number in range(CALLS):
            recipe = differential.recipe_of("cuda", "no mishaps", number, mishaps=False)
            served += fla_installed.check(recipe) == "served"
    # The rest needs gradients or intermediate states, or has dtypes and head dims that are not ours.
    assert served >= CALLS // 2
