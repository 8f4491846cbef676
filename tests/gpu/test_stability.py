"""Are results the same every time? Repeats, by the ten thousand, and no growth of device memory."""

import pytest
import torch

import fla_kda_backend
from fla_kda_backend import ops
from tests.gpu import DEVICE
from tests.kdakit import cases, compare
from tests.kdakit.run import (
    OperatorCalls,
    expected_path,
    heads_in_turns,
    run_on_kernels,
    same_bits,
    uninitialised_memory_is_nan,
)

REPEATS = 250
SHAPES = {
    "many-heads": ("3-kimi-k3", "dense-tail", 500, 96),
    "few-heads": ("1-kimi-linear", "dense", 2048, 2),
    "batch": ("5-fla-gva", "dense-batch", 300, 8),
    "empty-sequences-no-state": ("1-kimi-linear-first", "varlen-empty", 300, 8),
    "many-sequences": ("5-fla-default", "varlen-many", 1500, 8),
    "no-state-at-all": ("10-megatron-lm", "varlen", 400, 16),
    "split-views": ("2-transformers", "dense-tail", 400, 8),
}


def arguments_of(shape: str, device=DEVICE) -> dict:
    name, layout, tokens, heads = SHAPES[shape]
    case = cases.Case(cases.caller(name), layout, "mixed")
    return cases.build(case, tokens=tokens, heads=heads, device=device, seed=21).arguments


@pytest.mark.parametrize("shape", SHAPES)
def test_repeats_are_bit_identical(shape):
    arguments = arguments_of(shape)
    o, state = run_on_kernels(arguments)
    compare.poison_cuda_memory(DEVICE)

    for repeat in range(REPEATS):
        again_o, again_state = run_on_kernels(arguments)
        assert same_bits(o, again_o) and same_bits(state, again_state), f"repeat {repeat} differs"


# Short calls, 10,000 of which take a second or two, that between them take every way through the kernels.
MANY_REPEATS = 10_000
QUICK_SHAPES = {
    "empty-sequences-no-state": ("1-kimi-linear-first", "varlen-empty", 100, 8),
    "one-head": ("3-kimi-k3", "dense-tail", 100, 1),  # two blocks of the Hopper kernel share a head
    "more-heads-than-multiprocessors": ("5-fla-default", "dense-tail", 48, 200),
    "many-sequences": ("4-fla-safe-gate", "varlen-many", 400, 4),
    "segments": ("1-kimi-linear", "dense-tail", 1000, 2),
    "turns": ("3-kimi-k3", "dense-tail", 100, None),  # as many heads as it takes
}


@pytest.mark.fault("missing fences, races")
@pytest.mark.parametrize("shape", QUICK_SHAPES)
def test_ten_thousand_repeats_are_bit_identical(shape, monkeypatch, record_property):
    name, layout, tokens, heads = QUICK_SHAPES[shape]
    if shape in ("segments", "turns") and expected_path() != "hopper":
        pytest.skip("only the Hopper kernel cuts sequences")
    if shape == "segments":
        monkeypatch.setattr(ops, "MIN_SEGMENTED_TOKENS", 256)
        monkeypatch.setattr(ops, "MIN_SEGMENT_TOKENS", 128)
    if shape == "turns":
        monkeypatch.setattr(ops, "MIN_TURN_TOKENS", 32)
        heads = heads_in_turns(3)
    case = cases.Case(cases.caller(name), layout, "mixed")
    arguments = cases.build(case, tokens=tokens, heads=heads, device=DEVICE, seed=23).arguments
    arguments["state_v_first"] = arguments.pop("transpose_state_layout", arguments.get("state_v_first", False))
    with OperatorCalls() as operator:
        expected = [x.view(torch.int16) for x in run_on_kernels(arguments)]
    (call,) = operator.calls
    assert (call["segments"] > 1, call["turns"] > 1) == (shape == "segments", shape == "turns")
    served = fla_kda_backend.dispatch_counts()[expected_path()]
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)

    with torch.no_grad(), uninitialised_memory_is_nan():
        for _ in range(MANY_REPEATS):  # the host never waits: calls follow one another on the GPU without a gap
            for result, bits in zip(fla_kda_backend.chunk_kda(**arguments), expected):
                differing += (result.view(torch.int16) != bits).any()

    assert differing.item() == 0
    assert fla_kda_backend.dispatch_counts()[expected_path()] == served + MANY_REPEATS
    record_property("count:repeats", MANY_REPEATS)


@pytest.mark.fault("device memory that grows with calls")
def test_device_memory_does_not_grow_with_calls():
    arguments = arguments_of("many-heads")
    for _ in range(3):
        run_on_kernels(arguments)
    torch.cuda.synchronize()
    free, allocated = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()

    for _ in range(200):
        run_on_kernels(arguments)
    torch.cuda.synchronize()

    assert torch.cuda.memory_allocated() == allocated
    assert free - torch.cuda.mem_get_info()[0] < 2**26, "device memory outside the caching allocator grew"
