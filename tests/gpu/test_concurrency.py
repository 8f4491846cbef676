"""Do calls survive what surrounds them? Streams, threads, other GPUs, CUDA graphs, torch.compile, autocast, grad modes.

The tests for two GPUs carry the marker `two_gpus`; where there is one GPU they are skipped, with that reason.
"""

import threading

import pytest
import torch

import fla_kda_backend
from fla_kda_backend import ops
from tests.gpu import DEVICE
from tests.kdakit import cases, compare
from tests.kdakit.run import (
    OperatorCalls,
    environment,
    expected_path,
    heads_in_turns,
    run_exactly,
    run_exactly_in_chunks,
    run_on_kernels,
    same_bits,
)

SHAPES = {
    "few-heads": ("1-kimi-linear", "dense", 2048, 2),
    "many-heads": ("3-kimi-k3", "dense-tail", 300, 96),
    "many-sequences": ("5-fla-default", "varlen-many", 600, 8),
    "packed": ("4-fla-safe-gate", "varlen", 300, 4),
}
# A clock of about 1.7 GHz: some 15 ms, longer than anything that is launched meanwhile takes to reach the GPU.
LATE_CYCLES = 25_000_000
THREAD_SECONDS = 120


def arguments_of(shape: str, device=DEVICE, seed: int = 21) -> dict:
    name, layout, tokens, heads = SHAPES[shape]
    case = cases.Case(cases.caller(name), layout, "mixed")
    arguments = cases.build(case, tokens=tokens, heads=heads, device=device, seed=seed).arguments
    if "transpose_state_layout" in arguments:
        arguments["state_v_first"] = arguments.pop("transpose_state_layout")
    return arguments


def assert_same(left: tuple, right: tuple, what: str = "") -> None:
    for name, one, other in zip(("o", "final_state"), left, right, strict=True):
        other = other if other is None else other.to(one.device)
        assert same_bits(one, other), f"{name} differs {what}"


def served() -> int:
    return fla_kda_backend.dispatch_counts()[expected_path()]


def run_threads(*work) -> None:
    """Each in a thread of its own; fails with the first exception of any."""
    failures = []

    def guarded(function):
        try:
            function()
        except BaseException as error:  # an assertion in a thread would otherwise vanish
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=THREAD_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if failures:
        raise failures[0]


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.fault("the wrong stream")
def test_the_current_stream_is_used_and_its_order_kept():
    arguments = arguments_of("few-heads")
    expected = run_on_kernels(arguments)
    late = arguments["v"].clone()
    arguments["v"] = torch.full_like(late, float("nan"))
    torch.cuda.synchronize()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE_CYCLES)  # the copy waits behind this; a kernel on another stream would read the NaN
        arguments["v"].copy_(late)
        result = run_on_kernels(arguments)
    stream.synchronize()

    assert_same(result, expected)


@pytest.mark.fault("copies freed too early")
def test_copies_of_views_are_made_and_freed_on_the_stream_of_the_call():
    # A strided input is copied; were the copy's memory free before the kernel has read it, the next call would fill it.
    arguments = arguments_of("few-heads")
    expected = run_on_kernels(arguments)
    views = dict(arguments)
    for name in ("q", "k", "v", "g"):
        views[name] = arguments[name].transpose(1, 2).contiguous().transpose(1, 2)
    torch.cuda.synchronize()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE_CYCLES)
        results = [run_on_kernels(views) for _ in range(4)]
    stream.synchronize()

    for result in results:
        assert_same(result, expected)


@pytest.mark.fault("the wrong stream")
def test_calls_on_several_streams_at_once_do_not_disturb_each_other():
    shapes = list(SHAPES)
    arguments = {shape: arguments_of(shape) for shape in shapes}
    expected = {shape: run_on_kernels(arguments[shape]) for shape in shapes}
    torch.cuda.synchronize()

    streams = {shape: torch.cuda.Stream() for shape in shapes}
    results = []
    for _ in range(20):
        for shape in shapes:
            with torch.cuda.stream(streams[shape]):
                results.append((shape, run_on_kernels(arguments[shape])))
    torch.cuda.synchronize()

    for shape, result in results:
        assert_same(result, expected[shape], f"in {shape}")


