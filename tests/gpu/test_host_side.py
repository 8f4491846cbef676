"""Does the host never wait? No synchronisation in a call, capture in CUDA graphs, replays with changed contents."""

from contextlib import contextmanager

import pytest
import torch

from tests.gpu import DEVICE
from tests.kdakit import cases
from tests.kdakit.run import run_on_kernels, same_bits


@contextmanager
def synchronising_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def arguments_of(name: str, layout: str, seed: int = 31) -> dict:
    case = cases.Case(cases.caller(name), layout, "mixed")
    return cases.build(case, tokens=300, heads=4, device=DEVICE, seed=seed).arguments


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("form", cases.CALLERS, ids=lambda form: form.name)
def test_no_call_synchronises_with_the_gpu(form, layout):
    if form.packed_only and not layout.startswith("varlen"):
        pytest.skip("this caller packs its sequences always")
    arguments = arguments_of(form.name, layout)
    expected = run_on_kernels(arguments)

    with synchronising_is_an_error():
        result = run_on_kernels(arguments)

    assert same_bits(result[0], expected[0]) and same_bits(result[1], expected[1])


def test_the_check_for_synchronisation_would_notice_one():
    with pytest.raises(RuntimeError), synchronising_is_an_error():
        torch.ones(1, device=DEVICE).item()


@pytest.mark.parametrize("name", ["1-kimi-linear", "3-kimi-k3", "5-fla-gva", "2-transformers"])
@pytest.mark.parametrize("layout", ["dense-tail", "varlen", "varlen-empty"])
def test_a_captured_call_replays_with_new_contents(name, layout):
    arguments = arguments_of(name, layout)
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    run_on_kernels(arguments)
    torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = run_on_kernels(arguments)

    for seed in (32, 33):
        fresh = arguments_of(name, layout, seed)
        for key, tensor in tensors.items():
            tensor.copy_(fresh[key])
        o.fill_(float("nan"))
        graph.replay()
        expected_o, expected_state = run_on_kernels(fresh)
        assert same_bits(o, expected_o) and same_bits(state, expected_state)


def test_a_replay_reads_the_boundaries_of_its_moment():
    arguments = arguments_of("1-kimi-linear", "varlen")
    run_on_kernels(arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = run_on_kernels(arguments)

    total = arguments["q"].shape[1]
    for boundaries in ([0, 1, 100, 100, 250, total], [0, 0, 17, 60, 61, total], [0, 50, 90, 130, 200, 210]):
        arguments["cu_seqlens"].copy_(torch.tensor(boundaries))
        graph.replay()
        expected_o, expected_state = run_on_kernels(arguments)
        assert same_bits(o, expected_o) and same_bits(state, expected_state), f"boundaries {boundaries}"
