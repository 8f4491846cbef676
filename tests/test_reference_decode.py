"""Does decode on the CPU keep the contract of FLA 0.6.0's inner function: results, states in place, pools, refusals?"""

import inspect
import math

import pytest
import torch

from fla_kda_backend.reference import declines_decode, fused_recurrent_kda_fwd
from tests.kdakit.compare import assert_close
from tests.reference_calls import BFLOAT16, FLOAT32, FLOAT64, random_arguments, run_judge

MODES = {
    "activated": {},
    "softplus": dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True),
    "bounded": dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0),
    "bounded-no-A_log": dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0),
    "neg-eigval": dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
    "norm-outside": dict(use_qk_l2norm_in_kernel=False),
}


def decode_arguments(mode="activated", tokens=1, **sizes) -> dict:
    """Keywords that the judge takes too: states returned, not updated in place."""
    arguments = random_arguments(tokens, value_heads=4, **{"dtype": torch.float32} | sizes) | MODES[mode]
    HV, K = arguments["g"].shape[2:]
    if arguments.get("use_gate_in_kernel"):
        arguments["A_log"] = None if mode == "bounded-no-A_log" else torch.linspace(-1, 2, HV)
        arguments["dt_bias"] = torch.linspace(-2, 1, HV * K)
    return arguments


def run_decode(**arguments) -> tuple:
    assert declines_decode(**arguments) is None
    return fused_recurrent_kda_fwd(**arguments)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
@pytest.mark.parametrize("mode", MODES)
def test_matches_the_recurrence(mode, v_first, tokens):
    arguments = decode_arguments(mode, tokens, batch=3)
    if v_first:
        arguments["initial_state"] = arguments["initial_state"].transpose(-1, -2).contiguous()
        arguments["state_v_first"] = True
    o, state = run_decode(**arguments, inplace_final_state=False)
    exact_o, exact_state = run_judge(**arguments)
    assert_close(o, exact_o, FLOAT32, "o")
    assert_close(state, exact_state, FLOAT32, "final_state")
    assert state.dtype == torch.float32 and state.is_contiguous()


def test_packed_sequences():
    arguments = decode_arguments(tokens=14, lengths=[3, 0, 8, 1])
    for name in ("q", "k", "v", "g", "beta"):
        arguments[name][:, 12:] = math.nan
    arguments["cu_seqlens"] = arguments["cu_seqlens"].int()
    o, state = run_decode(**arguments, inplace_final_state=False)
    exact_o, exact_state = run_judge(**arguments)
    assert_close(o, exact_o, FLOAT32, "o")
    assert_close(state, exact_state, FLOAT32, "final_state")
    assert torch.equal(state[1], arguments["initial_state"][1])


def test_float64_inputs_are_computed_in_float64():
    arguments = decode_arguments(tokens=4, dtype=torch.float64)
    o, _ = run_decode(**arguments, inplace_final_state=False)
    assert_close(o, run_judge(**arguments)[0], FLOAT64, "o")


def test_o_has_the_dtype_of_v():
    arguments = decode_arguments(tokens=2)
    arguments["v"] = arguments["v"].bfloat16()
    o, state = run_decode(**arguments, inplace_final_state=False)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert_close(o, run_judge(**arguments)[0], BFLOAT16, "o")


def test_no_state_asked_for():
    arguments = decode_arguments(tokens=3)
    del arguments["initial_state"]
    arguments["output_final_state"] = False
    o, state = run_decode(**arguments, inplace_final_state=False)
    assert state is None
    assert_close(o, run_judge(**arguments)[0], FLOAT32, "o")


@pytest.mark.parametrize("dtype, bound", [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)], ids=["fp32", "bf16"])
def test_the_state_is_updated_in_place_by_default(dtype, bound):
    arguments = decode_arguments(batch=2)
    arguments["initial_state"] = arguments["initial_state"].to(dtype)
    exact_o, exact_state = run_judge(**arguments)
    others = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    o, state = run_decode(**arguments)
    assert state is arguments["initial_state"]
    assert_close(o, exact_o, FLOAT32, "o")
    assert_close(state, exact_state, bound, "state")
    for name, x in others.items():
        assert name == "initial_state" or torch.equal(arguments[name], x), name


