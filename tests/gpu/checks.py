"""What more than one file of tests asks of a result of the kernels."""

from collections.abc import Callable

import torch

from tests.kdakit import cases, compare
from tests.kdakit.run import run_exactly, run_on_kernels, same_bits


def check_against_recurrence_and_again(arguments: dict, o: torch.Tensor, state: torch.Tensor | None) -> None:
    """Fail unless o and final_state of these arguments are near the exact ones, and another run gives the same bits."""
    exact_o, exact_state = run_exactly(cases.judge_arguments(arguments))
    compare.assert_close(o, exact_o, compare.CUDA_FORWARD.o, "o")
    if exact_state is not None:
        compare.assert_close(state, exact_state, compare.CUDA_FORWARD.state, "final_state")
    again_o, again_state = run_on_kernels(arguments)
    assert same_bits(o, again_o) and same_bits(state, again_state), "two runs differ"


def check_the_past_ignores_the_future(arguments: dict, run: Callable[[dict], tuple], start: int) -> None:
    """Fail unless other tokens from `start` on leave every bit of o before them, and change what follows."""
    o, _ = run(arguments)
    changed = dict(arguments, v=arguments["v"].clone(), g=arguments["g"].clone())
    changed["v"][:, start:] += 1
    changed["g"][:, start:] = 4
    later, _ = run(changed)
    assert same_bits(o[:, :start], later[:, :start])
    assert not torch.equal(o[:, start:], later[:, start:])
