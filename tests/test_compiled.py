"""Does `torch.compile` keep `fla_kda_backend.chunk_kda` in its graph, with the results and the decisions of a call
outside? Here with the reference on CPU tensors; tests/gpu/test_concurrency.py does the same with the kernels."""

import pytest
import torch

import fla_kda_backend
from fla_kda_backend import compiled
from fla_kda_backend.interface import chunk_kda as public_chunk_kda
from tests.kdakit import cases, compare
from tests.kdakit.run import environment

TOKENS, HEAD_DIM = 70, 32
# The judge is float64, the reference computes in float32.
FLOAT32 = 1e-5
FORMS = ("1-kimi-linear", "2-transformers-no-cache", "3-kimi-k3", "5-fla-neg-eigval", "5-fla-gva")


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(name: str, layout: str = "dense-tail", seed: int = 3) -> cases.BuiltCall:
    case = cases.Case(cases.caller(name), layout, "randn")
    return cases.build(case, tokens=TOKENS, dtype=torch.float32, head_dim=HEAD_DIM, seed=seed)


def compiled_call(fullgraph: bool = True, backend: str = "aot_eager"):
    """A compiled function with arithmetic before and after the call, so that there is a graph to break."""

    def around(arguments):
        o, *others = fla_kda_backend.chunk_kda(**{**arguments, "v": 2 * arguments["v"]})
        return (o + 1, *others)

    return torch.compile(around, fullgraph=fullgraph, backend=backend)


def served() -> int:
    return fla_kda_backend.dispatch_counts()["reference"]


def check(call: cases.BuiltCall, results: tuple) -> None:
    from fla_kda_backend.reference import recurrent_kda

    exact_o, exact_state = recurrent_kda(**{**call.judge, "v": 2 * call.judge["v"]})
    o, state = results
    assert o.dtype == torch.float32 and o.is_contiguous()
    compare.assert_close(o - 1, exact_o, 10 * FLOAT32, "o")  # the 1 that was added has been rounded with it
    assert (state is None) == (exact_state is None)
    if state is not None:
        assert state.dtype == torch.float32 and state.shape == exact_state.shape
        compare.assert_close(state, exact_state, FLOAT32, "final_state")


@pytest.mark.parametrize("layout", ["dense-tail", "varlen"])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings("ignore:.*transpose_state_layout.*:DeprecationWarning")
@torch.no_grad()
def test_every_form_of_call_is_one_operator_of_a_whole_graph(name, layout):
    call = build(name, layout)
    function = compiled_call()

    for repeat in range(2):
        before = served()
        check(call, function(call.arguments))
        assert served() == before + 1, "each run of the graph is one call that was decided on and counted"
    assert fla_kda_backend.last_dispatch().path == "reference"


@torch.no_grad()
def test_the_graph_holds_the_operator_and_nothing_of_its_inside():
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    arguments = build("3-kimi-k3").arguments
    arguments["state_v_first"] = arguments.pop("transpose_state_layout")
    torch.compile(lambda: fla_kda_backend.chunk_kda(**arguments), fullgraph=True, backend=keep)()

    targets = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert len(graphs) == 1
    assert [target for target in targets if "fla_kda_backend" in str(target)] == [torch.ops.fla_kda_backend.chunk_kda]
    assert len(targets) <= 3, f"more than the operator and its results: {targets}"


@torch.no_grad()
def test_other_sizes_and_contents_reuse_the_graph_or_compile_anew_but_stay_right():
    function = torch.compile(
        lambda arguments: fla_kda_backend.chunk_kda(**arguments), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for tokens in (40, 70, 133):
        case = cases.Case(cases.caller("1-kimi-linear"), "varlen", "randn")
        call = cases.build(case, tokens=tokens, dtype=torch.float32, head_dim=HEAD_DIM, seed=tokens)
        o, state = function(call.arguments)
        expected = public_chunk_kda(**call.arguments)
        assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])
        call.arguments["cu_seqlens"][1] -= 3  # other contents, the same graph
        o, state = function(call.arguments)
        expected = public_chunk_kda(**call.arguments)
        assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])


def test_intermediate_states_are_results_of_the_operator_in_inference_mode():
    arguments = build("5-fla-gva").arguments | {"return_intermediate_states": True, "chunk_size": 32}
    with torch.inference_mode():
        results = compiled_call()(arguments)
        expected = public_chunk_kda(**{**arguments, "v": 2 * arguments["v"]})
    assert len(results) == 3 and results[2].shape == expected[2].shape
    assert torch.equal(results[2], expected[2]) and torch.equal(results[0], expected[0] + 1)


