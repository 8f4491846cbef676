"""Are we let in by every FLA version, by the way that works there, and can we leave again? Real FLA, in new processes.

All run on CPU tensors, which FLA's own kernels cannot take: what is not served ends in an error, never in a silent
Triton.
"""

from functools import cache

import pytest

from tests.kdakit.fla_versions import FLA_VERSIONS, run

# float32 arithmetic against the recurrence in float64, over 70 tokens: far above its rounding (1e-6), far below any
# mistake.
TOLERANCE = 1e-5
WAYS = {
    "0.4.2": "attribute",
    "0.5.0": "fla.ops.backends",
    "0.5.1": "fla.ops.backends",
    "0.5.2": "fla.ops.backends",
    "0.6.0": "fla.backends",
}
# What the installed chunk_kda honours, by version.
SIGMOID_IN_KERNEL = ("0.5.1", "0.5.2", "0.6.0")
NEW_STATE_NAME = SIGMOID_IN_KERNEL
OPTIONAL_A_LOG = ("0.6.0",)
GVA = ("0.5.0", "0.5.1", "0.5.2", "0.6.0")

each_version = pytest.mark.parametrize("version", FLA_VERSIONS)
# One for each way, and one where the way depends on torch.
each_way = pytest.mark.parametrize("version", ["0.4.2", "0.5.0", "0.5.2", "0.6.0"])

INPUTS = """
import os, sys, warnings, inspect
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
B, T, H, K, V = 1, 70, 2, 32, 16

def inputs(B=B, HV=H):
    n = torch.randn
    return dict(q=n(B, T, H, K), k=n(B, T, H, K), v=n(B, T, HV, V), g=-n(B, T, HV, K).abs(), beta=torch.rand(B, T, HV))

def error_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None

def distance(actual, exact):
    return float((actual.double() - exact).norm() / exact.norm())
"""

# --- FLA imported after torch, as in a user's program: one process per version answers several tests ------------------

SERVED = """
import importlib
assert "fla" not in sys.modules
from fla.ops.kda import chunk_kda                 # nothing of ours is imported by the user
import fla, fla.ops, fla.ops.kda.chunk
import fla_kda_backend
from fla_kda_backend import reference, registration

errors, paths = {}, {}
def check(name, arguments, judged=None, function=chunk_kda):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        o, state = function(**arguments, output_final_state=True, use_qk_l2norm_in_kernel=True)
    judged = judged if judged is not None else arguments
    exact_o, exact_state = reference.recurrent_kda(**judged, output_final_state=True, use_qk_l2norm_in_kernel=True)
    errors[name] = [distance(o, exact_o), distance(state, exact_state)]
    paths[name] = fla_kda_backend.last_dispatch().path

x = inputs()
state = torch.randn(B, H, V, K)
check("dense", x | dict(initial_state=state.mT.contiguous()))
v_first = x | dict(initial_state=state, state_v_first=True)
check("old name", x | dict(initial_state=state, transpose_state_layout=True), v_first)
check("varlen", x | dict(cu_seqlens=torch.tensor([0, 1, 1, 40, 70], dtype=torch.int32)))
gate = x | dict(A_log=torch.randn(H), dt_bias=torch.randn(H * K), use_gate_in_kernel=True)
check("softplus", gate)
check("bounded", gate | dict(lower_bound=-5.0, safe_gate=True), gate | dict(lower_bound=-5.0))
check("fla.ops", x, function=fla.ops.chunk_kda)
check("fla.ops.kda.chunk", x, function=fla.ops.kda.chunk.chunk_kda)
check("fla.layers.kda", x, function=importlib.import_module("fla.layers.kda").chunk_kda)
if SIGMOID:
    check("new names", v_first | dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True))
if GROUPED:
    check("GVA", inputs(HV=4))
if OPTIONAL_A:
    check("bounded without A_log", x | dict(use_gate_in_kernel=True, lower_bound=-5.0))
with torch.inference_mode():
    results = chunk_kda(**x, return_intermediate_states=True)
leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
chunk_kda(**leaves)[0].sum().backward()
original = inspect.unwrap(chunk_kda)
registry = getattr(sys.modules.get("fla.ops.kda.backends"), "kda_registry", None)
report(
    version=fla.__version__, way=registration.current().way, decodes=registration.current().decodes,
    errors=errors, paths=paths, counts=fla_kda_backend.dispatch_counts(),
    backends=None if registry is None else sorted(registry._backends),
    h=list(results[2].shape),
    gradients=[bool(leaf.grad.abs().sum() > 0) for leaf in leaves.values()],
    same_signature=str(inspect.signature(chunk_kda)) == str(inspect.signature(original)),
    original=[original.__name__, original.__module__, inspect.getsourcefile(original).endswith("chunk.py")],
    name=chunk_kda.__name__,
    bound=[fla.ops.chunk_kda is chunk_kda, fla.ops.kda.chunk.chunk_kda is chunk_kda],
)
"""

