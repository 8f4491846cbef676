"""Which rows of a packed or batched tensor belong to which sequence?"""

from __future__ import annotations

import torch


def sequence_bounds(cu_seqlens: torch.Tensor | None, B: int, T: int) -> tuple[list[int], list[int]]:
    """First row and length of every sequence, counted in rows of the `[B * T, ...]` view of a call's tensors.

    Args:
        cu_seqlens: None (B sequences of T tokens), or `[N + 1]` integers, not decreasing, from 0 to at most T
            (then B is 1). Equal neighbours are an empty sequence.

    Raises:
        ValueError: `cu_seqlens` is not one-dimensional and non-empty, does not start at 0, decreases, or ends beyond
            the last row; or B is not 1.
    """
    if cu_seqlens is None:
        return [b * T for b in range(B)], [T] * B
    if B != 1:
        raise ValueError(f"`cu_seqlens` needs a batch of 1, got {B}.")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"`cu_seqlens` must have shape [N + 1], got {list(cu_seqlens.shape)}.")
    ends = cu_seqlens.tolist()
    if ends[0] != 0:
        raise ValueError(f"`cu_seqlens` must start at 0, got {ends[0]}.")
    lengths = [end - start for start, end in zip(ends, ends[1:])]
    if min(lengths, default=0) < 0:
        raise ValueError("`cu_seqlens` must not decrease.")
    if ends[-1] > T:
        raise ValueError(f"`cu_seqlens` ends at {ends[-1]}, beyond the {T} rows there are.")
    return ends[:-1], lengths