@torch.no_grad()
def test_switches_count_when_the_graph_runs_and_not_when_it_was_compiled(monkeypatch):
    call = build("1-kimi-linear")
    function = compiled_call()
    function(call.arguments)

    shape = call.arguments["v"].shape
    left_to_fla = []

    def answer_of_fla(arguments, reason):
        left_to_fla.append(reason)
        return torch.full(shape, 7.0), torch.zeros(1, shape[2], HEAD_DIM, HEAD_DIM)

    monkeypatch.setattr("fla_kda_backend.interface._call_fla", answer_of_fla)
    before = served()
    with environment("FLA_KDA_BACKEND", "0"):
        o, _ = function(call.arguments)
    assert left_to_fla == ["FLA_KDA_BACKEND=0"] and torch.equal(o, torch.full(shape, 8.0))
    assert served() == before


def test_gradients_break_the_graph_and_are_those_of_a_call_outside():
    call = build("5-fla-gva")

    def loss(function):
        leaves = {name: call.arguments[name].clone().requires_grad_() for name in ("q", "v", "g", "A_log")}
        o, state = function({**call.arguments, **leaves})
        (o.square().sum() + state.sum()).backward()
        return [leaf.grad for leaf in leaves.values()]

    def outside(arguments):
        o, state = public_chunk_kda(**{**arguments, "v": 2 * arguments["v"]})
        return o + 1, state

    before = served()
    gradients = loss(compiled_call(fullgraph=False))
    assert served() == before + 1
    for gradient, expected in zip(gradients, loss(outside), strict=True):
        compare.assert_close(gradient, expected, FLOAT32, "a gradient through compiled code")


def test_fullgraph_says_why_a_call_that_needs_gradients_breaks_the_graph():
    arguments = build("1-kimi-linear").arguments
    arguments["q"] = arguments["q"].requires_grad_()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="only without gradients"):
        compiled_call()(arguments)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"cp_context": object()}, "cp_context is given"),
        ({"use_magic": True}, "use_magic is unknown"),
        ({"q": [1.0]}, "q is a list"),
        ({"q": None}, "q is a NoneType"),
        ({"state_v_first": 1}, "state_v_first is a int"),
        ({"q": torch.zeros(3, 2)}, "four dimensions"),
        ({"return_intermediate_states": True, "cu_seqlens": torch.tensor([0, 4])}, "values of cu_seqlens"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_calls_that_an_operator_cannot_stand_for_are_known(changes, reason):
    assert reason in compiled.why_not_an_operator(_all_arguments() | changes)


def _all_arguments() -> dict:
    tensors = {name: torch.zeros(1, 4, 1, 8) for name in ("q", "k", "v", "g")}
    arguments = {name: (False if kind == "bool" else None) for name, kind in compiled.PARAMETERS.items()}
    del arguments["chunk_size"], arguments["transpose_state_layout"]  # through **kwargs, where they are given
    return {**arguments, **tensors, "beta": torch.zeros(1, 4, 1), "cp_context": None}


def test_a_plain_call_can_be_an_operator():
    assert compiled.why_not_an_operator(_all_arguments()) is None


def test_the_operator_has_the_arguments_of_the_public_function():
    from fla_kda_backend.call import THROUGH_KWARGS, Signature

    public = set(Signature.of(public_chunk_kda).positional) | THROUGH_KWARGS
    assert set(compiled.PARAMETERS) == public - {"cp_context"}


@torch.no_grad()
@pytest.mark.parametrize("name, layout", [("1-kimi-linear", "dense-tail"), ("5-fla-gva", "varlen")])
def test_pytorchs_own_checks_of_an_operator_pass(name, layout):
    call = build(name, layout)
    given = [call.arguments.get(parameter, False if kind == "bool" else None)
             for parameter, kind in compiled.PARAMETERS.items()]  # fmt: skip
    operator = torch.ops.fla_kda_backend.chunk_kda.default
    torch.library.opcheck(operator, tuple(given), test_utils=("test_schema", "test_faketensor"))


@torch.no_grad()
def test_errors_of_a_call_reach_the_caller_of_the_compiled_code():
    arguments = build("1-kimi-linear", "varlen").arguments
    arguments["cu_seqlens"] = arguments["cu_seqlens"].flip(0)
    with pytest.raises(ValueError, match="cu_seqlens"):
        compiled_call()(arguments)


def test_compiling_is_not_loaded_by_a_plain_call():
    import subprocess
    import sys

    code = (
        "import sys, torch, fla_kda_backend\n"
        "x = torch.zeros(1, 4, 1, 8)\n"
        "fla_kda_backend.chunk_kda(x, x, x, x, x[..., 0])\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

