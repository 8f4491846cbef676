"""Which inputs does the operator read where they are, and which go through our transposing copy or PyTorch's?"""

import pytest
import torch

from fla_kda_backend import ops
from tests.kdakit import cases

B, T, H, K = 2, 24, 3, 128


@pytest.fixture
def transposed(monkeypatch):
    """The inputs of the transposing operator, which runs on GPUs alone."""
    seen = []

    def transpose_tokens(tensor, rows):
        seen.append(tensor)
        rows.copy_(tensor)

    ops.library()
    monkeypatch.setattr(torch.ops.fla_kda_backend, "transpose_tokens", transpose_tokens, raising=False)
    return seen


def after_convolution(which=0, dtype=torch.bfloat16):
    """q, k or v as transformers' Kimi-Linear passes them: views of what a convolution over time leaves."""
    return cases.as_split_views(*(torch.randn(B, T, H, K).to(dtype) for _ in range(3)))[which]


def slice_of_a_projection():
    return torch.randn(B, T, 5 * H * K).bfloat16()[..., H * K : 2 * H * K].unflatten(-1, (H, K))


@pytest.mark.parametrize("make", [lambda: torch.randn(B, T, H, K).bfloat16(), slice_of_a_projection])
def test_rows_that_are_contiguous_and_aligned_are_read_where_they_are(make, transposed):
    tensor = make()
    assert ops._rows(tensor) is tensor
    assert not transposed


@pytest.mark.parametrize("which", range(3))
def test_what_convolutions_over_time_leave_goes_through_the_transposing_copy(which, transposed):
    tensor = after_convolution(which)
    assert tensor.stride(1) == 1
    rows = ops._rows(tensor)
    assert len(transposed) == 1 and transposed[0] is tensor
    assert rows.is_contiguous() and torch.equal(rows, tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: after_convolution(dtype=torch.float32),  # our copy knows bf16 alone
        lambda: torch.randn(B, T, K, H).bfloat16().transpose(2, 3),
        lambda: torch.randn(B * T * H * K + 1).bfloat16()[1:].view(B, T, H, K),  # not on a border of 16 bytes
        lambda: torch.randn(B, T, H, K + 1).bfloat16()[..., :K],  # rows begin off such borders
    ],
)
def test_everything_else_is_copied_by_pytorch(make, transposed):
    tensor = make()
    rows = ops._rows(tensor)
    assert not transposed
    assert rows is not tensor and rows.is_contiguous() and torch.equal(rows, tensor)
    assert rows.data_ptr() % 16 == 0


def test_small_inputs_are_copied_only_where_they_must_be():
    tensor = torch.randn(H, 2)
    assert ops._packed(None) is None
    assert ops._packed(tensor) is tensor
    assert torch.equal(ops._packed(tensor[:, 1]), tensor[:, 1])
    odd = torch.randn(H + 1)[1:]
    assert ops._packed(odd) is not odd and torch.equal(ops._packed(odd), odd)
