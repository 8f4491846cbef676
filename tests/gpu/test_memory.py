"""Do the kernels touch their own memory alone, all of it, at any size? Guards, big offsets, launch errors."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from fla_kda_backend import ops
from tests.gpu import DEVICE
from tests.kdakit import cases, compare, guards
from tests.kdakit.run import (
    OperatorCalls,
    expected_path,
    heads_in_turns,
    run_exactly,
    run_exactly_in_chunks,
    run_on_kernels,
    same_bits,
    uninitialised_memory_is_nan,
)

K = cases.HEAD_DIM


# --- nothing outside is read or written -------------------------------------------------------------------------------

GUARDED = [
    ("1-kimi-linear", "dense-tail"),  # fp32 gates, given
    ("1-kimi-linear", "varlen-many"),
    ("2-transformers", "dense-short"),
    ("3-kimi-k3", "varlen-empty"),  # bf16 gates, bounded
    ("3-kimi-k3-bf16-parameters", "dense-batch"),
    ("5-fla-gva", "varlen"),  # softplus, more value heads than query heads
    ("5-fla-default", "varlen-uncovered"),
    ("6-fla-0.5.0-2d-parameters", "dense"),
    ("10-megatron-lm", "varlen-many"),  # no state at all
]
# In elements. 0 lets a kernel read the inputs where they lie; the others are not 16-byte aligned, and odd.
OFFSETS = (0, 1, 3, 7)


def check_between_guards(arguments: dict, offset: int, judge: dict) -> None:
    # What lies beside the tensors is NaN or -1: results with the bits of those without guards saw none of it.
    expected_o, expected_state = run_on_kernels(arguments)
    inputs = guards.guard_all(arguments, offset)
    with guards.GuardedOutputs() as outputs:
        o, state = run_on_kernels(inputs.tensors)
    torch.cuda.synchronize()
    outputs.check()
    inputs.check()
    assert same_bits(o, expected_o) and same_bits(state, expected_state)
    exact_o, _ = run_exactly_in_chunks(judge)
    compare.assert_close(o, exact_o, compare.CUDA_FORWARD_FEW_TERMS.o, "o")


@pytest.mark.fault("misaligned views, reads and writes out of bounds")
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name, layout", GUARDED, ids=lambda value: str(value))
def test_nothing_outside_inputs_and_outputs_is_read_or_written(name, layout, offset):
    call = cases.build(cases.Case(cases.caller(name), layout, "mixed"), tokens=90, heads=3, device=DEVICE, seed=5)
    arguments = {key: x.contiguous() if isinstance(x, torch.Tensor) else x for key, x in call.arguments.items()}
    check_between_guards(arguments, offset, call.judge)


@pytest.mark.fault("reads and writes out of bounds between segments")
@pytest.mark.parametrize("name", ["1-kimi-linear", "4-fla-safe-gate"])
def test_nothing_outside_is_read_or_written_by_segments(name):
    if expected_path() != "hopper":
        pytest.skip("only the Hopper kernel cuts sequences into segments")
    case = cases.Case(cases.caller(name), "dense-tail", "long-memory")
    call = cases.build(case, tokens=ops.MIN_SEGMENTED_TOKENS, heads=2, device=DEVICE, seed=6)
    with OperatorCalls() as operator:
        check_between_guards(call.arguments, 0, call.judge)
    assert len(operator.calls) == 2 and all(one["segments"] > 1 for one in operator.calls)


@pytest.mark.fault("reads and writes out of bounds between segments")
def test_nothing_outside_is_read_or_written_by_turns(monkeypatch):
    if expected_path() != "hopper":
        pytest.skip("only the Hopper kernel runs heads in turns")
    monkeypatch.setattr(ops, "MIN_TURN_TOKENS", 32)
    case = cases.Case(cases.caller("4-fla-safe-gate"), "dense-tail", "long-memory")
    call = cases.build(case, tokens=120, heads=heads_in_turns(3), device=DEVICE, seed=8)
    with OperatorCalls() as operator:
        check_between_guards(call.arguments, 0, call.judge)
    assert len(operator.calls) == 2 and all(one["turns"] == 3 for one in operator.calls)


@pytest.mark.fault("outputs left uninitialised")
def test_every_element_of_every_result_is_written():
    # What is not written stays NaN; the inputs are such that no right result is.
    for name, layout in GUARDED:
        case = cases.Case(cases.caller(name), layout, "randn")
        arguments = cases.build(case, tokens=90, heads=3, device=DEVICE, seed=7).arguments
        with uninitialised_memory_is_nan():
            assert torch.empty(64, device=DEVICE).isnan().all(), "the poison does not work"
        o, state = run_on_kernels(arguments)
        assert not o.isnan().any(), (name, layout)
        assert state is None or not state.isnan().any(), (name, layout)


# --- offsets that 32 bits do not hold ---------------------------------------------------------------------------------


def needs_memory(gib: float) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib:.0f} GiB of free GPU memory, there are {free:.0f}")


def random_on_device(seed: int):
    random = torch.Generator(device=DEVICE).manual_seed(seed)

    def randn(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=random, device=DEVICE, dtype=dtype)

    return randn


def activated_call(randn, shape: tuple[int, ...]) -> dict:
    """fp32 gates and beta after their activations, no states; [B, T, H, K] is `shape`."""
    return dict(
        q=randn(*shape),
        k=randn(*shape),
        v=randn(*shape),
        g=randn(*shape, dtype=torch.float32).abs_().neg_(),
        beta=randn(*shape[:3], dtype=torch.float32).sigmoid_(),
        use_qk_l2norm_in_kernel=True,
    )


@pytest.mark.fault("offsets past 2^31 elements")
def test_one_sequence_of_a_million_tokens_past_two_to_the_31_elements(record_property):
    # 2^20 tokens x 17 heads x 128 channels; the first and the last head are judged from the first token to the last.
    tokens, heads, judged = 2**20, 17, [0, 16]
    assert tokens * heads * K > 2**31
    needs_memory(60)
    randn = random_on_device(1)
    shape = (1, tokens, heads, K)
    arguments = dict(
        q=randn(*shape),
        k=randn(*shape),
        v=randn(*shape),
        g=randn(*shape).sub_(6),  # decays of about 1 % a token and less: hundreds of tokens are remembered
        beta=randn(*shape[:3]),
        A_log=torch.zeros(heads, device=DEVICE),
        dt_bias=torch.zeros(heads * K, device=DEVICE),
        initial_state=randn(1, heads, K, K, dtype=torch.float32),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=cases.LOWER_BOUND,
    )

    o, state = run_on_kernels(arguments)

    for head in judged:
        judge = dict(arguments)
        for name in cases.TOKENWISE:
            judge[name] = arguments[name][:, :, head : head + 1].contiguous()
        judge["A_log"], judge["dt_bias"] = arguments["A_log"][:1], arguments["dt_bias"][:K]
        judge["initial_state"] = arguments["initial_state"][:, head : head + 1]
        exact_o, exact_state = run_exactly_in_chunks(cases.judge_arguments(judge))
        compare.assert_close(o[:, :, head : head + 1], exact_o, compare.CUDA_FORWARD.o, f"o of head {head}")
        last = slice(tokens - 4096, tokens)
        compare.assert_close(o[:, last, head : head + 1], exact_o[:, last], compare.CUDA_FORWARD.o, "its last rows")
        compare.assert_close(
            state[:, head : head + 1], exact_state, compare.CUDA_FORWARD.state, f"final_state of head {head}"
        )
    record_property("count:sequences of 1,048,576 tokens judged", len(judged))


@pytest.mark.fault("offsets past 2^31 elements")
def test_a_batch_past_two_to_the_31_elements():
    # The other dtype of g, and B instead of T: the last members of the batch are judged.
    batch, tokens, heads = 2**31 // (64 * 64 * K) + 3, 64, 64
    needs_memory(45)
    randn = random_on_device(2)
    arguments = activated_call(randn, (batch, tokens, heads, K))

    o, _ = run_on_kernels(arguments)

    for members in (slice(0, 1), slice(batch - 2, batch)):
        alone = arguments | {name: arguments[name][members] for name in cases.TOKENWISE}
        exact_o, _ = run_exactly(alone)
        compare.assert_close(o[members], exact_o, compare.CUDA_FORWARD_FEW_TERMS.o, f"o of {members}")


@pytest.mark.fault("grids past 65535")
@pytest.mark.parametrize("v_first", [False, True])
def test_more_than_65535_sequences_times_heads_with_states_past_two_to_the_31_elements(v_first):
    sequences, heads, length = 66_000, 2, 3
    assert sequences * heads > 65_535 and sequences * heads * K * K > 2**31
    needs_memory(30)
    randn = random_on_device(3)
    arguments = activated_call(randn, (1, sequences * length, heads, K)) | dict(
        initial_state=randn(sequences, heads, K, K, dtype=torch.float32),
        output_final_state=True,
        state_v_first=v_first,
    )
    boundaries = torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE) * length

    o, state = run_on_kernels(arguments | {"cu_seqlens": boundaries})

    for first in (0, 32_767, sequences - 5):  # 32 768 sequences of two heads are block 65 536
        some = slice(first, first + 5)
        rows = slice(first * length, (first + 5) * length)
        alone = cases.with_tokens(arguments, rows)
        alone |= {"initial_state": arguments["initial_state"][some], "cu_seqlens": boundaries[:6]}
        exact_o, exact_state = run_exactly(alone)
        compare.assert_close(o[:, rows], exact_o, compare.CUDA_FORWARD_FEW_TERMS.o, f"o from sequence {first} on")
        compare.assert_close(
            state[some], exact_state, compare.CUDA_FORWARD_FEW_TERMS.state, f"final_state from sequence {first} on"
        )


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def operator_arguments() -> dict:
    """What our operator is called with for one small call, by name."""
    case = cases.Case(cases.caller("1-kimi-linear"), "dense-tail", "randn")
    call = cases.build(case, tokens=40, heads=2, device=DEVICE)
    with OperatorCalls() as operator:
        run_on_kernels(call.arguments)
    assert len(operator.calls) == 1, "one operator per call"
    return operator.calls[0]


def halved(x: torch.Tensor) -> torch.Tensor:
    return x[:, : x.shape[1] // 2].contiguous()


def one_element_off(x: torch.Tensor) -> torch.Tensor:
    storage = torch.zeros(x.numel() + 8, dtype=x.dtype, device=x.device)
    return storage[1 : 1 + x.numel()].view(x.shape)


MISFITS = {
    "g is shorter": ("g", halved, "g has"),
    "beta is shorter": ("beta", halved, "beta has"),
    "o is shorter": ("o", halved, "o has"),
    "k is transposed": ("k", lambda x: x.mT.contiguous().mT, "rows of k must be 16-byte aligned"),
    "v is misaligned": ("v", one_element_off, "aligned"),
    "q is fp16": ("q", torch.Tensor.half, "bfloat16"),
    "g is fp64": ("g", torch.Tensor.double, "float32 or bfloat16"),
    "the state is bf16": ("initial_state", torch.Tensor.bfloat16, "float32"),
    "k is on the CPU": ("k", torch.Tensor.cpu, "device"),
}


@pytest.mark.fault("accepted, then crashed")
@pytest.mark.parametrize("misfit", MISFITS)
def test_the_operator_refuses_what_does_not_fit_before_anything_runs(misfit, operator_arguments):
    name, change, words = MISFITS[misfit]
    o = operator_arguments["o"].fill_(7)
    changed = operator_arguments | {name: change(operator_arguments[name])}

    with pytest.raises(RuntimeError, match=words):
        torch.ops.fla_kda_backend.chunk_kda_fwd(**changed)

    torch.cuda.synchronize()
    assert (o == 7).all()


BROKEN_CONTEXT = """
    import os
    import torch
    from tests.kdakit import cases
    from tests.kdakit.run import OperatorCalls, run_on_kernels

    case = cases.Case(cases.caller("1-kimi-linear"), "dense-tail", "randn")
    with OperatorCalls() as operator:
        run_on_kernels(cases.build(case, tokens=40, heads=2, device="cuda").arguments)
    torch.cuda.synchronize()
    try:  # an index out of range: from here on nothing can be launched in this process
        torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
        torch.cuda.synchronize()
    except Exception as error:
        print("PLANTED", type(error).__name__, flush=True)
    try:
        torch.ops.fla_kda_backend.chunk_kda_fwd(**operator.calls[0])
        print("RETURNED although nothing can have been launched", flush=True)
    except RuntimeError as error:
        print("RAISED", " ".join(str(error).split()), flush=True)
    os._exit(0)  # no tidying up on a device that is lost
"""


@pytest.mark.fault("launch errors unchecked")
def test_a_launch_that_fails_raises_at_once():
    # In another process, since the only launch that fails for certain is one after an error that a process cannot mend.
    code, root = textwrap.dedent(BROKEN_CONTEXT), Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    facts = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.split(" ")[0].isupper())
    assert "PLANTED" in facts, done.stdout + done.stderr
    assert "RAISED" in facts, facts
    assert "fail" in facts["RAISED"] or "device-side assert" in facts["RAISED"], facts
