"""Does every call go where it belongs, with the right reason? GPU rules run on meta tensors and a pretended device."""

import re
from types import SimpleNamespace

import pytest
import torch

from fla_kda_backend import dispatch
from fla_kda_backend.call import Call
from fla_kda_backend.dispatch import Decision, DeviceFacts, decide

K = 128


def call_on(device: str, B: int = 2, T: int = 6, H: int = 2, HV: int = 4, K: int = K, V: int = K, **changes) -> Call:
    """A call that is served on either device, all options in use."""
    bf16 = dict(dtype=torch.bfloat16, device=device)
    fp32 = dict(dtype=torch.float32, device=device)
    arguments = dict(
        q=torch.zeros(B, T, H, K, **bf16),
        k=torch.zeros(B, T, H, K, **bf16),
        v=torch.zeros(B, T, HV, V, **bf16),
        g=torch.zeros(B, T, HV, K, **fp32),
        beta=torch.zeros(B, T, HV, **fp32),
        A_log=torch.zeros(HV, **fp32),
        dt_bias=torch.zeros(HV * K, **bf16),
        scale=1.0,
        initial_state=torch.zeros(B, HV, K, V, **fp32),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        safe_gate=True,
        lower_bound=-5.0,
    )
    return Call(**(arguments | changes))


def packed_on(device: str, borders=(0, 2, 2, 6), dtype=torch.int32, **changes) -> Call:
    cu_seqlens = torch.tensor(borders, dtype=dtype, device=device)
    state = torch.zeros(len(borders) - 1, 4, K, K, device=device)
    return call_on(device, **(dict(B=1, cu_seqlens=cu_seqlens, initial_state=state) | changes))


@pytest.fixture
def gpu(monkeypatch):
    """Meta tensors pass for tensors on an H200, with kernels loaded for it. Their values cannot be read at all."""
    facts = DeviceFacts("cuda", (9, 0))
    monkeypatch.setattr(dispatch, "device_facts", lambda device: facts)
    monkeypatch.setattr(dispatch, "library_for", lambda capability: ("90a", ""))


CPU, GPU = "cpu", "meta"
OURS = {CPU: Decision("reference"), GPU: Decision("hopper", arch="90a")}


@pytest.fixture(params=[CPU, GPU])
def device(request):
    if request.param == GPU:
        request.getfixturevalue("gpu")
    return request.param


def zeros(*shape, device, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=device)


# --- what is served ---------------------------------------------------------------------------------------------------

SERVED = {
    "everything in kernel": lambda d: call_on(d),
    "no state": lambda d: call_on(d, initial_state=None, output_final_state=False),
    "softplus gate": lambda d: call_on(d, safe_gate=False, lower_bound=None),
    "bounded gate, not called safe": lambda d: call_on(d, safe_gate=False),
    "bounded gate without A_log": lambda d: call_on(d, A_log=None),
    "gate without dt_bias": lambda d: call_on(d, dt_bias=None),
    "activated gate, called safe": lambda d: call_on(d, use_gate_in_kernel=False, A_log=None, dt_bias=None),
    "activated beta": lambda d: call_on(d, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False),
    "V-first": lambda d: call_on(d, state_v_first=True),
    "bf16 g and beta": lambda d: call_on(
        d, g=zeros(2, 6, 4, K, device=d, dtype=torch.bfloat16), beta=zeros(2, 6, 4, device=d, dtype=torch.bfloat16)
    ),
    "A_log [1, 1, HV, 1], dt_bias [HV, K]": lambda d: call_on(
        d, A_log=zeros(1, 1, 4, 1, device=d, dtype=torch.bfloat16), dt_bias=zeros(4, K, device=d, dtype=torch.float16)
    ),
    "no tokens": lambda d: call_on(d, T=0),
    "one token": lambda d: call_on(d, T=1),
    "strided": lambda d: call_on(d, q=zeros(2, 2, K, 6, device=d, dtype=torch.bfloat16).permute(0, 3, 1, 2)),
    "varlen int32": lambda d: packed_on(d),
    "varlen int64": lambda d: packed_on(d, dtype=torch.int64),
    "varlen that ends early": lambda d: packed_on(d, borders=(0, 2, 3)),
    "varlen with a copy on the host": lambda d: packed_on(d, cu_seqlens_cpu=torch.tensor([0, 2, 2, 6])),
    "graph": lambda d: packed_on(d, use_graph=True, max_num_seqs=3),
    "disable_recompute": lambda d: call_on(d, disable_recompute=True),
    "chunk_size 32": lambda d: call_on(d, chunk_size=32),
}


