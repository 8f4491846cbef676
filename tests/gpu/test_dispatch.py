"""Which calls reach the kernels on a GPU, through FLA's own function, and which go on to Triton, with what reason?"""

import pytest
import torch

import fla_kda_backend
from fla_kda_backend.dispatch import PATH_LABELS
from tests.gpu import DEVICE
from tests.kdakit import cases, compare
from tests.kdakit.run import (
    environment,
    expected_path,
    kernel_paths,
    run_exactly,
    run_on_fla,
    run_on_kernels,
    same_bits,
)

fla_kda = pytest.importorskip("fla.ops.kda", reason="flash-linear-attention is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.*transpose_state_layout:DeprecationWarning")


def arguments_of(name: str = "1-kimi-linear", layout: str = "dense-tail", **sizes) -> dict:
    sizes = dict(tokens=96, heads=2, device=DEVICE, seed=41) | sizes
    return cases.build(cases.Case(cases.caller(name), layout, "randn"), **sizes).arguments


@pytest.fixture
def triton_calls(monkeypatch):
    """FLA's Triton implementation replaced by a recorder: tuning it for one small call takes minutes."""
    import fla.ops.kda.chunk

    calls = []

    class Recorder:
        @staticmethod
        def apply(*args):
            calls.append(args)
            return "the answer of Triton", None

    monkeypatch.setattr(fla.ops.kda.chunk, "ChunkKDAFunction", Recorder)
    return calls


@pytest.mark.parametrize("form", cases.CALLERS, ids=lambda form: form.name)
def test_fla_function_itself_is_served_by_the_kernels(form, triton_calls):
    arguments = arguments_of(form.name, "varlen" if form.packed_only else "dense-tail")
    expected = run_on_kernels(arguments)
    served = fla_kda_backend.dispatch_counts()[expected_path()]

    with torch.no_grad():
        o, state = fla_kda.chunk_kda(**arguments)

    assert not triton_calls
    assert fla_kda_backend.dispatch_counts()[expected_path()] == served + 1
    assert fla_kda_backend.last_dispatch().path == expected_path()
    assert same_bits(o, expected[0]) and same_bits(state, expected[1])


def needs_gradients() -> dict:
    return arguments_of() | dict(q=arguments_of()["q"].requires_grad_())


def small_heads() -> dict:
    return arguments_of(head_dim=64)


def half_precision() -> dict:
    return arguments_of(dtype=torch.float16)


DECLINED = {
    needs_gradients: "gradients are needed",
    small_heads: "K=64",
    half_precision: "float16",
}


@pytest.mark.parametrize("make", DECLINED, ids=lambda make: make.__name__)
def test_declined_calls_reach_triton_with_their_reason(make, triton_calls, monkeypatch):
    monkeypatch.delenv("FLA_KDA_STRICT", raising=False)

    o, _ = fla_kda.chunk_kda(**make())

    assert o == "the answer of Triton" and len(triton_calls) == 1
    dispatch = fla_kda_backend.last_dispatch()
    assert dispatch.path == "triton" and DECLINED[make] in dispatch.reason


@pytest.mark.parametrize("make", DECLINED, ids=lambda make: make.__name__)
def test_strict_mode_raises_instead_of_falling_back(make, triton_calls):
    with environment("FLA_KDA_STRICT", "1"), pytest.raises(RuntimeError, match=DECLINED[make]):
        fla_kda.chunk_kda(**make())
    assert not triton_calls


def test_a_boundary_tensor_on_the_cpu_is_declined_in_a_sentence(triton_calls):
    arguments = arguments_of(layout="varlen")
    arguments["cu_seqlens"] = arguments["cu_seqlens"].cpu()

    with torch.no_grad():
        fla_kda.chunk_kda(**arguments)

    assert len(triton_calls) == 1
    assert "cu_seqlens is on cpu" in fla_kda_backend.last_dispatch().reason


def test_disabled_backend_leaves_every_call_to_triton(triton_calls):
    arguments = arguments_of()
    counts = fla_kda_backend.dispatch_counts()

    fla_kda_backend.disable()
    try:
        with torch.no_grad():
            o, _ = fla_kda.chunk_kda(**arguments)
    finally:
        fla_kda_backend.enable()

    assert o == "the answer of Triton" and fla_kda_backend.dispatch_counts() == counts


def test_the_log_names_the_kernels_and_the_architecture(capfd, triton_calls):
    arguments = arguments_of("3-kimi-k3", "varlen")
    with environment("FLA_KDA_LOG", "all"), torch.no_grad():
        fla_kda.chunk_kda(**arguments)

    line = capfd.readouterr().err.splitlines()[-1]
    arch = fla_kda_backend.last_dispatch().arch
    assert line.startswith(f"[fla_kda_backend] chunk_kda -> {PATH_LABELS[expected_path()]} (sm_{arch}) B=1 ")
    assert "gate=bounded" in line and "state=v_first" in line and "varlen=5" in line


def test_training_calls_still_get_fla_results_and_gradients():
    if expected_path() != kernel_paths()[0]:
        pytest.skip("declined calls do not depend on the kernel: once is enough")
    # 32 heads with activated gates: the variant that parity.py has FLA tune anyway.
    arguments = arguments_of(tokens=128, heads=32)
    exact_o, _ = run_exactly(arguments)
    trained = arguments | dict(v=arguments["v"].clone().requires_grad_())

    o, _ = fla_kda.chunk_kda(**trained)

    assert fla_kda_backend.last_dispatch().path == "triton"
    assert o.requires_grad
    compare.assert_close(o.detach(), exact_o, compare.CUDA_FORWARD_FEW_TERMS.o, "o of FLA's Triton kernels")
    kernels_o, _ = run_on_kernels(arguments)
    fla_o, _ = run_on_fla(arguments)
    assert not same_bits(kernels_o, fla_o), "two different implementations cannot agree to the last bit"