MEANING = """
def reason(**changes):
    error_of(chunk_kda, **(x | changes))
    latest = fla_kda_backend.last_dispatch()
    return [latest.path, latest.reason]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    chunk_kda(**x, transpose_state_layout=True)
report(
    sigmoid=reason(use_beta_sigmoid_in_kernel=True),
    doubled=reason(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
    v_first=reason(state_v_first=True),
    chunk_size=reason(chunk_size=32),
    harmless=reason(use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, chunk_size=64),
    no_A_log=reason(use_gate_in_kernel=True, lower_bound=-5.0, A_log=None),
    grouped=reason(**inputs(HV=4)),
    warned=[str(w.message) for w in caught if w.category is DeprecationWarning and "transpose" in str(w.message)],
)
"""

OURS_TO_REFUSE = """
with torch.no_grad():
    outside = error_of(chunk_kda, **x, return_intermediate_states=True)
report(
    decreasing=error_of(chunk_kda, **x, cu_seqlens=torch.tensor([0, 50, 40, 70])),
    beyond=error_of(chunk_kda, **x, cu_seqlens=torch.tensor([0, 71])),
    two_dimensional=error_of(chunk_kda, **x, cu_seqlens=torch.tensor([[0, 70]])),
    values=error_of(chunk_kda, **(x | dict(v=x["v"][:, :60]))),
    outside=outside,
)
"""

REFUSALS = """
from types import SimpleNamespace

S = torch.zeros(B, H, K, V)
pair = torch.tensor([0, 30, 70])
gate = dict(use_gate_in_kernel=True, A_log=torch.zeros(H))
context = SimpleNamespace(cu_seqlens=pair, cu_seqlens_cpu=None)
cases = {
    "context with a state": dict(cp_context=context, initial_state=S),
    "context with a final state": dict(cp_context=context, output_final_state=True),
    "context without sequences": dict(cp_context=SimpleNamespace(cu_seqlens=None)),
    "batch with sequences": inputs(B=2) | dict(cu_seqlens=pair),
    "states for sequences": dict(cu_seqlens=pair, initial_state=S),
    "state dtype": dict(initial_state=S.bfloat16()),
    "no A_log": dict(use_gate_in_kernel=True),
    "no bound": gate | dict(safe_gate=True),
    "bound": gate | dict(safe_gate=True, lower_bound=-5.5),
    "k shape": dict(k=torch.zeros(B, T, H, 8)),
    "K": dict(q=torch.zeros(B, T, H, 300), k=torch.zeros(B, T, H, 300), g=torch.zeros(B, T, H, 300)),
    "HV": inputs(HV=3),
    "g shape": dict(g=torch.zeros(B, T, H, 8)),
    "beta shape": dict(beta=torch.zeros(B, T, H, 1)),
    "positional": None,
}
if SIGMOID:
    cases |= {
        "neg_eigval": dict(allow_neg_eigval=True),
        "chunk_size": dict(chunk_size=16),
        "both names": dict(state_v_first=True, transpose_state_layout=True),
    }

def all_errors():
    found = {}
    for name, changes in cases.items():
        if changes is None:
            found[name] = error_of(chunk_kda, *range(40))
        else:
            found[name] = error_of(chunk_kda, **(x | changes))
    return found

from fla_kda_backend import log
log.reset()
with_us = all_errors()
os.environ["FLA_KDA_STRICT"] = "1"
strict = all_errors()
counts = fla_kda_backend.dispatch_counts()
strict_unknown = error_of(chunk_kda, **x, foo=1)
os.environ["FLA_KDA_STRICT"] = "0"
fla_kda_backend.disable()
report(with_us=with_us, strict=strict, without_us=all_errors(), refused_counts=counts, strict_unknown=strict_unknown)
"""


def with_facts(version: str, *scripts: str) -> str:
    facts = dict(SIGMOID=version in SIGMOID_IN_KERNEL, GROUPED=version in GVA, OPTIONAL_A=version in OPTIONAL_A_LOG)
    return "\n".join((*(f"{name} = {value}" for name, value in facts.items()), INPUTS, *scripts))


@cache
def in_a_users_program(version: str) -> dict:
    return run(version, with_facts(version, SERVED, MEANING, OURS_TO_REFUSE, REFUSALS))


