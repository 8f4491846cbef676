"""Is the judge right? The fp64 recurrence against the definition, element by element, in plain Python floats."""

import math

import pytest
import torch

from fla_kda_backend.reference import recurrent_kda

# Both sides are float64 and add the same few numbers in different orders: a handful of ulps, with room.
FLOAT64 = 1e-12

H, K, V, T = 2, 3, 2, 5


def by_definition(
    q, k, v, g, beta, initial_state, *, A_log, dt_bias, scale, norm, gate_in_kernel, beta_in_kernel, neg_eigval,
    lower_bound
):
    """One sequence: q, k `[T][H][K]`, v `[T][HV][V]`, g `[T][HV][K]`, beta `[T][HV]`, state `[HV][K][V]`, all lists."""
    tokens, value_heads, group = len(q), len(v[0]), len(v[0]) // len(q[0])
    S = [[row[:] for row in head] for head in initial_state]
    o = [[[0.0] * V for _ in range(value_heads)] for _ in range(tokens)]
    for t in range(tokens):
        for h in range(value_heads):
            query, key = q[t][h // group], k[t][h // group]
            if norm:
                query = [x / math.sqrt(sum(y * y for y in query) + 1e-6) for x in query]
                key = [x / math.sqrt(sum(y * y for y in key) + 1e-6) for x in key]
            b = beta[t][h]
            if beta_in_kernel:
                b = (2.0 if neg_eigval else 1.0) / (1.0 + math.exp(-b))
            for c in range(K):
                step = g[t][h][c]
                if gate_in_kernel:
                    x = step + (dt_bias[h][c] if dt_bias is not None else 0.0)
                    rate = math.exp(A_log[h]) if A_log is not None else 1.0
                    softplus, sigmoid = math.log1p(math.exp(x)), 1 / (1 + math.exp(-rate * x))
                    step = -rate * softplus if lower_bound is None else lower_bound * sigmoid
                for w in range(V):
                    S[h][c][w] *= math.exp(step)
            for w in range(V):
                u = b * (v[t][h][w] - sum(S[h][c][w] * key[c] for c in range(K)))
                for c in range(K):
                    S[h][c][w] += key[c] * u
                o[t][h][w] = scale * sum(S[h][c][w] * query[c] for c in range(K))
    return torch.tensor(o, dtype=torch.float64), torch.tensor(S, dtype=torch.float64)


def inputs(value_heads, sequences, raw_gate, raw_beta):
    random = torch.Generator().manual_seed(7)

    def randn(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    q, k, v = randn(1, T, H, K), randn(1, T, H, K), randn(1, T, value_heads, V)
    g, beta = randn(1, T, value_heads, K), randn(1, T, value_heads)
    g, beta = g if raw_gate else -g.abs(), beta if raw_beta else beta.sigmoid()
    return q, k, v, g, beta, randn(value_heads), randn(value_heads * K), randn(sequences, value_heads, K, V)


@pytest.mark.parametrize("value_heads", [H, 2 * H], ids=["mha", "gva"])
@pytest.mark.parametrize("norm", [False, True], ids=["norm-outside", "norm"])
@pytest.mark.parametrize("beta", ["given", "sigmoid", "neg-eigval"])
@pytest.mark.parametrize("gate", ["given", "softplus", "softplus-no-bias", "bounded", "bounded-no-A_log"])
def test_matches_the_definition(gate, beta, norm, value_heads):
    q, k, v, g, b, A_log, dt_bias, h0 = inputs(value_heads, 1, gate != "given", beta != "given")
    A_log = None if gate in ("given", "bounded-no-A_log") else A_log
    dt_bias = None if gate in ("given", "softplus-no-bias") else dt_bias
    lower_bound = -5.0 if gate.startswith("bounded") else None
    o, state = recurrent_kda(
        q, k, v, g, b, A_log=A_log, dt_bias=dt_bias, scale=0.3, initial_state=h0, output_final_state=True,
        use_qk_l2norm_in_kernel=norm, use_gate_in_kernel=gate != "given", use_beta_sigmoid_in_kernel=beta != "given",
        allow_neg_eigval=beta == "neg-eigval", lower_bound=lower_bound,
    )  # fmt: skip
    expected_o, expected_state = by_definition(
        *(x[0].tolist() for x in (q, k, v, g, b, h0)),
        A_log=None if A_log is None else A_log.tolist(),
        dt_bias=None if dt_bias is None else dt_bias.view(value_heads, K).tolist(),
        scale=0.3, norm=norm, gate_in_kernel=gate != "given", beta_in_kernel=beta != "given",
        neg_eigval=beta == "neg-eigval", lower_bound=lower_bound,
    )  # fmt: skip
    torch.testing.assert_close(o[0], expected_o, rtol=FLOAT64, atol=FLOAT64)
    torch.testing.assert_close(state[0], expected_state, rtol=FLOAT64, atol=FLOAT64)


def test_packed_sequences_match_the_definition_one_by_one():
    lengths = [2, 0, 1, 1]  # one row is left over
    q, k, v, g, b, _, _, h0 = inputs(H, len(lengths), False, False)
    for x in (q, k, v, g, b):
        x[:, sum(lengths):] = math.nan
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    o, state = recurrent_kda(q, k, v, g, b, initial_state=h0, output_final_state=True, cu_seqlens=cu_seqlens)
    for n, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])):
        expected_o, expected_state = by_definition(
            *(x[0, start:end].tolist() for x in (q, k, v, g, b)), h0[n].tolist(),
            A_log=None, dt_bias=None, scale=K**-0.5, norm=False, gate_in_kernel=False, beta_in_kernel=False,
            neg_eigval=False, lower_bound=None,
        ) if end > start else (torch.zeros(0, H, V, dtype=torch.float64), h0[n])  # fmt: skip
        torch.testing.assert_close(o[0, start:end], expected_o, rtol=FLOAT64, atol=FLOAT64)
        torch.testing.assert_close(state[n], expected_state, rtol=FLOAT64, atol=FLOAT64)
    assert torch.equal(o[0, sum(lengths):], torch.zeros(T - sum(lengths), H, V, dtype=torch.float64))


