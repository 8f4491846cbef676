"""Are results the same every time? Repeats, streams, threads, other devices, and no growth of device memory."""

import threading

import pytest
import torch

from tests.gpu import DEVICE
from tests.kdakit import cases, compare
from tests.kdakit.run import expected_path, run_on_kernels, same_bits

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


def test_the_current_stream_is_used_and_its_order_kept():
    arguments = arguments_of("few-heads")
    expected, _ = run_on_kernels(arguments)
    late = arguments["v"].clone()
    arguments["v"] = torch.full_like(late, float("nan"))
    torch.cuda.synchronize()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the copy waits behind this; a kernel on another stream would read the NaN
        arguments["v"].copy_(late)
        o, _ = run_on_kernels(arguments)
    stream.synchronize()

    assert same_bits(o, expected)


def test_two_threads_with_streams_of_their_own_do_not_disturb_each_other():
    import fla_kda_backend

    shapes = ("few-heads", "many-sequences")
    expected = {shape: run_on_kernels(arguments_of(shape)) for shape in shapes}
    arguments = {shape: arguments_of(shape) for shape in shapes}
    served = fla_kda_backend.dispatch_counts()[expected_path()]
    failures = []
    torch.cuda.synchronize()

    def work(shape):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(50):
                o, state = fla_kda_backend.chunk_kda(**arguments[shape])
                stream.synchronize()
                if not (same_bits(o, expected[shape][0]) and same_bits(state, expected[shape][1])):
                    failures.append(shape)
                    return

    threads = [threading.Thread(target=work, args=(shape,)) for shape in shapes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)

    assert not any(thread.is_alive() for thread in threads) and not failures
    # Counters may lose a beat between threads only if they are not locked.
    assert fla_kda_backend.dispatch_counts()[expected_path()] == served + 100


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA GPU is visible, two are needed")
def test_tensors_on_a_device_that_is_not_current_run_there():
    expected_o, expected_state = run_on_kernels(arguments_of("few-heads"))
    other = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0

    o, state = run_on_kernels(arguments_of("few-heads", device=other))

    assert o.device == other and state.device == other and torch.cuda.current_device() == 0
    assert same_bits(o.cpu(), expected_o.cpu()) and same_bits(state.cpu(), expected_state.cpu())