@pytest.mark.parametrize("form", SERVED)
def test_what_the_contract_allows_is_served(device, form):
    assert decide(SERVED[form](device)) == OURS[device]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_reference_takes_any_float_and_any_head_dim(dtype):
    q = torch.zeros(2, 6, 2, 48, dtype=dtype)
    assert decide(call_on(CPU, K=48, V=20, q=q, k=q)) == OURS[CPU]


# --- what FLA refuses -------------------------------------------------------------------------------------------------

REFUSED_BY_FLA = {
    "q without heads": (lambda d: call_on(d, q=zeros(2, 6, K, device=d)), "q has 3 .* dimensions"),
    "context with a state": (
        lambda d: call_on(d, cp_context=SimpleNamespace(cu_seqlens=1), output_final_state=False),
        "initial_state cannot be used",
    ),
    "context with a final state": (
        lambda d: call_on(d, cp_context=SimpleNamespace(cu_seqlens=1), initial_state=None),
        "output_final_state cannot be used",
    ),
    "context without sequences": (
        lambda d: call_on(d, cp_context=SimpleNamespace(cu_seqlens=None), initial_state=None, output_final_state=False),
        "no cu_seqlens",
    ),
    "varlen with a batch": (lambda d: packed_on(d, B=2), "batch size of 1, got 2"),
    "varlen with too many states": (
        lambda d: packed_on(d, initial_state=zeros(4, 4, K, K, device=d)),
        "of 3 sequences",
    ),
    "bf16 state": (
        lambda d: call_on(d, initial_state=zeros(2, 4, K, K, device=d, dtype=torch.bfloat16)),
        "initial_state is bfloat16",
    ),
    "softplus gate without A_log": (
        lambda d: call_on(d, A_log=None, lower_bound=None, safe_gate=False),
        "needs A_log or lower_bound",
    ),
    "chunk_size": (lambda d: call_on(d, chunk_size=16), "chunk_size 16"),
    "safe gate without bound": (lambda d: call_on(d, lower_bound=None), "needs lower_bound"),
    "bound too low": (lambda d: call_on(d, lower_bound=-5.5), r"-5.5 is outside \[-5, 0\)"),
    "bound of zero": (lambda d: call_on(d, lower_bound=0.0), r"0.0 is outside \[-5, 0\)"),
    "bound is NaN": (lambda d: call_on(d, lower_bound=float("nan")), "nan is outside"),
    "neg_eigval without sigmoid": (
        lambda d: call_on(d, use_beta_sigmoid_in_kernel=False),
        "needs use_beta_sigmoid_in_kernel",
    ),
    "k's shape": (lambda d: call_on(d, k=zeros(2, 6, 1, K, device=d, dtype=torch.bfloat16)), "k has shape"),
    "no heads": (lambda d: call_on(d, H=0), "HV=4 value heads are not a multiple of H=0"),
    "HV not a multiple of H": (lambda d: call_on(d, H=3), "HV=4 value heads are not a multiple of H=3"),
    "g's shape": (lambda d: call_on(d, g=zeros(2, 6, 2, K, device=d)), "g has shape"),
    "beta's shape": (lambda d: call_on(d, beta=zeros(2, 6, 4, 1, device=d)), "beta has shape"),
}


@pytest.mark.parametrize("case", REFUSED_BY_FLA)
def test_what_fla_refuses_is_left_to_fla(device, case):
    build, reason = REFUSED_BY_FLA[case]
    call = build(device)
    decision = decide(call)
    assert decision.path == "triton" and decision.error is None
    assert re.search(reason, decision.reason), decision.reason
    assert dispatch.fla_refuses(call)