@each_version
def test_every_version_is_served_with_no_change_to_the_users_code(version):
    facts = in_a_users_program(version)
    assert facts["version"] == version and facts["way"] == WAYS[version]
    assert facts["decodes"] is (version == "0.6.0")
    assert_all_forms_are_served_correctly(facts)


def assert_all_forms_are_served_correctly(facts: dict) -> None:
    assert set(facts["paths"].values()) == {"reference"} and "fla.layers.kda" in facts["paths"]
    assert facts["counts"] == {"hopper": 0, "portable": 0, "reference": len(facts["paths"]) + 2, "triton": 0}
    for form, (o, state) in facts["errors"].items():
        assert o < TOLERANCE and state < TOLERANCE, f"{form}: {o}, {state}"
    assert facts["h"] == [1, 2, 2, 32, 16]
    assert all(facts["gradients"])
    assert facts["same_signature"] and facts["name"] == "chunk_kda"
    assert facts["original"] == ["chunk_kda", "fla.ops.kda.chunk", True]
    assert all(facts["bound"])


@each_version
def test_what_a_version_does_not_honour_is_not_honoured_by_us_either(version):
    facts = in_a_users_program(version)
    served = ["reference", ""]
    for name in ("sigmoid", "doubled", "v_first", "chunk_size"):
        if version in SIGMOID_IN_KERNEL:
            assert facts[name] == served, name
        else:
            assert facts[name][0] == "triton" and "not honoured by this FLA version" in facts[name][1], name
    assert facts["harmless"] == served
    if version in OPTIONAL_A_LOG:
        assert facts["no_A_log"] == served
    else:
        assert facts["no_A_log"] == ["triton", "this FLA version needs A_log with use_gate_in_kernel"]
    if version in GVA:
        assert facts["grouped"] == served
    else:
        assert facts["grouped"][0] == "triton" and "has no GVA" in facts["grouped"][1]
    assert len(facts["warned"]) == (version in NEW_STATE_NAME)


@each_version
def test_what_would_be_read_out_of_bounds_is_refused_in_one_sentence(version):
    facts = in_a_users_program(version)
    assert facts["decreasing"] == "ValueError: cu_seqlens decreases from 50 to 40 at entry 2"
    assert facts["beyond"] == "ValueError: cu_seqlens ends at 71, beyond T=70"
    assert facts["two_dimensional"] == "ValueError: cu_seqlens has 2 dimensions instead of 1"
    if version == "0.4.2":  # it has no GVA, and therefore checks v
        assert facts["values"].startswith("AssertionError: v must be of shape")
    else:
        assert facts["values"].startswith("ValueError: v has shape [1, 60, 2, 16]")
    assert facts["outside"] == "AssertionError: return_intermediate_states is only allowed in inference mode"


@each_version
def test_what_fla_refuses_it_still_refuses_with_its_own_error_strict_or_not(version):
    facts = in_a_users_program(version)
    assert facts["with_us"] == facts["without_us"] == facts["strict"]
    kinds = {error.split(":")[0] for error in facts["with_us"].values()}
    assert kinds == {"AssertionError", "TypeError", "ValueError"}
    assert facts["refused_counts"] == {"hopper": 0, "portable": 0, "reference": 0, "triton": 2 * len(facts["with_us"])}
    assert facts["strict_unknown"].startswith("StrictModeError: FLA_KDA_STRICT=1") and "foo" in facts["strict_unknown"]


# --- FLA imported first, without us: what was there, with us, and what is there after we have left --------------------

