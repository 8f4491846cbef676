"""Do the dispatcher's rules hold for any values, and not only for those that somebody thought of?"""

import inspect
import itertools
import math
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fla_kda_backend import dispatch, ops
from fla_kda_backend.call import NotBindable
from fla_kda_backend.dispatch import CUDA_PATHS, Decision, DeviceFacts, decide
from tests.kdakit import fuzz
from tests.test_call import NEWEST, newest
from tests.test_dispatch import CPU, GPU, OURS, call_on, gpu, packed_on  # noqa: F401 (gpu is a fixture)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.bool, torch.complex64)
CAPABILITIES = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
ARCHS = ["80", "86", "89", "90", "90a", "100", "100a", "100f", "103a", "120", "120a", "120f", "121a"]


# --- boundaries -------------------------------------------------------------------------------------------------------

T = 6
any_border = st.one_of(st.integers(-2, T + 2), st.sampled_from([2**31 - 1, -(2**31)]))
any_borders = st.lists(any_border, min_size=2, max_size=6)
right_borders = st.lists(st.integers(0, T), max_size=4).map(lambda inner: [0, *sorted(inner)] + [T])


@settings(max_examples=150, deadline=None)
@given(borders=st.one_of(any_borders, right_borders), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_any_boundaries_are_served_on_the_cpu_exactly_where_they_are_right(borders, dtype):
    decision = decide(packed_on(CPU, borders=borders, dtype=dtype))
    if borders[0] == 0 and borders == sorted(borders) and borders[-1] <= T:
        assert decision == OURS[CPU]
    else:
        assert decision.path == "triton" and decision.error is ValueError
        assert "cu_seqlens" in decision.reason and "\n" not in decision.reason


@settings(max_examples=60, deadline=None)
@given(shape=st.lists(st.integers(0, 4), max_size=3), dtype=st.sampled_from(DTYPES), on_host=st.booleans())
def test_boundaries_of_any_shape_and_dtype_on_a_gpu_are_decided_on_without_reading_them(shape, dtype, on_host):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dispatch, "device_facts", lambda device: DeviceFacts("cuda", (9, 0)))
        patched.setattr(dispatch, "library_for", lambda capability: ("90a", ""))
        # The values of meta tensors do not exist: reading one raises.
        cu_seqlens = torch.zeros(shape, dtype=dtype, device=CPU if on_host else GPU)
        right = not on_host and len(shape) == 1 and shape[0] >= 2 and dtype in (torch.int32, torch.int64)
        decision = decide(packed_on(GPU, cu_seqlens=cu_seqlens, initial_state=None))
    assert decision == OURS[GPU] if right else decision.path == "triton" and "cu_seqlens" in decision.reason


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("safe_gate", [True, False])
@settings(max_examples=100, deadline=None)
@given(bound=st.floats())
@example(bound=-5.0)
@example(bound=-0.0)
@example(bound=math.nextafter(-5.0, -6.0))
def test_any_lower_bound_outside_its_range_never_reaches_the_kernels(safe_gate, bound):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dispatch, "device_facts", lambda device: DeviceFacts("cuda", (9, 0)))
        patched.setattr(dispatch, "library_for", lambda capability: ("90a", ""))
        decision = decide(call_on(GPU, lower_bound=bound, safe_gate=safe_gate))
    if -5 <= bound < 0:
        assert decision == OURS[GPU]
    else:
        assert decision.path == "triton" and "lower_bound" in decision.reason


# --- dtypes -----------------------------------------------------------------------------------------------------------

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
# What the operator's own checks take.
TAKEN = {
    **dict.fromkeys(("q", "k", "v"), {torch.bfloat16}),
    **dict.fromkeys(("g", "beta"), {torch.bfloat16, torch.float32}),
    **dict.fromkeys(("A_log", "dt_bias"), {torch.bfloat16, torch.float16, torch.float32, torch.float64}),
    "initial_state": {torch.float32},
}
some_dtypes = st.dictionaries(st.sampled_from(INPUTS), st.sampled_from(DTYPES))


def with_dtypes(dtypes: dict) -> object:
    plain = call_on(GPU)
    return call_on(GPU, **{name: getattr(plain, name).to(dtype) for name, dtype in dtypes.items()})


@settings(max_examples=200, deadline=None)
@given(dtypes=some_dtypes)
def test_any_dtypes_are_served_on_a_gpu_exactly_where_the_operator_takes_them(dtypes):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dispatch, "device_facts", lambda device: DeviceFacts("cuda", (9, 0)))
        patched.setattr(dispatch, "library_for", lambda capability: ("90a", ""))
        decision = decide(with_dtypes(dtypes))
    wrong = [name for name, dtype in dtypes.items() if dtype not in TAKEN[name]]
    if wrong:
        assert decision.path == "triton" and any(name in decision.reason for name in wrong)
    else:
        assert decision == OURS[GPU]


