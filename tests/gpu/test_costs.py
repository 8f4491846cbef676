"""Do costs stay where they belong? No tuning at the first call of a shape, and time linear in the sequences."""

import time

import pytest
import torch

from tests.gpu import DEVICE
from tests.kdakit import cases
from tests.kdakit.run import run_on_kernels

# A first call of a new head count and layout loads one kernel at most: milliseconds, against the 100 seconds for which
# a Triton kernel tunes itself. The rest is room for a busy machine.
FIRST_CALL_SECONDS = 2.0
# Sixteen times the sequences may take this many times as long: linear, with room for launches and a device that is not
# full before. A scan of all sequences by each would take 256 times as long.
SIXTEENFOLD = 40


@pytest.mark.parametrize("heads", [5, 7, 11, 13])
@pytest.mark.parametrize("layout", ["dense-tail", "varlen", "dense-batch"])
@pytest.mark.parametrize("name", ["1-kimi-linear", "3-kimi-k3", "5-fla-default"])
def test_the_first_call_of_a_new_head_count_and_layout_does_not_tune_anything(name, layout, heads):
    arguments = cases.build(
        cases.Case(cases.caller(name), layout, "randn"), tokens=128, heads=heads, device=DEVICE, seed=51
    ).arguments
    torch.cuda.synchronize()
    began = time.perf_counter()
    run_on_kernels(arguments)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < FIRST_CALL_SECONDS


def milliseconds(sequences: int) -> float:
    """The best of a few runs over so many sequences of one token, without states."""
    random = torch.Generator(device=DEVICE).manual_seed(52)
    shape = (1, sequences, 1, 128)
    q, k, v = (torch.randn(shape, generator=random, device=DEVICE).bfloat16() for _ in range(3))
    arguments = dict(
        q=q, k=k, v=v, g=torch.full(shape, -0.5, device=DEVICE), beta=torch.full(shape[:3], 0.5, device=DEVICE),
        cu_seqlens=torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    times = []
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run_on_kernels(arguments)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def test_time_grows_linearly_with_the_number_of_sequences():
    few, many = 2**14, 2**18
    ratio = milliseconds(many) / milliseconds(few)
    assert ratio < SIXTEENFOLD, f"{many // few} times the sequences take {ratio:.0f} times as long"