SWITCHES = """
import fla.ops.kda, fla.layers.kda
from fla.ops.kda import chunk_kda
try:
    import fla.ops.kda.backends       # FLA 0.5 loads its own backends at the first call
except ImportError:
    pass

def registries():
    found = {}
    for name in ("fla.backends", "fla.ops.backends"):
        module = sys.modules.get(name)
        for group in ("_operation_registries", "_function_registries"):
            for key, registry in getattr(module, group, {}).items():
                found[str(key)] = sorted(registry._backends)
        for key, registry in getattr(getattr(module, "BackendRegistry", None), "_registries", {}).items():
            found[str(key)] = sorted(registry._backends)
            found[str(key) + " active"] = getattr(registry._active, "backend_type", None)
    return found

def bindings():
    return [id(m.chunk_kda) for m in (fla.ops, fla.ops.kda, fla.ops.kda.chunk, fla.layers.kda)]

x = inputs()
untouched, before = [registries(), bindings()], error_of(chunk_kda, **x)
assert "fla_kda_backend" not in sys.modules
import fla_kda_backend
from fla_kda_backend import registration
names = [fla.ops.chunk_kda, fla.ops.kda.chunk_kda, fla.ops.kda.chunk.chunk_kda, fla.layers.kda.chunk_kda, chunk_kda]
after = [error_of(name, **x) for name in names]
first_counts = fla_kda_backend.dispatch_counts()

def ours():
    before = fla_kda_backend.dispatch_counts()["reference"]
    error = error_of(fla.ops.kda.chunk_kda, **x)
    served = fla_kda_backend.dispatch_counts()["reference"] - before
    assert (error is None) == (served == 1), (error, served)
    return served == 1

states = {"at first": ours()}
os.environ["FLA_KDA_BACKEND"] = "0"
states["switched off"] = ours()
os.environ["FLA_KDA_BACKEND"] = "1"
states["switched on"] = ours()
way, with_us = registration.current().way, [registries(), bindings()]
fla_kda_backend.disable()
states["disabled"] = ours()
held_while_disabled = [error_of(name, **x) for name in names]
without_us = [registries(), bindings()]
fla_kda_backend.disable()
states["disabled twice"] = ours()
states["enabled"] = fla_kda_backend.enable() == way and ours()
fla_kda_backend.enable()
states["enabled twice"] = ours()
again = [registries(), bindings()]
fla_kda_backend.disable()
report(
    before=before, after=after, first_counts=first_counts, untouched=untouched, states=states, way=way,
    held_while_disabled=held_while_disabled,
    with_us=with_us, without_us=without_us, again=again,
    without_us_again=[registries(), bindings()], status_after=fla_kda_backend.status()["registration"],
)
"""


