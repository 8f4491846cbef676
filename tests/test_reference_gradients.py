"""Are the gradients of chunked KDA those of the recurrence, for every input and any gates?"""

import math

import pytest
import torch

from tests.kdakit.compare import assert_close
from tests.reference_calls import FLOAT64, INF, random_arguments, run_chunk, run_judge, steepen

DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
# Sums over chunks and tokens in fp32: a few more of them than in the forward pass.
FLOAT32_GRADIENT = 2e-5
# o, the gradient arriving at it, and the gradient itself are each rounded to bf16 once: sqrt(3) * 1.7e-3.
BFLOAT16_GRADIENT = 4e-3

MODES = {
    "activated": {},
    "softplus": dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True),
    "bounded": dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0, safe_gate=True),
    "neg-eigval": dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
    "norm-outside": dict(use_qk_l2norm_in_kernel=False),
    "v-first": dict(state_v_first=True),
}


def arguments_of(mode: str, tokens=150, parameter_shapes=lambda HV, K: ((HV,), (HV * K,)), **sizes) -> dict:
    arguments = random_arguments(tokens, **sizes) | MODES[mode]
    HV, K = arguments["g"].shape[2:]
    if not arguments["use_qk_l2norm_in_kernel"]:
        for name in ("q", "k"):
            arguments[name] = torch.nn.functional.normalize(arguments[name], dim=-1)
    if arguments.get("use_gate_in_kernel"):
        A_log, dt_bias = parameter_shapes(HV, K)
        arguments["A_log"] = torch.linspace(-1, 2, HV, dtype=arguments["q"].dtype).reshape(A_log)
        arguments["dt_bias"] = torch.linspace(-2, 1, HV * K, dtype=arguments["q"].dtype).reshape(dt_bias)
    if arguments.get("state_v_first"):
        arguments["initial_state"] = arguments["initial_state"].transpose(-1, -2).contiguous()
    return arguments


def gradients(run, arguments: dict, covered: int | None = None) -> dict[str, torch.Tensor]:
    """Of a fixed random linear function of o and the final state, with respect to every float input there is."""
    leaves = {name: arguments[name].detach().clone().requires_grad_() for name in DIFFERENTIABLE if name in arguments}
    o, state = run(**arguments | leaves)
    random = torch.Generator().manual_seed(99)
    weight_o = torch.randn(o.shape, generator=random, dtype=torch.float64)
    weight_state = torch.randn(state.shape, generator=random, dtype=torch.float64)
    loss = (o.double() * weight_o)[:, :covered].sum() + (state.double() * weight_state).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))


def assert_same_gradients(arguments: dict, bound: float, covered: int | None = None) -> None:
    state_dtype = torch.float64 if arguments["q"].dtype == torch.float64 else torch.float32
    actual = gradients(lambda **keywords: run_chunk(state_dtype, **keywords), arguments, covered)
    exact_inputs = {name: x.double() if name in DIFFERENTIABLE else x for name, x in arguments.items()}
    exact = gradients(run_judge, exact_inputs, covered)
    for name, gradient in actual.items():
        assert gradient.dtype == arguments[name].dtype and gradient.shape == arguments[name].shape, name
        assert_close(gradient, exact[name], bound, f"gradient of {name}")


@pytest.mark.parametrize("lengths", [None, [64, 0, 70, 1, 12]], ids=["dense", "varlen"])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_match_the_recurrence(mode, lengths):
    arguments = arguments_of(mode, tokens=150 if lengths is None else sum(lengths) + 3, lengths=lengths, value_heads=4)
    assert_same_gradients(arguments, 1e3 * FLOAT64)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_in_float32(mode):
    assert_same_gradients(arguments_of(mode, value_heads=4, dtype=torch.float32), FLOAT32_GRADIENT)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_keep_the_dtypes_and_shapes_of_the_inputs(mode):
    arguments = arguments_of(
        mode, dtype=torch.bfloat16, parameter_shapes=lambda HV, K: ((1, 1, HV, 1), (HV, K)), value_heads=4
    )
    arguments["g"] = arguments["g"].float()
    if "dt_bias" in arguments:
        arguments["dt_bias"] = arguments["dt_bias"].float()
    assert_same_gradients(arguments, BFLOAT16_GRADIENT)


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("gates", ["all-80", "one-channel-80", "bursts", "some-inf", "all-inf"])
def test_gradients_under_steep_gates(gates, chunk_size):
    arguments = arguments_of("activated", tokens=100)
    arguments["chunk_size"] = chunk_size
    steepen(arguments["g"], gates)
    assert_same_gradients(arguments, 1e3 * FLOAT64)


@pytest.mark.parametrize("mode", ["softplus", "bounded"])
def test_gradients_under_infinite_raw_gates(mode):
    arguments = arguments_of(mode, tokens=70)
    arguments["g"][:, 10::7, :, :4] = INF
    arguments["g"][:, 12::7, :, 2:6] = -INF
    assert_same_gradients(arguments, 1e3 * FLOAT64)


@pytest.mark.parametrize("mode", ["activated", "softplus", "bounded"])
def test_rows_outside_every_sequence_have_zero_gradients(mode):
    lengths = [20, 0, 19]
    arguments = arguments_of(mode, tokens=45, lengths=lengths)
    clean = gradients(run_chunk, arguments, covered=39)
    for name in ("q", "k", "v", "g", "beta"):
        arguments[name][:, 39:] = math.nan
    dirty = gradients(run_chunk, arguments, covered=39)
    for name, gradient in dirty.items():
        assert torch.equal(gradient, clean[name]), name
        if name in ("q", "k", "v", "g", "beta"):
            assert not gradient[:, 39:].any(), name


@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode):
    arguments = arguments_of(mode, tokens=5, heads=1, value_heads=2, key_dim=2, value_dim=3)
    names = [name for name in DIFFERENTIABLE if name in arguments]
    leaves = [arguments.pop(name).requires_grad_() for name in names]

    def run(*values):
        return run_chunk(torch.float64, **arguments, **dict(zip(names, values)))

    assert torch.autograd.gradcheck(run, leaves)


def test_unused_final_state_and_no_initial_state():
    arguments = arguments_of("activated", tokens=70)
    del arguments["initial_state"]
    q = arguments["q"].requires_grad_()
    o, state = run_chunk(**arguments | {"output_final_state": False})
    assert state is None
    o.sum().backward()
    exact_q = q.detach().clone().requires_grad_()
    run_judge(**arguments | {"q": exact_q})[0].sum().backward()
    assert_close(q.grad, exact_q.grad, 1e3 * FLOAT64, "gradient of q")


def test_no_graph_without_gradients():
    arguments = arguments_of("activated", tokens=20)
    assert not run_chunk(**arguments)[0].requires_grad
    arguments["v"].requires_grad_()
    with torch.no_grad():
        assert not run_chunk(**arguments)[0].requires_grad
    assert run_chunk(**arguments)[0].requires_grad