def test_inputs_stay_when_the_state_is_returned():
    arguments = decode_arguments(tokens=3, batch=2)
    copies = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    run_decode(**arguments, inplace_final_state=False)
    for name, x in copies.items():
        assert torch.equal(arguments[name], x), name


def test_out_is_written_where_there_are_tokens():
    arguments = decode_arguments(tokens=7, lengths=[2, 3])
    out = torch.full_like(arguments["v"], 7.0)
    o, _ = run_decode(**arguments, inplace_final_state=False, out=out)
    assert o is out and (out[:, 5:] == 7).all()
    assert_close(out[:, :5], run_judge(**arguments)[0][:, :5], FLOAT32, "out")


def test_one_step_size_per_value_channel():
    arguments = decode_arguments("softplus", tokens=4)
    B, T, HV, V = arguments["v"].shape
    arguments["beta"] = torch.randn(B, T, HV, V, generator=torch.Generator().manual_seed(3))
    o, state = run_decode(**arguments, inplace_final_state=False)
    for channel in range(V):  # value channels do not mix: each is a call of its own
        one = dict(arguments, v=arguments["v"][..., channel, None], beta=arguments["beta"][..., channel])
        one["initial_state"] = arguments["initial_state"][..., channel, None]
        exact_o, exact_state = run_judge(**one)
        assert_close(o[..., channel, None], exact_o, FLOAT32, "o")
        assert_close(state[..., channel, None], exact_state, FLOAT32, "final_state")


def pool_of(arguments: dict, slots: list[int], size: int = 12) -> torch.Tensor:
    random = torch.Generator().manual_seed(5)
    pool = torch.randn(size, *arguments["initial_state"].shape[1:], generator=random)
    pool[slots] = arguments["initial_state"]
    return pool


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_states_live_in_a_pool(index_dtype):
    arguments = decode_arguments(batch=3)
    pool = pool_of(arguments, [4, 0, 9])
    before = pool.clone()
    exact_o, exact_state = run_judge(**arguments)
    arguments["initial_state"] = pool
    o, states = run_decode(**arguments, ssm_state_indices=torch.tensor([4, 0, 9], dtype=index_dtype))
    assert states is pool
    assert_close(o, exact_o, FLOAT32, "o")
    assert_close(pool[[4, 0, 9]], exact_state, FLOAT32, "states")
    rest = [slot for slot in range(12) if slot not in (4, 0, 9)]
    assert torch.equal(pool[rest], before[rest])


@pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
def test_speculative_decoding_stores_the_state_after_every_token(v_first):
    lengths = [3, 2, 0]
    arguments = decode_arguments(tokens=sum(lengths), lengths=lengths)
    if v_first:
        arguments.update(state_v_first=True, initial_state=arguments["initial_state"].transpose(-1, -2))
    # Two and one tokens of the last round were accepted: start from slots 7 and 5. The third sequence is padding.
    slots = torch.tensor([[3, 7, 8], [5, 6, -1], [-1, -1, -1]])
    pool = pool_of(arguments, [7, 5, 11])
    before = pool.clone()
    exact_o, _ = run_judge(**arguments)
    o, _ = run_decode(
        **arguments | {"initial_state": pool}, ssm_state_indices=slots, num_accepted_tokens=torch.tensor([2, 1, 0])
    )
    assert_close(o, exact_o, FLOAT32, "o")
    starts = [0, 3]
    for n in range(2):
        for i in range(lengths[n]):
            rows = slice(starts[n], starts[n] + i + 1)
            prefix = {name: arguments[name][:, rows] for name in ("q", "k", "v", "g", "beta")}
            prefix.update(initial_state=arguments["initial_state"][n : n + 1], cu_seqlens=None)
            exact = run_judge(**arguments | prefix)[1][0]
            assert_close(pool[slots[n, i]], exact, FLOAT32, f"state of sequence {n} after token {i}")
    untouched = [0, 1, 2, 4, 9, 10, 11]
    assert torch.equal(pool[untouched], before[untouched])


def test_states_of_a_pool_can_be_returned():
    arguments = decode_arguments(batch=2)
    pool = pool_of(arguments, [1, 3])
    before = pool.clone()
    exact_o, exact_state = run_judge(**arguments)
    arguments["initial_state"] = pool
    o, states = run_decode(**arguments, ssm_state_indices=torch.tensor([1, 3]), inplace_final_state=False)
    assert_close(o, exact_o, FLOAT32, "o")
    assert_close(states, exact_state, FLOAT32, "states")
    assert torch.equal(pool, before)


