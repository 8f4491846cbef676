"""Can a user, and a program, see which path each call took and why?"""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import fla_kda_backend
from fla_kda_backend import log, registration, serve
from fla_kda_backend.call import Signature
from fla_kda_backend.dispatch import Decision
from tests.test_call import newest
from tests.test_dispatch import CPU, GPU, call_on, gpu, packed_on  # noqa: F401 (gpu is a fixture)

PREFIX = "[fla_kda_backend] chunk_kda -> "


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    for name in ("FLA_KDA_LOG", "FLA_KDA_STRICT", "FLA_KDA_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    log.reset()
    yield
    log.reset()


def record(call, decision: Decision = Decision("reference")) -> None:
    log.record("chunk_kda", decision, log.facts_of(call))


def lines(capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_without_the_variable_nothing_is_printed(capsys, monkeypatch):
    record(call_on(CPU))
    monkeypatch.setenv("FLA_KDA_LOG", "0")
    record(call_on(CPU))
    assert lines(capsys) == []
    assert fla_kda_backend.dispatch_counts()["reference"] == 2


def test_the_line_of_a_served_call_shows_arch_shape_and_modes(capsys, monkeypatch, gpu):  # noqa: F811
    monkeypatch.setenv("FLA_KDA_LOG", "1")
    record(call_on(GPU, state_v_first=True), Decision("portable", arch="90a"))
    assert lines(capsys) == [
        PREFIX + "FlashKDA portable (sm_90a) B=2 T=6 H=2 HV=4 K=128 V=128 bf16 gate=bounded beta=2sigmoid state=v_first"
    ]


def test_the_line_of_a_declined_call_shows_the_reason(capsys, monkeypatch):
    monkeypatch.setenv("FLA_KDA_LOG", "1")
    plain = dict(use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False)
    no_state = dict(initial_state=None, output_final_state=False)
    record(packed_on(CPU, **plain, **no_state), Decision("triton", "some reason"))
    assert lines(capsys) == [
        PREFIX + "Triton: some reason | B=1 T=6 H=2 HV=4 K=128 V=128 bf16 gate=given beta=given state=none varlen=3"
    ]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (dict(lower_bound=None), "gate=softplus"),
        (dict(allow_neg_eigval=False), "beta=sigmoid"),
        (dict(initial_state=None), "state=k_first"),
        (dict(output_final_state=False), "state=k_first"),
        (dict(q=torch.zeros(2, 6, 2, 128, dtype=torch.float16)), " fp16 "),
    ],
)
def test_the_line_names_each_mode(capsys, monkeypatch, changes, part):
    monkeypatch.setenv("FLA_KDA_LOG", "1")
    record(call_on(CPU, **changes))
    assert part in lines(capsys)[0]


def test_each_distinct_decision_is_printed_once(capsys, monkeypatch):
    monkeypatch.setenv("FLA_KDA_LOG", "1")
    for T in (6, 6, 8):
        record(call_on(CPU, T=T))
    record(call_on(CPU), Decision("triton", "a reason"))
    record(call_on(CPU), Decision("triton", "a later, different reason"))
    record(call_on(CPU, H=4))
    record(call_on(CPU), Decision("triton", "a reason"))
    printed = lines(capsys)
    assert len(printed) == 4
    assert "a later, different reason" in printed[2]


def test_all_prints_every_call(capsys, monkeypatch):
    monkeypatch.setenv("FLA_KDA_LOG", "all")
    for _ in range(3):
        record(call_on(CPU))
    assert len(lines(capsys)) == 3


def test_json_prints_one_object_a_line(capsys, monkeypatch):
    monkeypatch.setenv("FLA_KDA_LOG", "json")
    record(packed_on(CPU))
    record(None, Decision("triton", "unreadable"))
    first, second = map(json.loads, lines(capsys))
    assert first == {
        "operator": "chunk_kda", "path": "reference", "label": "torch reference", "reason": "", "arch": None, "B": 1,
        "T": 6, "H": 2, "HV": 4, "K": 128, "V": 128, "dtype": "bf16", "gate": "bounded", "beta": "2sigmoid",
        "state": "k_first", "varlen": 3,
    }  # fmt: skip
    assert second["reason"] == "unreadable" and second["B"] is None