# --- threads ----------------------------------------------------------------------------------------------------------


def functions() -> dict:
    import fla.ops.kda

    return {"fla_kda_backend": fla_kda_backend.chunk_kda, "fla.ops.kda": fla.ops.kda.chunk_kda}


@pytest.mark.fault("two threads")
@pytest.mark.parametrize("function", ["fla_kda_backend", "fla.ops.kda"])
def test_two_threads_with_streams_of_their_own_do_not_disturb_each_other(function, record_property):
    # FLA asks a backend whether it accepts a call, and then has it run: another thread's call may come in between.
    pytest.importorskip("fla.ops.kda", reason="flash-linear-attention is not installed")
    chunk_kda = functions()[function]
    rounds, shapes = 100, ("few-heads", "many-sequences")
    arguments = {shape: arguments_of(shape) for shape in shapes}
    expected = {shape: run_on_kernels(arguments[shape]) for shape in shapes}
    before = served()
    torch.cuda.synchronize()

    def work(shape):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(rounds):
                result = chunk_kda(**arguments[shape])
                stream.synchronize()
                assert_same(result, expected[shape], f"in {shape}")

    run_threads(*(lambda shape=shape: work(shape) for shape in shapes))

    assert served() == before + 2 * rounds, "every call is counted, from whatever thread"
    record_property("count:calls from two threads", 2 * rounds)


# --- CUDA graphs ------------------------------------------------------------------------------------------------------