def test_batch_entries_are_independent_and_the_state_can_be_v_first():
    q, k, v, g, b, _, _, h0 = inputs(H, 1, False, False)
    batch = [torch.cat((x, x.flip(1))) for x in (q, k, v, g, b)]
    states = torch.cat((h0, 2 * h0))
    o, state = recurrent_kda(
        *batch, initial_state=states.transpose(-1, -2), output_final_state=True, state_v_first=True
    )
    for n in range(2):
        one_o, one_state = recurrent_kda(
            *(x[n : n + 1] for x in batch), initial_state=states[n : n + 1], output_final_state=True
        )
        torch.testing.assert_close(o[n], one_o[0], rtol=FLOAT64, atol=FLOAT64)
        torch.testing.assert_close(state[n], one_state[0].transpose(-1, -2), rtol=FLOAT64, atol=FLOAT64)


def test_computes_in_float64_whatever_the_inputs_are():
    q, k, v, g, b, _, _, h0 = (x.bfloat16() for x in inputs(H, 1, False, False))
    o, state = recurrent_kda(q, k, v, g, b, initial_state=h0, output_final_state=True)
    exact_o, exact_state = recurrent_kda(
        *(x.double() for x in (q, k, v, g, b)), initial_state=h0.double(), output_final_state=True
    )
    assert o.dtype == state.dtype == torch.float64
    assert torch.equal(o, exact_o) and torch.equal(state, exact_state)


def test_no_tokens_leave_the_state_as_it_was():
    q, k, v, g, b, _, _, h0 = inputs(H, 1, False, False)
    empty = [x[:, :0] for x in (q, k, v, g, b)]
    o, state = recurrent_kda(*empty, initial_state=h0, output_final_state=True)
    assert o.shape == (1, 0, H, V) and torch.equal(state, h0)
    _, state = recurrent_kda(*empty, output_final_state=True, cu_seqlens=torch.tensor([0, 0, 0]))
    assert torch.equal(state, torch.zeros(2, H, K, V, dtype=torch.float64))


@pytest.mark.parametrize(
    "cu_seqlens, message",
    [([0, 3, 2], "decrease"), ([0, T + 1], "beyond"), ([1, 3], "start at 0"), ([[0, 3]], "shape"), ([], "shape")],
)
def test_refuses_malformed_cu_seqlens(cu_seqlens, message):
    q, k, v, g, b, *_ = inputs(H, 1, False, False)
    with pytest.raises(ValueError, match=message):
        recurrent_kda(q, k, v, g, b, cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int64))