def test_distinct_lines_have_an_end_and_say_so(capsys, monkeypatch):
    monkeypatch.setenv("FLA_KDA_LOG", "1")
    monkeypatch.setattr(log, "MAX_DISTINCT_LINES", 3)
    for number in range(10):
        record(call_on(CPU), Decision("triton", f"reason {number}"))
    printed = lines(capsys)
    assert len(printed) == 4 and "too many distinct decisions" in printed[3]


def test_a_call_that_cannot_be_read_is_logged_without_sizes(capsys, monkeypatch):
    monkeypatch.setenv("FLA_KDA_LOG", "1")
    record(call_on(CPU, q="not a tensor"), Decision("triton", "q: not a tensor"))
    record(call_on(CPU, q=torch.zeros(3)), Decision("triton", "q has 1 dimensions"))
    assert lines(capsys) == [PREFIX + "Triton: q: not a tensor", PREFIX + "Triton: q has 1 dimensions"]


@pytest.mark.parametrize("stderr", [None, "closed"])
def test_no_call_fails_for_want_of_a_stderr(monkeypatch, tmp_path, stderr):
    monkeypatch.setenv("FLA_KDA_LOG", "all")
    if stderr == "closed":
        stderr = (tmp_path / "stderr").open("w")
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    record(call_on(CPU))
    assert fla_kda_backend.dispatch_counts()["reference"] == 1


def test_programs_see_the_same_facts():
    assert fla_kda_backend.last_dispatch() is None
    assert fla_kda_backend.dispatch_counts() == {"hopper": 0, "portable": 0, "reference": 0, "triton": 0}
    record(call_on(CPU))
    record(call_on(CPU), Decision("triton", "a reason"))
    latest = fla_kda_backend.last_dispatch()
    assert (latest.path, latest.reason, latest.B, latest.HV, latest.gate) == ("triton", "a reason", 2, 4, "bounded")
    assert fla_kda_backend.dispatch_counts() == {"hopper": 0, "portable": 0, "reference": 1, "triton": 1}
    assert set(fla_kda_backend.dispatch_counts("fused_recurrent_kda").values()) == {0}


def test_no_tensor_is_kept_alive():
    import weakref

    call = call_on(CPU)
    q = weakref.ref(call.q)
    record(call)
    del call
    assert q() is None and fla_kda_backend.last_dispatch().T == 6


def test_counts_are_exact_with_many_threads(monkeypatch, capsys):
    monkeypatch.setenv("FLA_KDA_LOG", "1")
    call, each = call_on(CPU), 500

    def work():
        for _ in range(each):
            record(call)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fla_kda_backend.dispatch_counts()["reference"] == 8 * each
    assert len(lines(capsys)) == 1


# --- FLA_KDA_STRICT ---------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    return serve.Server(Signature.of(newest))


def served(server, call) -> bool:
    """Ask and run as FLA's dispatcher does: True when the call was ours. What `accepts` raises would be swallowed."""
    kwargs = {name: getattr(call, name) for name in ("q", "k", "v", "g", "beta", "initial_state", "output_final_state")}
    kwargs |= {name: getattr(call, name) for name in ("use_gate_in_kernel", "A_log", "lower_bound", "safe_gate")}
    kwargs |= dict.fromkeys(call.unknown, 1)
    try:
        accepted, reason = server.accepts((), kwargs)
    except Exception as swallowed:
        pytest.fail(f"raised where FLA swallows it: {swallowed!r}")
    if accepted:
        server.run((), kwargs)
    return accepted


def test_strict_raises_where_a_call_would_run_on_triton(server, monkeypatch):
    monkeypatch.setenv("FLA_KDA_STRICT", "1")
    with pytest.raises(serve.StrictModeError, match="FLA_KDA_STRICT=1.*foo"):
        served(server, call_on(CPU, unknown=("foo",)))
    assert served(server, call_on(CPU))


@pytest.mark.parametrize("value", ["", "0"])
def test_without_strict_the_call_is_declined(server, monkeypatch, value):
    monkeypatch.setenv("FLA_KDA_STRICT", value)
    assert not served(server, call_on(CPU, unknown=("foo",)))


