"""Does chunked KDA on the CPU give the recurrence's results, for every form of call and any gates?"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kdakit import cases
from tests.kdakit.compare import assert_close
from tests.kdakit.run import run_exactly, run_exactly_in_chunks
from tests.reference_calls import BFLOAT16, FLOAT32, FLOAT64, INF, random_arguments, run_chunk, run_judge, steepen


def assert_agrees(bound_o: float, bound_state: float, state_dtype=torch.float32, **arguments) -> None:
    o, state = run_chunk(state_dtype, **arguments)
    exact_o, exact_state = run_judge(**arguments)
    assert_close(o, exact_o, bound_o, "o")
    if exact_state is None:
        assert state is None
    else:
        assert_close(state, exact_state, bound_state, "final_state")


@pytest.mark.parametrize("case", list(cases.quick_cases()), ids=str)
def test_every_caller_layout_and_gate(case):
    built = cases.build(case, tokens=160, heads=2, head_dim=32)
    o, state = run_chunk(**built.arguments)
    exact_o, exact_state = run_judge(**built.arguments)
    assert_close(o, exact_o, BFLOAT16, "o")
    assert o.dtype == torch.bfloat16 and o.shape == built.arguments["v"].shape
    assert not o[:, built.covered:].any()
    if case.caller.state_out:
        assert_close(state, exact_state, FLOAT32, "final_state")
        assert state.dtype == torch.float32 and state.is_contiguous()
    else:
        assert state is None


@pytest.mark.parametrize("case", list(cases.all_cases(layouts=("dense-tail", "varlen-empty"))), ids=str)
def test_float64_inputs_are_computed_in_float64(case):
    built = cases.build(case, tokens=80, heads=2, head_dim=16, dtype=torch.float64)
    assert_agrees(FLOAT64, FLOAT64, torch.float64, **built.arguments)


@pytest.mark.parametrize("case", list(cases.all_cases(layouts=("varlen",), gates=("long-memory", "mixed"))), ids=str)
def test_the_judge_of_long_sequences_is_the_recurrence(case):
    judge = cases.build(case, tokens=300, heads=2, head_dim=16).judge
    o, state = run_exactly_in_chunks(judge)
    exact_o, exact_state = run_exactly(judge)
    assert o.dtype == torch.float64
    assert_close(o, exact_o, FLOAT64, "o")
    if exact_state is not None:
        assert state.dtype == torch.float64
        assert_close(state, exact_state, FLOAT64, "final_state")


def test_dtypes_of_the_results():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        arguments = random_arguments(20, dtype=dtype)
        arguments["initial_state"] = arguments["initial_state"].float()
        o, state = run_chunk(**arguments)
        assert o.dtype == dtype and state.dtype == torch.float32


def test_full_precision_inputs_reach_full_precision():
    for lengths in (None, [70, 0, 1, 64, 65]):
        arguments = random_arguments(200, lengths=lengths, key_dim=64, value_dim=48, dtype=torch.float32)
        assert_agrees(FLOAT32, FLOAT32, **arguments)


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, FLOAT32), (torch.float64, FLOAT64)], ids=["fp32", "fp64"])
@pytest.mark.parametrize(
    "gates", ["all-80", "one-channel-80", "bursts", "one-head-inf", "inf-among-none", "last-token-inf"]
)
def test_steep_gates_are_exact(gates, dtype, bound, chunk_size):
    arguments = random_arguments(150, value_heads=4, dtype=dtype)
    steepen(arguments["g"], gates)
    assert_agrees(bound, bound, arguments["initial_state"].dtype, chunk_size=chunk_size, **arguments)


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
def test_infinite_raw_gates_saturate(lower_bound):
    arguments = random_arguments(70)
    arguments["g"][:, 10::7, :, :4] = INF
    arguments["g"][:, 12::7, :, 2:6] = -INF
    heads = arguments["v"].shape[2]
    arguments.update(
        use_gate_in_kernel=True, lower_bound=lower_bound, A_log=torch.rand(heads), dt_bias=torch.rand(heads * 16)
    )
    o, _ = run_chunk(**arguments)
    assert o.isfinite().all()
    assert_agrees(FLOAT64, FLOAT64, torch.float64, **arguments)


# An error of the inverse grows with the inverse of (I + L), whose entries stay below beta for unit keys; a Neumann
# series or fp16 products would be off by orders of magnitude, fp32 forward substitution by the usual ulps times the
# chunk length.
NEAR_COLLINEAR = 5e-5


@pytest.mark.parametrize("beta", [1 - 2**-12, 1.999], ids=["beta-1", "beta-2"])
@pytest.mark.parametrize("spread", [0.0, 1e-3], ids=["collinear", "near-collinear"])
def test_near_collinear_keys(beta, spread):
    arguments = random_arguments(192, key_dim=32, dtype=torch.float32)
    k = arguments["k"]
    k.copy_(k[:, :1] + spread * k)
    arguments["g"].mul_(1e-3)
    arguments["beta"].fill_(beta)
    assert_agrees(NEAR_COLLINEAR, NEAR_COLLINEAR, **arguments)


@pytest.mark.parametrize("tokens", [1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129])
def test_tails_of_any_length(tokens):
    arguments = random_arguments(tokens, batch=2)
    assert_agrees(FLOAT64, FLOAT64, torch.float64, **arguments)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_empty_sequences_keep_their_state(dtype):
    arguments = random_arguments(50, lengths=[0, 33, 0, 0, 17, 0])
    arguments["cu_seqlens"] = arguments["cu_seqlens"].to(dtype)
    _, state = run_chunk(torch.float64, **arguments)
    empty = [0, 2, 3, 5]
    assert torch.equal(state[empty], arguments["initial_state"][empty])
    assert_agrees(FLOAT64, FLOAT64, torch.float64, **arguments)
    del arguments["initial_state"]
    _, state = run_chunk(torch.float64, **arguments)
    assert not state[empty].any()
    assert_agrees(FLOAT64, FLOAT64, torch.float64, **arguments)


def test_no_tokens():
    arguments = random_arguments(0, batch=2)
    o, state = run_chunk(torch.float64, **arguments)
    assert o.shape == arguments["v"].shape and torch.equal(state, arguments["initial_state"])
    packed = random_arguments(0, lengths=[0, 0, 0])
    o, state = run_chunk(torch.float64, **packed)
    assert o.shape == packed["v"].shape and torch.equal(state, packed["initial_state"])
    no_sequences = random_arguments(3, lengths=[])
    o, state = run_chunk(torch.float64, **no_sequences)
    assert not o.any() and state.shape == (0, 2, 16, 12)


def test_rows_outside_every_sequence_never_reach_a_result():
    arguments = random_arguments(60, lengths=[20, 0, 19])
    clean_o, clean_state = run_chunk(**arguments)
    for value in (math.nan, INF, -INF):
        for name in ("q", "k", "v", "g", "beta"):
            arguments[name][:, 39:] = value
        o, state = run_chunk(**arguments)
        assert torch.equal(o, clean_o) and torch.equal(state, clean_state)
        assert not o[:, 39:].any()


def test_nan_in_one_sequence_stays_there():
    arguments = random_arguments(90, lengths=[30, 30, 30])
    clean_o, clean_state = run_chunk(**arguments)
    for name in ("q", "k", "v", "g", "beta"):
        arguments[name][:, 30:60] = math.nan
    o, state = run_chunk(**arguments)
    assert o[:, 30:60].isnan().all() and state[1].isnan().all()
    keep = torch.tensor([*range(30), *range(60, 90)])
    assert torch.equal(o[:, keep], clean_o[:, keep]) and torch.equal(state[[0, 2]], clean_state[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("border", [1, 17, 40, 64, 100])
def test_outputs_do_not_depend_on_later_tokens(border, dtype):
    arguments = random_arguments(130, dtype=dtype, key_dim=32)
    before, _ = run_chunk(**arguments)
    changed = random_arguments(130, dtype=dtype, key_dim=32, seed=1)
    for name in ("q", "k", "v", "g", "beta"):
        later = 100 * changed[name] if name in ("v", "g") else changed[name]
        arguments[name] = torch.cat((arguments[name][:, :border], later[:, border:]), 1)
    after, _ = run_chunk(**arguments)
    assert torch.equal(before[:, :border], after[:, :border])
    assert not torch.equal(before[:, border:], after[:, border:])


@pytest.mark.parametrize("parts", [[64, 64, 64, 64], [70, 1, 100, 85], [16, 0, 239, 1]], ids=str)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, FLOAT32), (torch.float64, FLOAT64)], ids=["fp32", "fp64"])
def test_prefill_can_be_split(parts, dtype, bound):
    arguments = random_arguments(sum(parts), dtype=dtype, key_dim=32)
    state_dtype = arguments["initial_state"].dtype
    whole_o, whole_state = run_chunk(state_dtype, **arguments)
    state, outputs = arguments.pop("initial_state"), []
    for part in zip(*(arguments[name].split(parts, 1) for name in ("q", "k", "v", "g", "beta"))):
        piece = arguments | dict(zip(("q", "k", "v", "g", "beta"), part))
        o, state = run_chunk(state_dtype, initial_state=state, **piece)
        outputs.append(o)
    assert_close(torch.cat(outputs, 1), whole_o, bound, "o")
    assert_close(state, whole_state, bound, "final_state")


def test_v_first_is_the_same_state_transposed():
    arguments = random_arguments(70, value_dim=16)  # K = V: shapes cannot tell the layouts apart
    o, state = run_chunk(**arguments)
    v_first = arguments["initial_state"].transpose(-1, -2).contiguous()
    o_v, state_v = run_chunk(**arguments | {"initial_state": v_first, "state_v_first": True})
    assert torch.equal(o, o_v) and torch.equal(state, state_v.transpose(-1, -2))


def test_strides_do_not_matter_and_inputs_are_left_alone():
    arguments = random_arguments(66, value_dim=16, dtype=torch.float32)
    expected = run_chunk(**arguments)
    strided = dict(arguments)
    strided["q"], strided["k"], strided["v"] = cases.as_split_views(*(arguments[name] for name in ("q", "k", "v")))
    strided["g"] = arguments["g"].repeat_interleave(2, -1)[..., ::2]
    strided["initial_state"] = arguments["initial_state"].transpose(0, 1).contiguous().transpose(0, 1)
    copies = {name: x.clone() for name, x in strided.items() if isinstance(x, torch.Tensor)}
    for actual, wanted in zip(run_chunk(**strided), expected):
        assert torch.equal(actual, wanted)
    for name, x in copies.items():
        assert torch.equal(strided[name], x), name


@pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("lengths", [None, [70, 0, 64, 31, 128, 1]], ids=["dense", "varlen"])
def test_intermediate_states_enter_each_chunk(lengths, chunk_size, v_first):
    tokens = 150 if lengths is None else sum(lengths)
    arguments = random_arguments(tokens, lengths=lengths, batch=2 if lengths is None else 1, dtype=torch.float32)
    arguments["k"] = arguments["k"].bfloat16()
    asked = arguments | {"return_intermediate_states": True, "chunk_size": chunk_size, "state_v_first": v_first}
    if v_first:
        asked["initial_state"] = arguments["initial_state"].transpose(-1, -2)
    with torch.inference_mode():
        o, state, h = run_chunk(**asked)
    assert h.dtype == torch.bfloat16
    h = h.transpose(-1, -2) if v_first else h
    expected = []
    bounds = [(b, 0, tokens) for b in range(2)]
    if lengths is not None:
        ends = arguments["cu_seqlens"].tolist()
        bounds = [(0, start, end) for start, end in zip(ends, ends[1:])]
    for n, (b, start, end) in enumerate(bounds):
        for middle in range(start, end, chunk_size):
            prefix = {name: arguments[name][b : b + 1, start:middle] for name in ("q", "k", "v", "g", "beta")}
            prefix.update(initial_state=arguments["initial_state"][n : n + 1], output_final_state=True)
            expected.append(run_judge(**prefix, use_qk_l2norm_in_kernel=True)[1])
    expected = torch.cat(expected).unflatten(0, (len(o), -1))
    assert_close(h, expected, BFLOAT16, "h")
    exact_o, exact_state = run_judge(**asked)
    assert_close(o, exact_o, FLOAT32, "o")
    assert_close(state, exact_state, FLOAT32, "final_state")


def test_intermediate_states_of_no_tokens():
    with torch.inference_mode():
        h = run_chunk(**random_arguments(0, batch=2), return_intermediate_states=True)[2]
    assert h.shape == (2, 0, 2, 16, 12)


def test_intermediate_states_only_in_inference_mode():
    arguments = random_arguments(10)
    with torch.no_grad(), pytest.raises(AssertionError, match="only allowed in inference mode"):
        run_chunk(**arguments, return_intermediate_states=True)
    with torch.inference_mode(), pytest.raises(AssertionError, match="disable_recompute=False"):
        run_chunk(**arguments, return_intermediate_states=True, disable_recompute=True)


@pytest.mark.parametrize("cu_seqlens, message", [([0, 9, 5], "decrease"), ([0, 11], "beyond"), ([2, 5], "start at 0")])
def test_refuses_malformed_cu_seqlens(cu_seqlens, message):
    arguments = random_arguments(10)
    del arguments["initial_state"]
    with pytest.raises(ValueError, match=message):
        run_chunk(**arguments, cu_seqlens=torch.tensor(cu_seqlens))


def test_nothing_is_remembered_about_cu_seqlens():
    arguments = random_arguments(40, lengths=[10, 30])
    run_chunk(**arguments)
    arguments["cu_seqlens"][1] = 25
    assert_agrees(FLOAT64, FLOAT64, torch.float64, **arguments)


def test_graph_capture_and_host_copies_change_nothing():
    arguments = random_arguments(40, lengths=[10, 30])
    extra = {"use_graph": True, "max_num_seqs": 2, "cu_seqlens_cpu": arguments["cu_seqlens"], "safe_gate": True}
    for actual, expected in zip(run_chunk(**arguments, **extra), run_chunk(**arguments)):
        assert torch.equal(actual, expected)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=6),
    uncovered=st.integers(0, 3),
    heads=st.integers(1, 2),
    group=st.integers(1, 3),
    key_dim=st.integers(1, 9),
    value_dim=st.integers(1, 9),
    gate_values=st.lists(st.sampled_from([0.0, -1e-6, -0.1, -5.0, -30.0, -80.0, -1e4, -INF]), min_size=1, max_size=4),
    chunk_size=st.sampled_from([32, 64]),
    seed=st.integers(0, 2**16),
)
def test_any_lengths_sizes_and_gates(
    lengths, uncovered, heads, group, key_dim, value_dim, gate_values, chunk_size, seed
):
    arguments = random_arguments(
        sum(lengths) + uncovered, lengths=lengths, heads=heads, value_heads=heads * group, key_dim=key_dim,
        value_dim=value_dim, seed=seed,
    )  # fmt: skip
    random = torch.Generator().manual_seed(seed)
    choice = torch.randint(len(gate_values), arguments["g"].shape, generator=random)
    arguments["g"] = torch.tensor(gate_values, dtype=torch.float64)[choice]
    o, state = run_chunk(torch.float64, chunk_size=chunk_size, **arguments)
    exact_o, exact_state = run_judge(**arguments)
    assert_close(o, exact_o, FLOAT64, "o")
    assert_close(state, exact_state, FLOAT64, "final_state")