@cache
def with_fla_first(version: str) -> dict:
    return run(version, INPUTS + SWITCHES, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@each_way
def test_fla_may_be_imported_first(version):
    facts = with_fla_first(version)
    assert facts["before"] is not None
    assert facts["way"] == WAYS[version]
    assert facts["after"] == [None] * 5 and facts["first_counts"]["reference"] == 5


@each_way
def test_switches_work_at_any_time(version):
    assert with_fla_first(version)["states"] == {
        "at first": True,
        "switched off": False,
        "switched on": True,
        "disabled": False,
        "disabled twice": False,
        "enabled": True,
        "enabled twice": True,
    }


@each_way
def test_disable_restores_what_was_there(version):
    facts = with_fla_first(version)
    for registries, bindings in (facts["without_us"], facts["without_us_again"]):
        assert bindings == facts["untouched"][1]
        for name, backends in facts["untouched"][0].items():  # FLA makes others when its own code runs
            assert registries[name] == backends, name
    assert None not in facts["held_while_disabled"], "a name bound earlier must reach FLA's own function, too"
    assert facts["status_after"] is None
    (registries, bindings), own_bindings = facts["with_us"], facts["untouched"][1]
    registered = any("fla_kda_backend" in backends for backends in registries.values() if backends)
    if facts["way"] == "attribute":
        assert not registered and not set(bindings) & set(own_bindings)
    else:
        assert registered and bindings == own_bindings and facts["again"] == facts["with_us"]


# --- FLA's own switch -------------------------------------------------------------------------------------------------

BYPASSED = INPUTS + """
from fla.ops.kda import chunk_kda
import fla_kda_backend
x = inputs()
first = error_of(chunk_kda, **x)
way = fla_kda_backend.enable()
report(first=first, way=way, second=error_of(chunk_kda, **x), counts=fla_kda_backend.dispatch_counts())
os.environ.pop("FLA_DISABLE_BACKEND_DISPATCH")
report(later=fla_kda_backend.enable())
"""


@each_way
def test_fla_own_switch_bypasses_everything(version):
    facts = run(version, BYPASSED, FLA_DISABLE_BACKEND_DISPATCH="1")
    assert facts["first"] is not None and facts["second"] is not None and facts["way"] is None
    assert facts["counts"] == {"hopper": 0, "portable": 0, "reference": 0, "triton": 0}
    # FLA's dispatcher, which 0.4.2 does not have for KDA, reads the switch once: it stays off for this process.
    assert facts["later"] == ("attribute" if version == "0.4.2" else None)


# --- particular ways --------------------------------------------------------------------------------------------------

# Before 2.11, torch.compiler.disable unwrapped the function that it was given down to the last one it had been given
# before, which in fla-core 0.5.1 and 0.5.2 throws FLA's dispatcher away.
DEAD_DISPATCH = """
import torch, functools
disable = torch.compiler.disable

def unwrapping(fn=None, recursive=True, *, reason=None):
    if fn is None:
        return functools.partial(unwrapping, recursive=recursive, reason=reason)
    while hasattr(fn, "_torchdynamo_orig_callable"):
        fn = fn._torchdynamo_orig_callable
    return disable(fn, recursive=recursive, reason=reason)

torch.compiler.disable = unwrapping
"""


@pytest.mark.parametrize("version", ["0.5.1", "0.5.2"])
def test_a_registry_that_is_never_asked_is_not_relied_on(version):
    facts = run(version, DEAD_DISPATCH + with_facts(version, SERVED))
    assert facts["way"] == "attribute"
    assert_all_forms_are_served_correctly(facts)
    assert not any("fla_kda_backend" in name for name in facts["backends"]), "it is left as it was"
    assert len(facts["backends"]) >= 2


RANK = """
import fla.ops.kda, fla.backends as backends
import fla_kda_backend
chunk_registry = backends._function_registries[inspect.unwrap(fla.ops.kda.chunk_kda)]
registries = [chunk_registry, backends._operation_registries["kda"]]
report(orders=[[b.backend_type for b in registry._get_sorted_backends()] for registry in registries])
"""

DECODE = """
from fla.ops.kda import fused_recurrent_kda
from fla_kda_backend import reference
from fla_kda_backend.registration import common
x = inputs()
state = torch.randn(B, H, V, K)
arguments = x | dict(initial_state=state, state_v_first=True, output_final_state=True, use_qk_l2norm_in_kernel=True)
o, s = fused_recurrent_kda(**arguments)
exact_o, exact_s = reference.recurrent_kda(**arguments)
counts = fla_kda_backend.dispatch_counts("fused_recurrent_kda")
os.environ["FLA_KDA_BACKEND"] = "0"
off = error_of(fused_recurrent_kda, **arguments)
del os.environ["FLA_KDA_BACKEND"]
fla_kda_backend.disable()
disabled = error_of(fused_recurrent_kda, **arguments)
on_gpu = common.declines_decode((), dict(q=torch.empty(1, device="meta")))
errors = [distance(o, exact_o), distance(s, exact_s)]
report(error=errors, decode_counts=counts, off=off, disabled=disabled, on_gpu=on_gpu)
"""


@cache
def with_both_registries() -> dict:
    return run("0.6.0", INPUTS + RANK + DECODE)


def test_we_rank_behind_ascend_and_ahead_of_flash_kda():
    chunk, inner = with_both_registries()["orders"]
    assert chunk[0] == "fla_kda_backend" and "flash_kda" in chunk
    assert inner[:2] == ["triton_ascend", "fla_kda_backend"]


def test_decode_is_served_for_cpu_tensors_where_fla_lets_a_backend_in():
    facts = with_both_registries()
    assert max(facts["error"]) < TOLERANCE
    assert facts["decode_counts"] == {"hopper": 0, "portable": 0, "reference": 1, "triton": 0}
    assert facts["off"] is not None and facts["disabled"] is not None
    assert facts["on_gpu"] == "decode is only served for CPU tensors"


COMPILED = """
from fla.ops.kda import chunk_kda
import fla_kda_backend
x = inputs()

def model(q, k, v, g, beta):
    return chunk_kda(q * 2, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0] + 1

eager = model(**x)
compiled = torch.compile(model, backend="eager")
same = [torch.equal(compiled(**x), eager) for _ in range(2)]
report(same=same, counts=fla_kda_backend.dispatch_counts())
"""

RELOADED = """
import fla.ops.kda
import fla_kda_backend
from fla_kda_backend import registration
first = registration.current()
for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
    del sys.modules[name]
import fla.ops.kda
x = inputs()
served = fla_kda_backend.dispatch_counts()["reference"]
error = error_of(fla.ops.kda.chunk_kda, **x)
report(
    error=error, anew=registration.current() is not first,
    newly_served=fla_kda_backend.dispatch_counts()["reference"] - served,
)
"""


@cache
def compiled_and_reloaded(version: str) -> dict:
    return run(version, INPUTS + COMPILED + RELOADED)


@pytest.mark.parametrize("version", ["0.4.2", "0.5.0", "0.6.0"])
def test_calls_stay_outside_of_compiled_graphs(version):
    facts = compiled_and_reloaded(version)
    assert facts["same"] == [True, True]
    assert facts["counts"] == {"hopper": 0, "portable": 0, "reference": 3, "triton": 0}


@pytest.mark.parametrize("version", ["0.4.2", "0.5.0", "0.6.0"])
def test_fla_imported_anew_is_served_again(version):
    facts = compiled_and_reloaded(version)
    assert facts["error"] is None and facts["anew"] and facts["newly_served"] == 1