def test_a_key_dim_beyond_256_is_left_to_fla():
    decision = decide(call_on(CPU, K=257))
    assert decision.path == "triton" and "K=257" in decision.reason and decision.error is None


@pytest.mark.parametrize("form", SERVED)
def test_nothing_that_is_served_is_refused_by_fla(form):
    assert not dispatch.fla_refuses(SERVED[form](CPU))


LATE = {
    "intermediate states outside inference mode": (
        lambda d: call_on(d, return_intermediate_states=True),
        "only allowed in inference mode",
    ),
    "more sequences than max_num_seqs": (
        lambda d: packed_on(d, use_graph=True, max_num_seqs=2),
        "holds 3 sequences, max_num_seqs is 2",
    ),
}


@pytest.mark.parametrize("case", LATE)
def test_what_fla_refuses_after_its_kernels_is_refused_here_on_the_cpu(case):
    build, reason = LATE[case]
    decision = decide(build(CPU))
    assert decision.error is AssertionError and reason in decision.reason


@pytest.mark.parametrize("case", LATE)
def test_what_fla_refuses_after_its_kernels_is_left_to_fla_on_a_gpu(gpu, case):
    decision = decide(LATE[case][0](GPU))
    assert decision.path == "triton" and decision.error is None


def test_intermediate_states_with_kept_activations_are_refused():
    with torch.inference_mode():
        assert decide(call_on(CPU, return_intermediate_states=True)) == OURS[CPU]
        decision = decide(call_on(CPU, return_intermediate_states=True, disable_recompute=True))
    assert decision.error is AssertionError and "disable_recompute=False" in decision.reason


# --- what is left to FLA ----------------------------------------------------------------------------------------------