def test_no_gradient_is_recorded():
    arguments = decode_arguments()
    arguments["v"].requires_grad_()
    o, state = run_decode(**arguments, inplace_final_state=False)
    assert not o.requires_grad and not state.requires_grad


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(a_new_flag=True), "unknown argument a_new_flag"),
        (dict(q=torch.empty(2, 1, 2, 16, device="meta")), "q is on meta"),
        (dict(v=torch.ones(2, 1, 4, 12, dtype=torch.int32)), "v is torch.int32"),
        (dict(k=torch.ones(2, 1, 2, 15)), "do not fit"),
        (dict(v=torch.ones(2, 1, 3, 12)), "no multiple"),
        (dict(g=torch.ones(2, 1, 2, 16)), "g does not fit"),
        (dict(beta=torch.ones(2, 1, 2)), "beta does not fit"),
        (dict(use_gate_in_kernel=True), "without A_log"),
        (dict(use_gate_in_kernel=True, A_log=torch.ones(3)), "A_log has 3"),
        (dict(use_gate_in_kernel=True, A_log=torch.ones(4), dt_bias=torch.ones(16)), "dt_bias has 16"),
        (dict(out=torch.ones(2, 1, 4, 16)), "shape of v"),
        (dict(initial_state=None), "no initial_state"),
        (dict(initial_state=torch.ones(2, 4, 12, 16)), "initial_state of shape"),
        (dict(initial_state=torch.ones(3, 4, 16, 12)), "3 initial states for 2 sequences"),
        (dict(initial_state=torch.ones(2, 4, 16, 12, dtype=torch.int64)), "not a float"),
        (dict(cu_seqlens=torch.tensor([0, 1])), "batch of 1"),
        (dict(ssm_state_indices=torch.tensor([0.0, 1.0])), "not int32"),
        (dict(ssm_state_indices=torch.tensor([0, 2])), "outside the 2 states"),
        (dict(ssm_state_indices=torch.tensor([0, -1])), "outside the 2 states"),
        (dict(ssm_state_indices=torch.tensor([0])), "for 2 sequences"),
        (dict(ssm_state_indices=torch.arange(4).view(2, 2).t()), "not contiguous"),
        (dict(ssm_state_indices=torch.tensor([0, 1]), num_accepted_tokens=torch.tensor([1, 2])), "outside 1..1"),
        (dict(ssm_state_indices=torch.tensor([0, 1]), num_accepted_tokens=torch.tensor([1])), "num_accepted_tokens of"),
        (
            dict(ssm_state_indices=torch.tensor([0, 1]), inplace_final_state=False, output_final_state=False),
            "nowhere to store",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_served_is_declined_with_a_reason(changes, reason):
    arguments = decode_arguments(batch=2) | changes
    before = None if arguments["initial_state"] is None else arguments["initial_state"].clone()
    assert reason in declines_decode(**arguments)
    with pytest.raises(ValueError, match="does not serve this call"):
        fused_recurrent_kda_fwd(**arguments)
    assert before is None or torch.equal(arguments["initial_state"], before)


def test_several_tokens_need_a_slot_each():
    arguments = decode_arguments(tokens=3)
    slots = torch.tensor([0])
    assert "1 state indices a sequence for 3 tokens" in declines_decode(**arguments, ssm_state_indices=slots)
    returned = dict(ssm_state_indices=torch.zeros(1, 3, dtype=torch.int64), inplace_final_state=False)
    assert "room for one a sequence" in declines_decode(**arguments, **returned)


def test_signature_is_that_of_fla():
    fused_recurrent = pytest.importorskip("fla.ops.kda.fused_recurrent", reason="FLA is not installed")
    theirs = getattr(fused_recurrent, "fused_recurrent_kda_fwd", None)
    if theirs is None or "ssm_state_indices" not in inspect.signature(theirs).parameters:
        pytest.skip("this FLA version has no decode function of 0.6.0's form")
    expected = [(p.name, p.default) for p in inspect.signature(theirs).parameters.values() if p.kind != p.VAR_KEYWORD]
    for ours in (fused_recurrent_kda_fwd, declines_decode):
        parameters = inspect.signature(ours).parameters.values()
        assert [(p.name, p.default) for p in parameters if p.kind != p.VAR_KEYWORD] == expected