@settings(max_examples=30, deadline=None)
@given(history=st.lists(some_dtypes, min_size=2, max_size=6))
def test_a_decision_does_not_depend_on_the_calls_before_it(history):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dispatch, "device_facts", lambda device: DeviceFacts("cuda", (9, 0)))
        patched.setattr(dispatch, "library_for", lambda capability: ("90a", ""))
        forwards = [decide(with_dtypes(dtypes)) for dtypes in history]
        backwards = [decide(with_dtypes(dtypes)) for dtypes in reversed(history)]
    assert forwards == backwards[::-1]


# --- calls of the usual kind ------------------------------------------------------------------------------------------

RANDOM_CALLS = 400


def test_random_calls_of_the_usual_kind_are_those_that_every_rule_lets_through(gpu, monkeypatch):  # noqa: F811
    order = {name: p.default for name, p in inspect.signature(newest).parameters.items() if p.kind != p.VAR_KEYWORD}
    usual = decided = 0
    for number in range(RANDOM_CALLS):
        recipe = fuzz.generate(Random(f"usual-{number}"), fuzz.GPU)
        try:
            call = NEWEST.bind(*recipe.build(order))
        except NotBindable:
            continue
        with torch.set_grad_enabled(recipe.grad_mode == "grad"):
            decision, sizes = decide(call), dispatch.usual_sizes(call)
            with monkeypatch.context() as without:
                without.setattr(dispatch, "usual_sizes", lambda call: None)
                assert decide(call) == decision, recipe
        decided += 1
        if sizes is not None:
            usual += 1
            assert sizes == dispatch.Dims.of(call)
            assert decision == OURS[GPU] or "gradients are needed" in decision.reason, recipe
    # Lest the generator makes no such calls, or no others.
    assert RANDOM_CALLS / 10 < usual < decided - RANDOM_CALLS / 10, (usual, decided)


# --- architectures and libraries --------------------------------------------------------------------------------------


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """NVIDIA's rule for cubins: "a" on its own capability alone, others on a major version from a minor one on."""
    number = int(arch.rstrip("af"))
    own = number // 10, number % 10
    return capability == own if arch.endswith("a") else own[0] == capability[0] and own[1] <= capability[1]


@settings(max_examples=300, deadline=None)
@given(capability=st.sampled_from(CAPABILITIES), archs=st.lists(st.sampled_from(ARCHS), unique=True))
def test_any_choice_of_architecture_runs_on_the_device_and_one_that_runs_is_found(capability, archs):
    chosen = dispatch.arch_for(capability, tuple(archs))
    running = [arch for arch in archs if runs_on(arch, capability)]
    assert chosen in running if running else chosen is None
    if len(archs) <= 4:
        for order in itertools.permutations(archs):
            assert dispatch.arch_for(capability, order) == chosen


def test_device_and_library_are_asked_about_once_and_not_at_every_call(monkeypatch):
    asked = []

    def capability(device):
        asked.append("device")
        return 9, 0

    def library():
        asked.append("library")
        return SimpleNamespace(archs=("80", "90a"))

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(ops, "library", library)
    caches = (dispatch.device_facts, dispatch.library_for)
    for cache in caches:
        cache.cache_clear()
    try:
        cuda = torch.device("cuda", 0)
        for _ in range(50):
            facts = dispatch.device_facts(cuda)
            assert dispatch.library_for(facts.capability) == ("90a", "")
    finally:
        for cache in caches:
            cache.cache_clear()
    assert sorted(asked) == ["device", "library"]


BROKEN = {
    "no ELF file": b"not a library",
    "an empty file": b"",
    "cut short": b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00\x3e\x00",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_library_that_does_not_load_is_a_reason_and_never_an_exception(tmp_path, monkeypatch, kind):
    (tmp_path / "libfla_kda.so").write_bytes(BROKEN[kind])
    monkeypatch.setattr(ops, "_LIBRARY_FOLDER", tmp_path)
    monkeypatch.setattr(dispatch, "device_facts", lambda device: DeviceFacts("cuda", (9, 0)))
    ops._load.cache_clear()
    dispatch.library_for.cache_clear()
    try:
        assert ops.library() is None
        error = ops.load_error()
        decision = decide(call_on(GPU))
    finally:
        ops._load.cache_clear()
        dispatch.library_for.cache_clear()
    assert error.startswith("the compiled library does not load: ") and "\n" not in error
    assert decision == Decision("triton", f"no kernels are loaded: {error}")


def test_the_kernel_for_few_heads_and_long_sequences_is_that_of_every_other_dense_call(gpu):  # noqa: F811
    # The choice between kernels is one of the device, and of the mean length where sequences are packed.
    for B, T, H in itertools.product((1, 4), (1, 64, 8192), (1, 4, 96)):
        empty = dict(B=B, T=T, H=H, HV=H)
        q = torch.empty(B, T, H, 128, dtype=torch.bfloat16, device=GPU)
        decision = decide(call_on(GPU, **empty, q=q, k=q, v=q))
        assert decision == OURS[GPU] and decision.path == CUDA_PATHS[0]