LEFT = {
    "unknown keyword": (lambda d: call_on(d, unknown=("foo",)), "foo"),
    "context parallelism": (
        lambda d: call_on(
            d, cp_context=SimpleNamespace(cu_seqlens=1), initial_state=None, output_final_state=False
        ),
        "context parallelism",
    ),
    "scale is a tensor": (lambda d: call_on(d, scale=zeros(1, device=d)), "scale is a Tensor"),
    "bound is a tensor": (lambda d: call_on(d, lower_bound=zeros(1, device=d)), "lower_bound is a Tensor"),
    "chunk_size is a float": (lambda d: call_on(d, chunk_size=64.0), "chunk_size is a float"),
    "q is a list": (lambda d: call_on(d, q=[1.0]), "q: not a tensor"),
    "A_log is a number": (lambda d: call_on(d, A_log=0.5), "A_log: not a tensor"),
    "cu_seqlens is a list": (lambda d: packed_on(d, cu_seqlens=[0, 6]), "cu_seqlens: not a tensor"),
    "only a copy on the host": (lambda d: call_on(d, cu_seqlens_cpu=torch.tensor([0, 6])), "without cu_seqlens"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_only_fla_understands_is_left_to_fla(device, case):
    build, reason = LEFT[case]
    decision = decide(build(device))
    assert decision.path == "triton" and decision.error is None and reason in decision.reason


# --- what does not fit ------------------------------------------------------------------------------------------------

MALFORMED = {
    "v's T": (lambda d: call_on(d, v=zeros(2, 5, 4, K, device=d, dtype=torch.bfloat16)), "v has shape [2, 5, 4, 128]"),
    "v's B": (lambda d: call_on(d, v=zeros(1, 6, 4, K, device=d, dtype=torch.bfloat16)), "v has shape [1, 6, 4, 128]"),
    "state's batch": (lambda d: call_on(d, initial_state=zeros(3, 4, K, K, device=d)), "initial_state has shape [3, 4"),
    "state's heads": (lambda d: call_on(d, initial_state=zeros(2, 2, K, K, device=d)), "initial_state has shape [2, 2"),
    "state's sizes": (lambda d: call_on(d, initial_state=zeros(2, 4, K, 64, device=d)), "instead of [2, 4, 128, 128]"),
    "state without batch": (lambda d: call_on(d, initial_state=zeros(4, K, K, device=d)), "initial_state has shape [4"),
    "A_log's size": (lambda d: call_on(d, A_log=zeros(2, device=d)), "A_log has 2 values instead of HV=4"),
    "dt_bias's size": (lambda d: call_on(d, dt_bias=zeros(4, device=d)), "dt_bias has 4 values instead of HV*K=512"),
    "cu_seqlens 2-D": (
        lambda d: packed_on(d, cu_seqlens=zeros(4, 1, device=d, dtype=torch.int32)),
        "cu_seqlens has 2 dimensions",
    ),
    "cu_seqlens 0-D": (
        lambda d: packed_on(d, cu_seqlens=zeros(device=d, dtype=torch.int32), initial_state=None),
        "cu_seqlens has 0 dimensions",
    ),
    "cu_seqlens empty": (
        lambda d: packed_on(d, cu_seqlens=zeros(0, device=d, dtype=torch.int32), initial_state=None),
        "cu_seqlens has 0 entries",
    ),
    "cu_seqlens of one entry": (
        lambda d: packed_on(d, cu_seqlens=zeros(1, device=d, dtype=torch.int32), initial_state=None),
        "cu_seqlens has 1 entries",
    ),
    "cu_seqlens is float": (lambda d: packed_on(d, dtype=torch.float32), "cu_seqlens is float32"),
    "cu_seqlens is int16": (lambda d: packed_on(d, dtype=torch.int16), "cu_seqlens is int16"),
    "copy on the host of another length": (
        lambda d: packed_on(d, cu_seqlens_cpu=torch.tensor([0, 6])),
        "cu_seqlens_cpu and cu_seqlens differ in shape",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_does_not_fit_is_never_served(device, case):
    build, reason = MALFORMED[case]
    decision = decide(build(device))
    assert decision.path == "triton" and reason in decision.reason
    # Nothing else can run CPU tensors, so that the refusal is ours; on a GPU the call is FLA's, as without us.
    assert decision.error is (ValueError if device == CPU else None)


@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "initial_state", "A_log", "dt_bias", "cu_seqlens"])
def test_tensors_on_another_device_are_never_served(gpu, name):
    call = packed_on(GPU)
    elsewhere = torch.zeros_like(getattr(call, name), device="cpu")
    decision = decide(packed_on(GPU, **{name: elsewhere}))
    assert decision.path == "triton" and f"{name} is on cpu, q is on meta" in decision.reason


BAD_BORDERS = {
    (1, 6): "starts at 1 instead of 0",
    (-1, 6): "starts at -1 instead of 0",
    (0, 4, 2, 6): "decreases from 4 to 2 at entry 2",
    (0, 7): "ends at 7, beyond T=6",
    (0, 4, 2**31 - 1): "beyond T=6",
}


@pytest.mark.parametrize("borders", BAD_BORDERS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bad_values_in_cu_seqlens_are_refused_on_the_cpu(borders, dtype):
    decision = decide(packed_on(CPU, borders=borders, dtype=dtype))
    assert decision.error is ValueError and BAD_BORDERS[borders] in decision.reason


def test_a_copy_on_the_host_with_other_values_is_refused_on_the_cpu():
    decision = decide(packed_on(CPU, cu_seqlens_cpu=torch.tensor([0, 3, 3, 6])))
    assert decision.error is ValueError and "differ in their values" in decision.reason


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias"])
def test_integers_are_refused_on_the_cpu(name):
    decision = decide(call_on(CPU, **{name: getattr(call_on(CPU), name).to(torch.int64)}))
    assert decision.error is ValueError and f"{name} is int64" in decision.reason


# --- what the GPU path does not do ------------------------------------------------------------------------------------

GPU_DECLINES = {
    "K": (lambda: call_on(GPU, K=64), "head_dim K=64 is not supported (128)"),
    "V": (lambda: call_on(GPU, V=256), "head_dim V=256 is not supported (128)"),
    "v without a last dimension": (
        lambda: call_on(GPU, v=zeros(2, 6, 4, device=GPU, dtype=torch.bfloat16)), "head_dim V=0 is not supported",
    ),
    "no batch": (lambda: call_on(GPU, B=0), "nothing to compute"),
    "fp16 q": (lambda: call_on(GPU, q=zeros(2, 6, 2, K, device=GPU, dtype=torch.float16)), "q is float16"),
    "fp32 k": (lambda: call_on(GPU, k=zeros(2, 6, 2, K, device=GPU)), "k is float32"),
    "fp32 v": (lambda: call_on(GPU, v=zeros(2, 6, 4, K, device=GPU)), "v is float32"),
    "fp16 g": (lambda: call_on(GPU, g=zeros(2, 6, 4, K, device=GPU, dtype=torch.float16)), "g is float16"),
    "fp64 beta": (lambda: call_on(GPU, beta=zeros(2, 6, 4, device=GPU, dtype=torch.float64)), "beta is float64"),
    "integer A_log": (lambda: call_on(GPU, A_log=zeros(4, device=GPU, dtype=torch.int32)), "A_log is int32"),
    "bound too low, not called safe": (lambda: call_on(GPU, safe_gate=False, lower_bound=-6), "-6 is outside"),
    "positive bound, not called safe": (lambda: call_on(GPU, safe_gate=False, lower_bound=1.0), "1.0 is outside"),
}


@pytest.mark.parametrize("case", GPU_DECLINES)
def test_what_the_kernels_do_not_do_is_left_to_triton(gpu, case):
    build, reason = GPU_DECLINES[case]
    decision = decide(build())
    assert decision.path == "triton" and decision.error is None and reason in decision.reason


def test_intermediate_states_are_left_to_triton_on_a_gpu(gpu):
    with torch.inference_mode():
        decision = decide(call_on(GPU, return_intermediate_states=True))
    assert decision.path == "triton" and "return_intermediate_states" in decision.reason


def test_tensor_subclasses_are_left_to_triton_on_a_gpu(gpu):
    class Wrapped(torch.Tensor):
        pass

    decision = decide(call_on(GPU, v=call_on(GPU).v.as_subclass(Wrapped)))
    assert decision.path == "triton" and "Wrapped" in decision.reason
    parameter = torch.nn.Parameter(call_on(GPU).v, requires_grad=False)
    assert decide(call_on(GPU, v=parameter)) == OURS[GPU]


INPUTS = ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"]


@pytest.mark.parametrize("name", INPUTS)
def test_gradients_on_a_gpu_are_left_to_triton(gpu, name):
    call = call_on(GPU, **{name: getattr(call_on(GPU), name).requires_grad_()})
    decision = decide(call)
    assert decision.path == "triton" and "gradients are needed" in decision.reason
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert decide(call) == OURS[GPU]


def test_enabled_gradients_that_nobody_needs_are_served(gpu):
    assert torch.is_grad_enabled()
    assert decide(call_on(GPU)) == OURS[GPU]


@pytest.mark.parametrize("name", INPUTS)
def test_gradients_on_the_cpu_are_served(name):
    assert decide(call_on(CPU, **{name: getattr(call_on(CPU), name).requires_grad_()})) == OURS[CPU]


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_parameters_that_are_not_used_need_no_gradients(gpu, name):
    from tests.test_call import NEWEST

    call = call_on(GPU)
    arguments = {field: getattr(call, field) for field in ("q", "k", "v", "g", "beta")}
    call = NEWEST.bind((), arguments | {name: getattr(call, name).requires_grad_()})
    assert decide(call) == OURS[GPU]


# --- calls of the usual kind ------------------------------------------------------------------------------------------

# Served forms about which the rules are asked: they are rare.
NOT_USUAL = {"varlen with a copy on the host", "graph"}
STOPPED = [build for table in (REFUSED_BY_FLA, LATE, LEFT, MALFORMED) for build, _ in table.values()]
STOPPED += [lambda device, build=build: build() for build, _ in GPU_DECLINES.values()]


def rules_asked(monkeypatch) -> list:
    """The rules that are asked from now on, one after the other."""
    asked, first = [], dispatch._first

    def noting(rules, call, dims):
        asked.extend(rules)
        return first(rules, call, dims)

    monkeypatch.setattr(dispatch, "_first", noting)
    return asked


@pytest.mark.parametrize("form", SERVED)
def test_calls_of_the_usual_kind_are_served_without_asking_every_rule(gpu, monkeypatch, form):
    call = SERVED[form](GPU)
    asked = rules_asked(monkeypatch)
    assert decide(call) == OURS[GPU]
    if form in NOT_USUAL:
        assert dispatch.usual_sizes(call) is None and set(asked) > {dispatch.cuda_gradients, dispatch.fla_shapes}
    else:
        assert dispatch.usual_sizes(call) == dispatch.Dims.of(call) and asked == [dispatch.cuda_gradients]


@pytest.mark.parametrize("build", STOPPED)
def test_a_call_that_a_rule_stops_is_never_of_the_usual_kind(gpu, build):
    assert dispatch.usual_sizes(build(GPU)) is None


def test_every_rule_for_a_gpu_is_covered_or_asked():
    groups = (
        dispatch.READABLE, dispatch.CUDA_DOES_NOT, dispatch.FLA_REFUSES, dispatch.NOT_OURS, dispatch.MALFORMED,
        dispatch.FLA_REFUSES_LATE, dispatch.CUDA_CANNOT_HOLD,
    )  # fmt: skip
    rules = [rule for group in groups for rule in group]
    assert dispatch._COVERED < set(rules)
    assert [rule for rule in rules if rule not in dispatch._COVERED] == list(dispatch._not_covered)


# --- devices and libraries --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["meta", "xpu", "hip", "npu"])
def test_other_devices_are_left_to_triton(monkeypatch, kind):
    monkeypatch.setattr(dispatch, "device_facts", lambda device: DeviceFacts(kind))
    decision = decide(call_on(GPU))
    assert decision == Decision("triton", f"tensors on a {kind} device are not supported")


def test_device_facts_of_real_devices():
    assert dispatch.device_facts(torch.device("cpu")) == DeviceFacts("cpu")
    assert dispatch.device_facts(torch.device("meta")) == DeviceFacts("meta")


def test_amd_gpus_are_not_taken_for_nvidia(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    dispatch.device_facts.cache_clear()
    try:
        assert dispatch.device_facts(torch.device("cuda:0")) == DeviceFacts("hip")
    finally:
        dispatch.device_facts.cache_clear()


@pytest.mark.parametrize(
    ("capability", "archs", "expected"),
    [
        ((8, 0), ("80",), "80"),
        ((8, 6), ("80",), "80"),
        ((8, 9), ("80", "86", "89"), "89"),
        ((8, 7), ("80", "86", "89"), "86"),
        ((8, 0), ("86",), None),
        ((7, 5), ("80", "90a"), None),
        ((9, 0), ("80",), None),
        ((9, 0), ("80", "90a"), "90a"),
        ((9, 0), ("90", "90a"), "90a"),
        ((10, 0), ("90a", "100a"), "100a"),
        ((10, 3), ("100a",), None),
        ((10, 3), ("100",), "100"),
        ((10, 3), ("100f",), "100f"),
        ((10, 3), ("100a", "103a"), "103a"),
        ((12, 0), ("80", "90a", "100a", "103a", "120a"), "120a"),
        ((12, 1), ("120a",), None),
        ((9, 0), (), None),
    ],
)
def test_an_architecture_is_compared_with_what_was_built(capability, archs, expected):
    assert dispatch.arch_for(capability, archs) == expected


@pytest.fixture
def library(monkeypatch):
    """Replaces the compiled library; decisions about the real one are forgotten before and after."""
    from fla_kda_backend import ops

    def pretend(info, error=None):
        monkeypatch.setattr(ops, "library", lambda: info)
        monkeypatch.setattr(ops, "load_error", lambda: error)

    monkeypatch.setattr(dispatch, "device_facts", lambda device: DeviceFacts("cuda", (9, 0)))
    dispatch.library_for.cache_clear()
    yield pretend
    dispatch.library_for.cache_clear()


def test_without_kernels_the_reason_is_that_of_the_library(library):
    library(None, "it was built without nvcc")
    assert decide(call_on(GPU)) == Decision("triton", "no kernels are loaded: it was built without nvcc")


def test_kernels_of_another_architecture_are_not_launched(library):
    library(SimpleNamespace(archs=("80", "100a")))
    reason = "the kernels were built for sm_80, sm_100a and cannot run on sm_90"
    assert decide(call_on(GPU)) == Decision("triton", reason)


def test_kernels_of_the_devices_architecture_are_launched(library):
    library(SimpleNamespace(archs=("80", "90a")))
    assert decide(call_on(GPU)) == Decision("hopper", arch="90a")


@pytest.mark.parametrize("archs, capability, arch", [(("80", "90a"), (8, 6), "80"), (("80", "120a"), (12, 0), "120a")])
def test_other_gpus_get_the_portable_kernel(monkeypatch, library, archs, capability, arch):
    library(SimpleNamespace(archs=archs))
    monkeypatch.setattr(dispatch, "device_facts", lambda device: DeviceFacts("cuda", capability))
    assert decide(call_on(GPU)) == Decision("portable", arch=arch)


@pytest.mark.parametrize(
    "forced, arch, decision",
    [
        ("hopper", "90a", Decision("hopper", arch="90a")),
        ("portable", "90a", Decision("portable", arch="90a")),
        ("portable", "80", Decision("portable", arch="80")),
        ("hopper", "80", Decision("triton", "FLA_KDA_FORCE=hopper, but sm_80 has the portable kernel alone")),
        ("triton", "90a", Decision("triton", "FLA_KDA_FORCE=triton")),
        ("fastest", "90a", Decision("triton", "FLA_KDA_FORCE=fastest is none of hopper, portable, triton")),
    ],
)
def test_a_path_can_be_forced_on_a_gpu(gpu, monkeypatch, forced, arch, decision):
    monkeypatch.setattr(dispatch, "library_for", lambda capability: (arch, ""))
    monkeypatch.setenv("FLA_KDA_FORCE", forced)
    assert decide(call_on(GPU)) == decision


@pytest.mark.parametrize("T", [1, 2, 33, 5000])
def test_the_hopper_kernel_takes_packed_sequences_of_any_length(gpu, T):
    call = packed_on(GPU, (0, 1, 1, T), T=T, initial_state=None)
    assert decide(call) == Decision("hopper", arch="90a")


def test_a_forced_path_of_a_gpu_leaves_cpu_tensors_alone(monkeypatch):
    monkeypatch.setenv("FLA_KDA_FORCE", "triton")
    assert decide(call_on(CPU)) == OURS[CPU]


def test_forcing_a_path_does_not_serve_a_call_that_the_rules_decline(gpu, monkeypatch):
    monkeypatch.setenv("FLA_KDA_FORCE", "hopper")
    assert decide(call_on(GPU, K=64)).path == "triton"


def test_more_sequences_times_heads_than_a_grid_holds_are_declined(gpu, monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_SEQUENCES_TIMES_HEADS", 12)
    assert decide(packed_on(GPU, (0, 2, 6), initial_state=None)) == OURS[GPU]
    decision = decide(packed_on(GPU, (0, 2, 4, 6), initial_state=None))
    assert decision == Decision("triton", "3 sequences of HV=4 heads are more than one launch can hold")


def test_every_path_has_a_label():
    assert dispatch.PATH_LABELS == {
        "hopper": "FlashKDA Hopper",
        "portable": "FlashKDA portable",
        "reference": "torch reference",
        "triton": "Triton",
    }
