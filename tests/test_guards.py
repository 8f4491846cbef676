"""Would the guards around memory notice what they are for? Reads and writes outside, planted on the CPU."""

import pytest
import torch

from fla_kda_backend.interface import chunk_kda
from tests.kdakit import cases, guards
from tests.kdakit.run import same_bits, uninitialised_memory_is_nan


def arguments_of(**changes) -> dict:
    case = cases.Case(cases.caller("3-kimi-k3"), "varlen", "randn")
    arguments = cases.build(case, tokens=40, head_dim=16).arguments | changes
    arguments["state_v_first"] = arguments.pop("transpose_state_layout")
    return arguments


@pytest.mark.parametrize("offset", [0, 1, 5])
def test_guarded_inputs_hold_the_same_values_at_that_offset(offset):
    arguments = arguments_of()
    inputs = guards.guard_all(arguments, offset)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            copy = inputs.tensors[name]
            assert same_bits(copy, value) and copy.is_contiguous()
            assert (copy.data_ptr() - copy.untyped_storage().data_ptr()) == (
                guards.MARGIN_BYTES + offset * value.element_size()
            )
        else:
            assert inputs.tensors[name] is value
    with torch.no_grad():
        o, _ = chunk_kda(**inputs.tensors)
    inputs.check()
    assert same_bits(o, chunk_kda(**arguments)[0])


@pytest.mark.parametrize("name", ["q", "cu_seqlens", "A_log"])
@pytest.mark.parametrize("where", [-1, 0])
def test_writes_to_an_input_and_beside_it_are_noticed(name, where):
    inputs = guards.guard_all(arguments_of(), offset=1)
    tensor = inputs.tensors[name]
    outside = tensor.as_strided((1,), (1,), tensor.storage_offset() + where)
    outside.fill_(3)
    with pytest.raises(AssertionError, match=name):
        inputs.check()


def test_what_lies_beside_an_input_is_nan():
    q = guards.guard_all(arguments_of(), offset=3).tensors["q"]
    for start in (q.storage_offset() - 3, q.storage_offset() + q.numel()):
        assert q.as_strided((3,), (1,), start).isnan().all()


def test_outputs_start_as_nan_and_writes_beside_them_are_noticed():
    with guards.GuardedOutputs() as outputs:
        v = torch.zeros(2, 3, dtype=torch.bfloat16)
        o, state = torch.empty_like(v), v.new_empty((2, 5), dtype=torch.float32)
        torch.zeros(3)
    assert len(outputs.guarded) == 2
    assert o.isnan().all() and state.isnan().all()
    assert (o.dtype, o.shape, state.dtype, state.shape) == (v.dtype, v.shape, torch.float32, (2, 5))
    o.zero_(), state.zero_()
    outputs.check()
    state.as_strided((1,), (1,), state.storage_offset() + state.numel()).zero_()
    with pytest.raises(AssertionError, match=r"output 1 \[2, 5\]"):
        outputs.check()


def test_a_call_that_allocates_nothing_is_no_proof():
    with guards.GuardedOutputs() as outputs:
        torch.zeros(3)
    with pytest.raises(AssertionError, match="no output"):
        outputs.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_uninitialised_memory_is_nan_only_inside(dtype):
    v = torch.zeros(64, dtype=dtype)
    with uninitialised_memory_is_nan():
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.empty_like(v).isnan().all() and v.new_empty((7, 9), dtype=torch.float32).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
