"""Do the kernels keep the contract of `chunk_kda`? Shapes, layouts, dtypes, empty and uncovered rows, boundaries."""

import math

import pytest
import torch

from tests.gpu import DEVICE
from tests.kdakit import cases, compare
from tests.kdakit.run import OperatorCalls, run_exactly, run_on_kernels, same_bits

K = cases.HEAD_DIM
TOLERANCE = compare.CUDA_FORWARD_FEW_TERMS


def call_of(name: str, layout: str = "dense-tail", gate: str = "randn", **sizes) -> dict:
    sizes = dict(tokens=96, heads=2, device=DEVICE, seed=7) | sizes
    return cases.build(cases.Case(cases.caller(name), layout, gate), **sizes).arguments


def packed(arguments: dict, boundaries: list[int], dtype=torch.int32) -> dict:
    """The same tokens, cut into sequences; every sequence gets a state of its own."""
    states = len(boundaries) - 1
    random = torch.Generator().manual_seed(states)
    heads = arguments["v"].shape[2]
    return dict(
        arguments,
        cu_seqlens=torch.tensor(boundaries, dtype=dtype, device=DEVICE),
        initial_state=torch.randn(states, heads, K, K, generator=random).to(DEVICE),
        output_final_state=True,
    )


def check(arguments: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
    o, state = run_on_kernels(arguments)
    exact_o, exact_state = run_exactly(cases.judge_arguments(arguments))
    compare.assert_close(o, exact_o, TOLERANCE.o, "o")
    if exact_state is None:
        assert state is None
    else:
        compare.assert_close(state, exact_state, TOLERANCE.state, "final_state")
    return o, state


def assert_same(left, right):
    for name, one, other in zip(("o", "final_state"), left, right, strict=True):
        assert same_bits(one, other), f"{name} differs"


# --- nothing to do ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1-kimi-linear", "3-kimi-k3"])
@pytest.mark.parametrize("given", [True, False], ids=["state", "no-state"])
def test_no_tokens_return_the_initial_state_or_zeros(name, given):
    arguments = call_of(name)
    for tensor in ("q", "k", "v", "g", "beta"):
        arguments[tensor] = arguments[tensor][:, :0]
    if not given:
        del arguments["initial_state"]
    compare.poison_cuda_memory(DEVICE)

    o, state = run_on_kernels(arguments)

    assert o.shape == arguments["v"].shape
    expected = arguments["initial_state"] if given else torch.zeros_like(state)
    assert same_bits(state, expected)


@pytest.mark.parametrize("boundaries", [[0, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("tokens", [0, 5])
def test_only_empty_sequences_keep_their_states_and_zero_every_row(boundaries, tokens):
    arguments = packed(call_of("1-kimi-linear"), boundaries)
    for tensor in ("q", "k", "v", "g", "beta"):
        arguments[tensor] = arguments[tensor][:, :tokens]
    compare.poison_cuda_memory(DEVICE)

    o, state = run_on_kernels(arguments)

    assert o.shape[1] == tokens and not o.any()
    assert same_bits(state, arguments["initial_state"])


def test_empty_sequences_keep_their_state_between_full_ones():
    arguments = packed(call_of("1-kimi-linear"), [0, 0, 40, 40, 40, 107, 107])

    _, state = check(arguments)

    for empty in (0, 2, 3, 5):
        assert same_bits(state[empty], arguments["initial_state"][empty])


# --- rows outside, and beside -----------------------------------------------------------------------------------------


def test_one_packed_sequence_full_of_nan_leaves_its_neighbours_bit_identical():
    boundaries = [0, 23, 55, 56, 107]
    arguments = packed(call_of("3-kimi-k3"), boundaries)
    spoiled = dict(arguments)
    for tensor in ("q", "k", "v", "g", "beta"):
        spoiled[tensor] = arguments[tensor].clone()
        spoiled[tensor][:, 23:55] = math.nan

    o, state = run_on_kernels(arguments)
    spoiled_o, spoiled_state = run_on_kernels(spoiled)

    assert spoiled_o[:, 23:55].isnan().any() and spoiled_state[1].isnan().any()
    for rows in (slice(0, 23), slice(55, 107)):
        assert same_bits(o[:, rows], spoiled_o[:, rows])
    for sequence in (0, 2, 3):
        assert same_bits(state[sequence], spoiled_state[sequence])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_garbage_after_the_last_sequence_never_reaches_a_result(garbage):
    arguments = packed(call_of("5-fla-default"), [0, 37, 90])
    clean_o, clean_state = run_on_kernels(arguments)
    for tensor in ("q", "k", "v", "g", "beta"):
        arguments[tensor] = arguments[tensor].clone()
        arguments[tensor][:, 90:] = garbage
    compare.poison_cuda_memory(DEVICE)

    o, state = run_on_kernels(arguments)

    assert not o[:, 90:].any()
    assert same_bits(o, clean_o) and same_bits(state, clean_state)


# --- memory layouts ---------------------------------------------------------------------------------------------------


def every_other_token(x):
    wide = x.repeat_interleave(2, dim=1)
    return wide[:, ::2]


def head_slice(x):
    return torch.cat([x, torch.full_like(x, math.nan)], dim=2)[:, :, : x.shape[2]]


def one_element_off(x):
    storage = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    storage[1:] = x.flatten()
    return storage[1:].view(x.shape)


def transposed_storage(x):
    order = list(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


@pytest.mark.parametrize("view", [every_other_token, head_slice, one_element_off, transposed_storage])
@pytest.mark.parametrize("name", ["1-kimi-linear", "4-fla-safe-gate"])
def test_strided_and_misaligned_views_give_the_same_bits(view, name):
    arguments = call_of(name)
    views = dict(arguments)
    for tensor in ("q", "k", "v", "g", "beta"):
        views[tensor] = view(arguments[tensor])
        assert torch.equal(views[tensor], arguments[tensor])
    state_view = one_element_off if view is one_element_off else transposed_storage
    for tensor in ("initial_state", "A_log", "dt_bias"):
        if tensor in arguments:
            views[tensor] = state_view(arguments[tensor])

    assert_same(run_on_kernels(views), run_on_kernels(arguments))


def taken_from(operator: OperatorCalls, arguments: dict) -> dict[str, bool]:
    """Whether the operator read each of the rows where the caller has them."""
    (call,) = operator.calls
    return {name: call[name].data_ptr() == arguments[name].data_ptr() for name in ("q", "k", "v", "g", "beta")}


def test_slices_of_fused_projections_are_read_where_they_are():
    arguments = call_of("4-fla-safe-gate")
    fused = torch.cat([arguments[name].flatten(2) for name in ("q", "k", "v")], dim=-1)
    sizes = [arguments[name].flatten(2).shape[-1] for name in ("q", "k", "v")]
    slices = dict(arguments)
    for name, part in zip(("q", "k", "v"), fused.split(sizes, dim=-1), strict=True):
        slices[name] = part.unflatten(-1, arguments[name].shape[2:])
        assert not slices[name].is_contiguous()
    slices["beta"] = torch.cat([arguments["beta"]] * 3, dim=-1)[..., : arguments["beta"].shape[-1]]
    slices["g"] = head_slice(arguments["g"])

    with OperatorCalls() as operator:
        result = run_on_kernels(slices)

    assert all(taken_from(operator, slices).values())
    assert_same(result, run_on_kernels(arguments))


@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 200])
def test_convolutions_over_time_leave_views_that_are_transposed_exactly(tokens):
    x = torch.randn(2, 3 * 128, tokens, device=DEVICE).bfloat16()
    view = x.transpose(1, 2).unflatten(-1, (3, 128))
    rows = torch.full(view.shape, math.nan, dtype=x.dtype, device=DEVICE)

    torch.ops.fla_kda_backend.transpose_tokens(view, rows)

    assert torch.equal(rows, view)


def test_expanded_inputs_give_the_same_bits():
    arguments = call_of("1-kimi-linear")
    shape = arguments["g"].shape
    constant = dict(arguments, g=torch.full(shape, -0.3, device=DEVICE), beta=torch.full(shape[:3], 0.7, device=DEVICE))
    expanded = dict(
        constant,
        g=torch.tensor(-0.3, device=DEVICE).expand(shape),
        beta=torch.tensor(0.7, device=DEVICE).expand(shape[:3]),
        initial_state=arguments["initial_state"][:, :1].expand_as(arguments["initial_state"]),
    )
    constant["initial_state"] = expanded["initial_state"].contiguous()

    assert_same(run_on_kernels(expanded), run_on_kernels(constant))


@pytest.mark.parametrize("ratio", [2, 3, 8])
def test_value_heads_read_the_query_and_key_head_of_their_group(ratio):
    arguments = call_of("5-fla-default", heads=2 * ratio)
    grouped = dict(arguments, q=arguments["q"][:, :, ::ratio], k=arguments["k"][:, :, ::ratio])
    repeated = dict(
        arguments,
        q=grouped["q"].repeat_interleave(ratio, dim=2),
        k=grouped["k"].repeat_interleave(ratio, dim=2),
    )

    assert_same(check(grouped), run_on_kernels(repeated))


def test_a_batch_gives_the_bits_of_its_members_and_of_the_packed_call():
    arguments = call_of("5-fla-default", layout="dense-batch")
    o, state = check(arguments)
    batch, tokens = o.shape[:2]

    for member in range(batch):
        alone = dict(arguments)
        for tensor in ("q", "k", "v", "g", "beta", "initial_state"):
            alone[tensor] = arguments[tensor][member : member + 1]
        assert_same(run_on_kernels(alone), (o[member : member + 1], state[member : member + 1]))

    flat = dict(arguments, cu_seqlens=torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * tokens)
    for tensor in ("q", "k", "v", "g", "beta"):
        flat[tensor] = arguments[tensor].flatten(0, 1).unsqueeze(0)
    assert_same(run_on_kernels(flat), (o.flatten(0, 1).unsqueeze(0), state))


@pytest.mark.parametrize("name", ["1-kimi-linear", "3-kimi-k3", "5-fla-gva"])
def test_v_first_and_k_first_states_are_transposes_of_each_other(name):
    arguments = {key: value for key, value in call_of(name).items() if key != "transpose_state_layout"}
    k_first = dict(arguments, state_v_first=False)
    v_first = dict(arguments, state_v_first=True, initial_state=arguments["initial_state"].mT.contiguous())

    k_first_o, k_first_state = check(k_first)
    v_first_o, v_first_state = check(v_first)

    assert same_bits(k_first_o, v_first_o)
    assert same_bits(k_first_state, v_first_state.mT.contiguous())
    assert not torch.equal(k_first_state, k_first_state.mT), "the state must be able to show a mix-up"


# --- dtypes and optional inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["varlen", "varlen-empty", "varlen-many"])
def test_int32_and_int64_boundaries_give_the_same_bits(layout):
    arguments = call_of("1-kimi-linear", layout=layout)
    boundaries = arguments["cu_seqlens"]
    narrow, wide = (
        run_on_kernels(dict(arguments, cu_seqlens=boundaries.to(dtype))) for dtype in (torch.int32, torch.int64)
    )
    assert_same(narrow, wide)


def test_boundaries_are_read_anew_at_every_call():
    arguments = packed(call_of("1-kimi-linear"), [0, 30, 107])
    check(arguments)
    arguments["cu_seqlens"].copy_(torch.tensor([0, 77, 107]))
    check(arguments)


@pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("beta_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["1-kimi-linear", "4-fla-safe-gate", "5-fla-neg-eigval"])
def test_every_dtype_of_g_and_beta_is_served(g_dtype, beta_dtype, name):
    arguments = call_of(name)
    check(dict(arguments, g=arguments["g"].to(g_dtype), beta=arguments["beta"].to(beta_dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["4-fla-safe-gate", "5-fla-default"])
def test_gate_parameters_of_any_float_dtype_and_shape_are_served(dtype, name):
    arguments = call_of(name, heads=3)
    A_log, dt_bias = arguments["A_log"].to(dtype), arguments["dt_bias"].to(dtype)
    flat = check(dict(arguments, A_log=A_log, dt_bias=dt_bias))

    shaped = dict(arguments, A_log=A_log.view(1, 1, 3, 1), dt_bias=dt_bias.view(3, K))
    assert_same(run_on_kernels(shaped), flat)


@pytest.mark.parametrize("name", ["4-fla-safe-gate", "5-fla-default"])
def test_dt_bias_may_be_absent(name):
    arguments = call_of(name)
    without = check(dict(arguments, dt_bias=None))
    zeros = run_on_kernels(dict(arguments, dt_bias=torch.zeros_like(arguments["dt_bias"])))
    assert_same(without, zeros)


def test_A_log_may_be_absent_with_a_bound():
    arguments = call_of("4-fla-safe-gate")
    without = check(dict(arguments, A_log=None))
    zeros = run_on_kernels(dict(arguments, A_log=torch.zeros_like(arguments["A_log"])))
    assert_same(without, zeros)


@pytest.mark.parametrize("bound", [-5.0, -2.5, -0.01])
def test_the_bound_alone_chooses_the_bounded_gate(bound):
    arguments = call_of("4-fla-safe-gate")
    promised = check(dict(arguments, lower_bound=bound))
    silent = run_on_kernels(dict(arguments, lower_bound=bound, safe_gate=False))
    assert_same(promised, silent)


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_scale_is_honoured(scale):
    check(dict(call_of("1-kimi-linear"), scale=scale))


def test_norms_happen_in_the_kernel_only_when_asked():
    arguments = call_of("1-kimi-linear")
    for tensor in ("q", "k"):
        x = arguments[tensor].float()
        arguments[tensor] = (x / x.norm(dim=-1, keepdim=True)).bfloat16()
    check(dict(arguments, use_qk_l2norm_in_kernel=False))


def test_queries_and_keys_of_extreme_length_are_normalised_like_the_recurrence_does():
    arguments = call_of("1-kimi-linear")
    for factor in (1e-4, 1e4):
        check(dict(arguments, q=arguments["q"] * factor, k=arguments["k"] * factor))
    check(dict(arguments, q=torch.zeros_like(arguments["q"]).index_fill(1, torch.tensor([3], device=DEVICE), 1.0)))


@pytest.mark.parametrize("name", ["1-kimi-linear", "3-kimi-k3"])
@pytest.mark.parametrize("layout", ["dense-tail", "varlen-empty"])
def test_without_a_final_state_the_output_is_the_same(name, layout):
    arguments = call_of(name, layout=layout)
    o, state = run_on_kernels(arguments)
    alone, nothing = run_on_kernels(dict(arguments, output_final_state=False))
    assert nothing is None and state is not None
    assert same_bits(alone, o)


def test_no_initial_state_is_a_state_of_zeros():
    arguments = call_of("3-kimi-k3")
    zeros = run_on_kernels(dict(arguments, initial_state=torch.zeros_like(arguments["initial_state"])))
    assert_same(run_on_kernels(dict(arguments, initial_state=None)), zeros)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_that_require_grad_are_served_without_grad_mode(mode):
    arguments = call_of("4-fla-safe-gate")
    expected = run_on_kernels(arguments)
    trained = dict(arguments, A_log=torch.nn.Parameter(arguments["A_log"]), q=arguments["q"].clone().requires_grad_())
    with mode():
        result = run_on_kernels(trained)
    assert_same(result, expected)


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127])
def test_every_length_of_the_last_chunk(tokens):
    arguments = call_of("1-kimi-linear", tokens=160)
    for tensor in ("q", "k", "v", "g", "beta"):
        arguments[tensor] = arguments[tensor][:, :tokens]
    check(arguments)


def test_more_sequences_than_a_grid_dimension_holds():
    # One token each and no state: o = scale * beta * (q . k) * v, with q and k normalised.
    sequences, heads = 70_000, 2
    random = torch.Generator(device=DEVICE).manual_seed(3)

    def randn(*shape):
        return torch.randn(*shape, generator=random, device=DEVICE)

    q, k, v = (randn(1, sequences, heads, K).bfloat16() for _ in range(3))
    beta = torch.rand(1, sequences, heads, generator=random, device=DEVICE)
    compare.poison_cuda_memory(DEVICE)

    o, state = run_on_kernels(
        dict(
            q=q,
            k=k,
            v=v,
            g=-randn(1, sequences, heads, K).abs(),
            beta=beta,
            cu_seqlens=torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE),
            use_qk_l2norm_in_kernel=True,
        )
    )

    assert state is None
    qn, kn = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (q, k))
    exact = K**-0.5 * (beta.double() * (qn * kn).sum(-1))[..., None] * v.double()
    compare.assert_close(o, exact, TOLERANCE.o, "o")
    compare.assert_close(o[:, 65_000:], exact[:, 65_000:], TOLERANCE.o, "o of the last sequences")


def test_offsets_beyond_two_to_the_31_elements():
    length, heads = 64, 65
    sequences = 2**31 // (length * heads * K) + 8
    needed = 6 * sequences * length * heads * K * 2
    if torch.cuda.mem_get_info()[0] < 1.3 * needed:
        pytest.skip(f"needs {1.3 * needed / 2**30:.0f} GiB of free GPU memory")
    random = torch.Generator(device=DEVICE).manual_seed(4)
    shape = (1, sequences * length, heads, K)

    def randn(*size):
        return torch.randn(*size, generator=random, device=DEVICE, dtype=torch.bfloat16)

    inputs = dict(q=randn(*shape), k=randn(*shape), v=randn(*shape), g=randn(*shape).abs().neg_())
    inputs["beta"] = randn(*shape[:3]).sigmoid()
    boundaries = torch.arange(sequences + 1, dtype=torch.int64, device=DEVICE) * length

    o, _ = run_on_kernels(dict(inputs, cu_seqlens=boundaries, use_qk_l2norm_in_kernel=True))

    for sequence in (0, sequences // 2, sequences - 1):
        rows = slice(sequence * length, (sequence + 1) * length)
        alone = {name: value[:, rows] for name, value in inputs.items()}
        expected, _ = check(dict(alone, use_qk_l2norm_in_kernel=True))
        assert same_bits(o[:, rows], expected), f"sequence {sequence}"


# --- boundaries that lie ----------------------------------------------------------------------------------------------

LYING_BOUNDARIES = {
    "decreasing": [0, 60, 20, 107],
    "beyond-T": [0, 50, 5000],
    "far-beyond-T": [0, 50, 2**31 - 1],
    "negative": [-40, 50, 107],
    "not-from-0": [30, 60, 107],
    "backwards": [107, 50, 0],
    "all-beyond-T": [500, 600, 700],
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lie", LYING_BOUNDARIES)
def test_lying_boundaries_never_read_out_of_bounds_or_break_the_context(lie, dtype):
    arguments = packed(call_of("1-kimi-linear"), LYING_BOUNDARIES[lie], dtype)
    good = packed(call_of("1-kimi-linear"), [0, 107])
    expected = run_on_kernels(good)

    run_on_kernels(arguments)
    torch.cuda.synchronize()

    assert_same(run_on_kernels(good), expected)


def test_rows_before_the_first_sequence_are_zero():
    arguments = packed(call_of("1-kimi-linear"), [30, 60, 107])
    compare.poison_cuda_memory(DEVICE)

    o, state = run_on_kernels(arguments)

    assert not o[:, :30].any()
    cut = dict(arguments, cu_seqlens=arguments["cu_seqlens"] - 30)
    for tensor in ("q", "k", "v", "g", "beta"):
        cut[tensor] = arguments[tensor][:, 30:]
    assert_same((o[:, 30:], state), run_on_kernels(cut))


def test_int64_boundaries_beyond_32_bits_are_not_cut_to_32_bits():
    # 2^32 + 50 cut to 32 bits would be 50: a different, valid-looking sequence.
    arguments = packed(call_of("1-kimi-linear"), [0, 2**32 + 50], torch.int64)

    o, state = run_on_kernels(arguments)

    whole = run_on_kernels(packed(call_of("1-kimi-linear"), [0, 107], torch.int64))
    assert_same((o, state), whole)
