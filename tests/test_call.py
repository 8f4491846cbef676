"""Are arguments bound as the installed function would bind them, and is nothing honoured that it ignores?"""

import dataclasses

import pytest
import torch

from fla_kda_backend.call import Call, NotBindable, Signature

# Functions of the shapes that FLA's versions have had. Their bodies name what they read out of **kwargs, as FLA's do.


def newest(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs,
):  # fmt: skip
    HV = v.shape[2]
    renamed = "transpose_state_layout" in kwargs
    return HV, kwargs.get("A_log"), kwargs.get("dt_bias"), kwargs.pop("chunk_size", 64), renamed


def oldest(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, lower_bound=None,
    disable_recompute=False, return_intermediate_states=False, cp_context=None, transpose_state_layout=False, **kwargs,
):  # fmt: skip
    return kwargs["A_log"], kwargs.get("dt_bias")


NEWEST, OLDEST = Signature.of(newest), Signature.of(oldest)


def tensors(HV: int = 2) -> dict:
    q = torch.zeros(1, 3, 2, 4)
    return dict(q=q, k=q.clone(), v=torch.zeros(1, 3, HV, 5), g=torch.zeros(1, 3, HV, 4), beta=torch.zeros(1, 3, HV))


def test_a_call_has_the_documented_fields_and_cannot_be_changed():
    call = NEWEST.bind((), tensors())
    assert [field.name for field in dataclasses.fields(Call)] == [
        "q", "k", "v", "g", "beta", "A_log", "dt_bias", "scale", "initial_state", "output_final_state",
        "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate",
        "lower_bound", "disable_recompute", "return_intermediate_states", "state_v_first", "cu_seqlens",
        "cu_seqlens_cpu", "cp_context", "use_graph", "max_num_seqs", "chunk_size", "unknown",
    ]  # fmt: skip
    assert type(call) is Call
    with pytest.raises(dataclasses.FrozenInstanceError):
        call.scale = 2.0
    assert dataclasses.replace(call, scale=2.0).scale == 2.0


def test_defaults_are_filled_in():
    inputs = tensors()
    call = NEWEST.bind((), inputs)
    assert all(getattr(call, name) is inputs[name] for name in inputs)
    assert call.scale == 4**-0.5
    assert call.chunk_size == 64 and call.unknown == ()
    assert NEWEST.bind((), tensors() | dict(scale=0.25)).scale == 0.25


@pytest.mark.parametrize("signature", [NEWEST, OLDEST], ids=["newest", "oldest"])
def test_positional_arguments_follow_the_order_of_the_installed_function(signature):
    inputs = tensors()
    values = [object() for _ in signature.positional[5:]]
    call = signature.bind((*inputs.values(), *values), dict(A_log=torch.zeros(2)))
    given = dict(zip(signature.positional[5:], values))
    given["state_v_first"] = given.pop("transpose_state_layout", given.get("state_v_first"))
    for name, value in given.items():
        assert getattr(call, name) is value, name


def test_the_two_orders_differ_where_a_copied_signature_would_go_wrong():
    at = 10
    assert NEWEST.positional[at] == "use_beta_sigmoid_in_kernel" and OLDEST.positional[at] == "cu_seqlens"


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((0,) * 23, {}, "positional"),
        ((0,), tensors(), "multiple values for q"),
        ((), {name: x for name, x in tensors().items() if name != "beta"}, "beta is missing"),
    ],
    ids=["too-many", "twice", "missing"],
)
def test_arguments_that_do_not_fit_are_left_to_the_function_to_refuse(args, kwargs, reason):
    with pytest.raises(NotBindable, match=reason) as problem:
        NEWEST.bind(args, kwargs)
    assert problem.value.refused
    with pytest.raises(TypeError):
        newest(*args, **kwargs)


def test_a_function_without_kwargs_refuses_unknown_keywords():
    def strict(q, k, v, g, beta):
        HV = v.shape[2]
        return HV

    with pytest.raises(NotBindable, match="unexpected keyword argument foo") as problem:
        Signature.of(strict).bind((), tensors() | dict(foo=1))
    assert problem.value.refused