def test_strict_leaves_what_fla_refuses_to_fla(server, monkeypatch):
    monkeypatch.setenv("FLA_KDA_STRICT", "1")
    assert not served(server, call_on(CPU, lower_bound=-7.0))


def test_strict_raises_for_gradients_on_a_gpu_with_the_reason(server, monkeypatch, gpu):  # noqa: F811
    monkeypatch.setenv("FLA_KDA_STRICT", "1")
    with pytest.raises(serve.StrictModeError, match="gradients are needed"):
        served(server, call_on(GPU, v=call_on(GPU).v.requires_grad_()))


def test_two_threads_do_not_take_each_others_calls(server, monkeypatch):
    monkeypatch.setitem(serve.RUNNERS, "reference", lambda call: call)
    ready = threading.Barrier(2)
    got = {}

    def work(name):
        inputs = {key: getattr(call_on(CPU), key) for key in ("q", "k", "v", "g", "beta")}
        for _ in range(100):
            assert server.accepts((), inputs)[0]
            ready.wait()
            got[name] = server.run((), inputs).q is inputs["q"] and got.get(name, True)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {"a": True, "b": True}


# --- the public function and the status -------------------------------------------------------------------------------


def test_the_public_function_serves_and_counts():
    call = call_on(CPU, K=16, V=8)
    o, state = fla_kda_backend.chunk_kda(
        call.q, call.k, call.v, call.g, call.beta, output_final_state=True, use_gate_in_kernel=True, A_log=call.A_log,
        state_v_first=True, allow_neg_eigval=True, use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    assert o.shape == (2, 6, 4, 8) and o.dtype == torch.bfloat16
    assert state.shape == (2, 4, 8, 16) and state.dtype == torch.float32
    assert fla_kda_backend.last_dispatch().path == "reference"
    assert fla_kda_backend.last_dispatch().state == "v_first"


def test_the_public_function_warns_of_the_old_name_at_the_caller():
    call = call_on(CPU, K=16, V=8)
    with pytest.warns(DeprecationWarning, match="transpose_state_layout") as warned:
        _, state = fla_kda_backend.chunk_kda(
            call.q, call.k, call.v, call.g, call.beta, output_final_state=True, transpose_state_layout=True
        )
    assert state.shape == (2, 4, 8, 16)
    assert Path(warned[0].filename) == Path(__file__)


def test_the_public_function_refuses_what_does_not_fit_in_one_sentence():
    call = call_on(CPU)
    with pytest.raises(ValueError, match=r"^v has shape \[2, 5, 4, 128\], its B and T must be those of q"):
        fla_kda_backend.chunk_kda(call.q, call.k, call.v[:, :5], call.g, call.beta)


WITHOUT_FLA = """
import sys, torch
sys.modules["fla"] = None                      # as if it were not installed
import fla_kda_backend
q = torch.zeros(1, 2, 1, 16)
try:
    fla_kda_backend.chunk_kda(q, q, q, q, q[..., 0], foo=1)
except RuntimeError as error:
    print(error)
print(fla_kda_backend.chunk_kda(q, q, q, q, q[..., 0])[0].shape == q.shape, fla_kda_backend.status()["registration"])
"""


def test_without_fla_the_public_function_serves_or_says_what_is_missing():
    command = [sys.executable, "-c", WITHOUT_FLA]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    refusal, working = done.stdout.splitlines()
    assert "foo" in refusal and "there is no FLA to fall back to" in refusal
    assert working == "True None"


def test_status_names_everything_a_bug_report_needs(monkeypatch):
    monkeypatch.setenv("FLA_KDA_LOG", "1")
    monkeypatch.delenv("FLA_KDA_STRICT", raising=False)
    status = fla_kda_backend.status()
    assert status["version"] == fla_kda_backend.__version__
    assert status["torch"] == torch.__version__
    assert status["environment"]["FLA_KDA_LOG"] == "1" and "FLA_KDA_STRICT" not in status["environment"]
    assert (status["library"] is None) == (status["library_error"] is not None)
    if status["library"] is not None:
        assert set(status["library"]) == {"path", "archs", "cuda", "torch"}
    current = registration.current()
    assert status["registration"] == (current.way if current else None)
    assert json.dumps(status)