def capture(arguments: dict) -> tuple[torch.cuda.CUDAGraph, tuple]:
    run_on_kernels(arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_on_kernels(arguments)
    return graph, results


def copy_into(arguments: dict, fresh: dict) -> None:
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            value.copy_(fresh[name])


def check_replay(graph, results: tuple, arguments: dict, what: str, tolerance=compare.CUDA_FORWARD) -> None:
    """Replay, and fail unless the results are those of what the arguments hold now."""
    graph.replay()
    exact_o, exact_state = run_exactly_in_chunks(cases.judge_arguments(arguments))
    compare.assert_close(results[0], exact_o, tolerance.o, f"o {what}")
    compare.assert_close(results[1], exact_state, tolerance.state, f"final_state {what}")


@pytest.mark.fault("host synchronisation that breaks capture")
def test_a_graph_of_a_call_in_segments_replays_with_new_contents():
    if expected_path() != "hopper":
        pytest.skip("only the Hopper kernel cuts sequences into segments")

    def build(seed):
        case = cases.Case(cases.caller("1-kimi-linear"), "dense", "long-memory")
        return cases.build(case, tokens=2 * ops.MIN_SEGMENTED_TOKENS, heads=2, device=DEVICE, seed=seed).arguments

    arguments = build(31)
    with OperatorCalls() as operator:
        graph, results = capture(arguments)
    assert operator.calls and all(call["segments"] > 1 for call in operator.calls)
    for seed in (32, 33):
        copy_into(arguments, build(seed))
        check_replay(graph, results, arguments, "of a replay")


@pytest.mark.fault("host synchronisation that breaks capture")
def test_a_graph_of_a_call_in_turns_replays_with_new_contents(monkeypatch):
    if expected_path() != "hopper":
        pytest.skip("only the Hopper kernel runs heads in turns")
    monkeypatch.setattr(ops, "MIN_TURN_TOKENS", 32)

    def build(seed):
        case = cases.Case(cases.caller("3-kimi-k3"), "dense", "randn")
        return cases.build(case, tokens=300, heads=heads_in_turns(3), device=DEVICE, seed=seed).arguments

    arguments = build(36)
    with OperatorCalls() as operator:
        graph, results = capture(arguments)
    assert operator.calls and all(call["turns"] == 3 for call in operator.calls)
    for seed in (37, 38):
        copy_into(arguments, build(seed))
        check_replay(graph, results, arguments, "of a replay", compare.CUDA_FORWARD_FEW_TERMS)


@pytest.mark.fault("stale metadata in a replay")
def test_a_graph_of_packed_segments_reads_the_boundaries_of_its_moment():
    if expected_path() != "hopper":
        pytest.skip("only the Hopper kernel cuts sequences into segments")
    case = cases.Case(cases.caller("1-kimi-linear-first"), "dense", "long-memory")
    total = 3 * ops.MIN_SEGMENTED_TOKENS
    arguments = cases.build(case, tokens=total, heads=2, device=DEVICE, seed=34).arguments
    arguments["cu_seqlens"] = torch.tensor([0, total // 2, total], device=DEVICE)
    with OperatorCalls() as operator:
        graph, results = capture(arguments)
    assert operator.calls and all(call["segments"] > 1 for call in operator.calls)
    for boundaries in ([0, 17, total], [0, 0, total - 100], [0, total - 1, total]):
        arguments["cu_seqlens"].copy_(torch.tensor(boundaries))
        check_replay(graph, results, arguments, f"with {boundaries}")


def test_a_graph_that_feeds_its_state_back_is_a_loop_over_the_tokens():
    # As a server prefills in parts: one graph of one part, the state stays where it is.
    case = cases.Case(cases.caller("1-kimi-linear"), "dense", "long-memory")
    parts, length = 4, 128
    whole = cases.build(case, tokens=parts * length, heads=4, device=DEVICE, seed=35).arguments
    part = dict(whole, initial_state=whole["initial_state"].clone())
    part |= {name: whole[name][:, :length].clone() for name in cases.TOKENWISE}
    run_on_kernels(part)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = run_on_kernels(part)
        part["initial_state"].copy_(state)

    outputs = []
    for start in range(0, parts * length, length):
        for name in cases.TOKENWISE:
            part[name].copy_(whole[name][:, start : start + length])
        graph.replay()
        outputs.append(o.clone())

    exact_o, exact_state = run_exactly(cases.judge_arguments(whole))
    compare.assert_close(torch.cat(outputs, dim=1), exact_o, compare.CUDA_FORWARD.o, "o in parts")
    compare.assert_close(state, exact_state, compare.CUDA_FORWARD.state, "final_state in parts")


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check_compiled(function, arguments: dict) -> None:
    """`function` of v and the rest returns (2 * o, state) of a call with 2 * v; judged by the recurrence."""
    exact_o, exact_state = run_exactly(cases.judge_arguments(arguments | {"v": 2 * arguments["v"]}))
    for _ in range(3):  # compiling, then twice what was compiled
        before = served()
        with torch.no_grad():
            o, state = function(arguments)
        assert served() == before + 1 and fla_kda_backend.last_dispatch().path == expected_path()
        compare.assert_close(o.double() / 2, exact_o, compare.CUDA_FORWARD_FEW_TERMS.o, "o")
        compare.assert_close(state, exact_state, compare.CUDA_FORWARD_FEW_TERMS.state, "final_state")


# "inductor" compiles Triton code for what is around the call, a matter of ten seconds; one shape shows it.
@pytest.mark.fault("graph breaks under torch.compile")
@pytest.mark.parametrize(
    "shape, backend", [("few-heads", "aot_eager"), ("packed", "aot_eager"), ("many-heads", "inductor")]
)
def test_the_public_function_is_in_a_whole_graph(shape, backend, fresh_compiler):
    def around(arguments):
        o, state = fla_kda_backend.chunk_kda(**{**arguments, "v": 2 * arguments["v"]})
        return 2 * o, state

    check_compiled(torch.compile(around, fullgraph=True, backend=backend), arguments_of(shape))


class Layer(torch.nn.Module):
    """What a model makes of FLA's function: projections before and after, the gate in the kernel."""

    def __init__(self, chunk_kda, width: int = 256, heads: int = 2):
        super().__init__()
        self.chunk_kda, self.heads = chunk_kda, heads
        inner = heads * cases.HEAD_DIM
        self.projections = torch.nn.ModuleList(torch.nn.Linear(width, inner, bias=False) for _ in range(4))
        self.to_beta = torch.nn.Linear(width, heads, bias=False)
        self.to_output = torch.nn.Linear(inner, width, bias=False)
        self.A_log = torch.nn.Parameter(torch.zeros(heads))
        self.dt_bias = torch.nn.Parameter(torch.zeros(inner))

    def forward(self, x):
        q, k, v, g = (project(x).unflatten(-1, (self.heads, -1)) for project in self.projections)
        o, _ = self.chunk_kda(
            q=q, k=k, v=v, g=g, beta=self.to_beta(x), A_log=self.A_log, dt_bias=self.dt_bias,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        return self.to_output(o.flatten(-2))


def exact_layer(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """The layer in bf16 but for the recurrence, which is exact."""
    exact = Layer(lambda **arguments: (run_exactly(arguments)[0].bfloat16(), None)).to(x.device, torch.bfloat16)
    exact.load_state_dict(layer.state_dict())
    with torch.no_grad():
        return exact(x)


# Two roundings to bf16, of o and of the output: the products after the kernel average over hundreds of terms.
LAYER = 1e-2


@pytest.mark.parametrize("function", ["fla_kda_backend", "fla.ops.kda"])
@pytest.mark.parametrize("around", ["compile", "autocast", "inference_mode"])
def test_a_layer_that_calls_us_is_served_and_right(function, around, fresh_compiler):
    pytest.importorskip("fla.ops.kda", reason="flash-linear-attention is not installed")
    torch.manual_seed(8)
    layer = Layer(functions()[function]).to(DEVICE, torch.bfloat16)
    x = torch.randn(2, 150, 256, device=DEVICE, dtype=torch.bfloat16)
    expected = exact_layer(layer, x)
    before = served()

    if around == "compile":
        # FLA takes its own function out of graphs, so that its callers' graphs break there; ours do not.
        compiled = torch.compile(layer, fullgraph=function == "fla_kda_backend", backend="aot_eager")
        with torch.no_grad():
            results = [compiled(x), compiled(x)]
    elif around == "autocast":
        layer.float()  # parameters in fp32, products in bf16 by autocast, as trainers keep them
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            results = [layer(x)]
    else:
        with torch.inference_mode():
            results = [layer(x.clone())]

    assert served() == before + len(results) and fla_kda_backend.last_dispatch().path == expected_path()
    for result in results:
        compare.assert_close(result, expected, LAYER, "the layer's output")


@pytest.mark.fault("grad modes")
@pytest.mark.parametrize("shape", ["few-heads", "packed"])
def test_grad_modes_and_autocast_do_not_change_a_bit(shape):
    arguments = arguments_of(shape)
    expected = run_on_kernels(arguments)
    with torch.inference_mode():
        inside = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        assert_same(run_on_kernels(inside), expected, "in inference mode")
    with torch.autocast("cuda", torch.float16):
        assert_same(run_on_kernels(arguments), expected, "under autocast")
    before = served()
    with torch.enable_grad():  # and no input that requires a gradient
        assert_same(fla_kda_backend.chunk_kda(**arguments), expected, "with gradients enabled")
    assert served() == before + 1


# --- two GPUs ---------------------------------------------------------------------------------------------------------

two_gpus = pytest.mark.two_gpus


@pytest.fixture
def other() -> torch.device:
    """The second GPU, while the first is current, before and after the test."""
    assert torch.cuda.current_device() == 0
    yield torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0, "a call has changed the current device"


@pytest.mark.fault("the wrong device")
@two_gpus
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", ["fla_kda_backend", "fla.ops.kda"])
def test_tensors_on_a_device_that_is_not_current_run_there(shape, function, other):
    pytest.importorskip("fla.ops.kda", reason="flash-linear-attention is not installed")
    expected = run_on_kernels(arguments_of(shape))
    arguments, before = arguments_of(shape, other), served()

    with torch.no_grad():
        o, state = functions()[function](**arguments)

    assert served() == before + 1
    assert o.device == other and state.device == other
    assert_same((o, state), expected)


@two_gpus
def test_tensors_on_the_first_device_run_there_while_the_second_is_current(other):
    expected = run_on_kernels(arguments_of("packed"))
    arguments = arguments_of("packed")
    with torch.cuda.device(other):
        result = run_on_kernels(arguments)
        assert torch.cuda.current_device() == 1
    assert result[0].device.index == 0
    assert_same(result, expected)


@two_gpus
def test_segments_are_cut_on_a_device_that_is_not_current(other):
    if expected_path() != "hopper":
        pytest.skip("only the Hopper kernel cuts sequences into segments")
    case = cases.Case(cases.caller("1-kimi-linear"), "dense", "long-memory")
    call = cases.build(case, tokens=ops.MIN_SEGMENTED_TOKENS, heads=2, device=other, seed=36)
    with OperatorCalls() as operator:
        o, _ = run_on_kernels(call.arguments)
    assert operator.calls[0]["segments"] > 1
    exact_o, _ = run_exactly_in_chunks(call.judge)
    compare.assert_close(o, exact_o, compare.CUDA_FORWARD.o, "o on the second GPU")


@two_gpus
def test_a_side_stream_of_the_other_device_keeps_its_order(other):
    arguments = arguments_of("few-heads", other)
    expected = run_on_kernels(arguments)
    late = arguments["v"].clone()
    arguments["v"] = torch.full_like(late, float("nan"))
    torch.cuda.synchronize(other)

    stream = torch.cuda.Stream(other)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE_CYCLES)
        arguments["v"].copy_(late)
        # The stream of the tensors' device counts, whatever device is current.
        with torch.cuda.device(0):
            result = run_on_kernels(arguments)
    stream.synchronize()

    assert_same(result, expected)


@two_gpus
def test_two_threads_on_two_devices_do_not_disturb_each_other(other, record_property):
    rounds = 100
    expected = run_on_kernels(arguments_of("many-sequences"))
    before = served()

    def work(device):
        arguments = arguments_of("many-sequences", device)
        with torch.no_grad():
            for _ in range(rounds):
                result = fla_kda_backend.chunk_kda(**arguments)
                assert result[0].device == device
                assert_same(result, expected, f"on {device}")

    run_threads(lambda: work(torch.device("cuda", 0)), lambda: work(other))
    assert served() == before + 2 * rounds
    record_property("count:calls on two GPUs at once", 2 * rounds)


@two_gpus
def test_a_graph_on_the_other_device_replays_with_new_contents(other):
    with torch.cuda.device(other):
        arguments = arguments_of("packed", other, seed=31)
        graph, results = capture(arguments)
        copy_into(arguments, arguments_of("packed", other, seed=32))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(results, run_on_kernels(arguments_of("packed", other, seed=32)))


@pytest.mark.fault("tensors on several devices")
@two_gpus
@pytest.mark.parametrize("name", ["k", "beta", "initial_state", "cu_seqlens"])
def test_tensors_spread_over_two_devices_are_refused_in_a_sentence(name, other):
    arguments = arguments_of("packed")
    arguments[name] = arguments[name].to(other)
    with environment("FLA_KDA_STRICT", "1"), torch.no_grad():
        with pytest.raises(RuntimeError, match=f"{name} is on cuda:1, q is on cuda:0"):
            fla_kda_backend.chunk_kda(**arguments)


@two_gpus
def test_compiled_code_runs_on_the_device_of_its_tensors(other, fresh_compiler):
    def around(arguments):
        o, state = fla_kda_backend.chunk_kda(**{**arguments, "v": 2 * arguments["v"]})
        return 2 * o, state

    check_compiled(torch.compile(around, fullgraph=True, backend="aot_eager"), arguments_of("packed", other))