def test_keywords_that_fla_takes_through_kwargs_are_understood():
    A_log, dt_bias = torch.zeros(2), torch.zeros(8)
    call = NEWEST.bind((), tensors() | dict(A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True, chunk_size=32))
    assert call.A_log is A_log and call.dt_bias is dt_bias and call.chunk_size == 32 and call.unknown == ()


def test_gate_parameters_that_fla_does_not_read_are_dropped():
    call = NEWEST.bind((), tensors() | dict(A_log=torch.zeros(7), dt_bias=torch.zeros(7)))
    assert call.A_log is None and call.dt_bias is None and call.unknown == ()


@pytest.mark.parametrize("signature", [NEWEST, OLDEST], ids=["newest", "oldest"])
@pytest.mark.parametrize("v_first", [True, False])
def test_the_old_name_of_the_state_layout_is_understood(signature, v_first):
    call = signature.bind((), tensors() | dict(transpose_state_layout=v_first))
    assert call.state_v_first is v_first and call.unknown == ()


def test_both_names_of_the_state_layout_are_refused():
    with pytest.raises(NotBindable, match="transpose_state_layout") as problem:
        NEWEST.bind((), tensors() | dict(state_v_first=True, transpose_state_layout=True))
    assert problem.value.refused


def test_a_parameter_of_a_newer_fla_is_unknown_here_unless_it_asks_for_nothing():
    def chunk_kda(q, k, v, g, beta, use_gate_in_kernel=False, window=None, **kwargs): ...

    signature = Signature.of(chunk_kda)
    given = dict(zip("qkv", (torch.zeros(1, 1, 1, 1),) * 3), g=None, beta=None)
    assert signature.bind((), given | {"window": 3}).unknown == ("window",)
    assert signature.bind((), given | {"window": None}).unknown == ()
    assert signature.bind((*given.values(), False, 3), {}).unknown == ("window",)


def test_unknown_keywords_are_named():
    assert NEWEST.bind((), tensors() | dict(head_first=False, foo=None)).unknown == ("foo", "head_first")


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("use_beta_sigmoid_in_kernel", True),
        ("allow_neg_eigval", True),
        ("state_v_first", True),
        ("chunk_size", 32),
        ("use_graph", True),
    ],
)
def test_what_an_older_version_swallows_is_unknown_unless_it_asks_for_nothing(keyword, value):
    default = {field.name: field.default for field in dataclasses.fields(Call)}[keyword]
    assert OLDEST.bind((), tensors() | {keyword: value}).unknown == (keyword,)
    assert OLDEST.bind((), tensors() | {keyword: default}).unknown == ()
    assert NEWEST.bind((), tensors() | {keyword: value}).unknown == ()


def test_grouped_values_need_a_version_that_has_them():
    assert NEWEST.bind((), tensors(HV=4)).v.shape[2] == 4
    with pytest.raises(NotBindable, match="GVA") as problem:
        OLDEST.bind((), tensors(HV=4))
    assert problem.value.refused


def test_a_gate_without_A_log_needs_a_version_that_has_it():
    gate = tensors() | dict(use_gate_in_kernel=True, lower_bound=-5.0)
    assert NEWEST.bind((), gate).A_log is None
    with pytest.raises(NotBindable, match="A_log") as problem:
        OLDEST.bind((), gate)
    assert problem.value.refused, "a missing A_log is an assertion of that version"
    with pytest.raises(NotBindable, match="A_log") as problem:
        OLDEST.bind((), gate | dict(A_log=None))
    assert not problem.value.refused, "an A_log of None is passed on to its kernels"


def test_decorators_are_looked_through():
    assert Signature.of(torch.compiler.disable(newest)) == NEWEST


def test_things_that_are_no_tensors_can_be_bound():
    call = NEWEST.bind((1, 2, 3, 4, 5), {})
    assert call.q == 1 and call.scale == 1.0
