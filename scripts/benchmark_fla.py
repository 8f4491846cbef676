"""How long will FLA's Triton kernels tune before a row of scripts/benchmark.py can be timed?

FLA 0.6.0 tunes every kernel of `chunk_kda` anew for the values below, and Triton keeps the outcome in its cache
folder, as <kernel>.autotune.json with those values first in its "key". What is there need not be tuned. The answer
only decides what is started within the time that is left: for another FLA, whose kernels differ, rows look untuned
or take longer than foretold.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from scripts.benchmark_rows import HEAD_DIM, Row

CHUNK, SUB_CHUNK = 64, 16
# Rows of q that one block of FLA's norm counts for its key.
NORM_BLOCK = 2048 * 32
# Seconds to compile and try all configurations of a kernel on a cold cache; together the 76 to 106 s that a first call
# takes on an H200. The norm is a small kernel.
TUNING_SECONDS = {
    "l2norm_fwd_kernel": 12,
    "kda_gate_chunk_cumsum_vector_kernel": 6,
    "chunk_local_cumsum_vector_kernel": 6,
    "chunk_kda_fwd_kernel_intra_sub_chunk": 14,
    "chunk_kda_fwd_kernel_intra_token_parallel": 18,
    "chunk_kda_fwd_kernel_inter_solve_fused": 8,
    "recompute_w_u_fwd_kda_kernel": 10,
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": 14,
    "chunk_gla_fwd_kernel_o": 38,
}
# The first call of a variant whose tuning is known already: it compiles.
COMPILE_SECONDS = 10
# A row whose kernels are there.
TIMING_SECONDS = 3

Kernel = tuple[str, tuple]


def cache_folder() -> Path:
    """Where Triton keeps what it tuned."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def kernels_of(row: Row) -> tuple[Kernel, ...]:
    """(kernel, first values of its tuning key) of each kernel that FLA tunes for a row, in the order of launch."""
    H, varlen, form = row.H, row.seqlens is not None, row.form
    if form.gate_in_kernel:
        gate = ("kda_gate_chunk_cumsum_vector_kernel", (H, HEAD_DIM, CHUNK, varlen, False))
    else:
        gate = ("chunk_local_cumsum_vector_kernel", (row.B, H, HEAD_DIM, CHUNK, varlen, False))
    if form.safe_gate:
        inside = ("chunk_kda_fwd_kernel_intra_sub_chunk", (CHUNK, SUB_CHUNK, H))
    else:
        inside = ("chunk_kda_fwd_kernel_intra_token_parallel", (HEAD_DIM, H, H))
    sizes = (H, H, HEAD_DIM, HEAD_DIM, CHUNK)
    return (
        ("l2norm_fwd_kernel", (HEAD_DIM, math.ceil(row.B * row.T * H / NORM_BLOCK))),
        gate,
        inside,
        ("chunk_kda_fwd_kernel_inter_solve_fused", (H, H, HEAD_DIM, CHUNK, SUB_CHUNK, CHUNK // SUB_CHUNK)),
        ("recompute_w_u_fwd_kda_kernel", (*sizes, CHUNK, CHUNK, varlen)),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", (*sizes, form.v_first)),
        ("chunk_gla_fwd_kernel_o", (CHUNK, H, form.v_first, HEAD_DIM, HEAD_DIM)),
    )


def tuned_on_disk(folder: Path) -> dict[str, list[tuple]]:
    """The keys that each kernel has been tuned for, by name."""
    keys: dict[str, list[tuple]] = {}
    for path in folder.glob("*/*.autotune.json"):
        try:
            key = tuple(json.loads(path.read_text())["key"])
        except (OSError, ValueError, KeyError, TypeError):  # another process is writing it, or it is not Triton's
            continue
        keys.setdefault(path.name.removesuffix(".autotune.json"), []).append(key)
    return keys


class Tuning:
    """What has been tuned, on disk when this began and in this process since."""

    def __init__(self, folder: Path | None = None):
        self.on_disk = tuned_on_disk(cache_folder() if folder is None else folder)
        self.tuned: set[Kernel] = set()
        self.compiled: set[tuple] = set()

    def missing(self, row: Row) -> list[Kernel]:
        """The kernels that FLA would tune for this row now."""
        return [
            kernel
            for kernel in kernels_of(row)
            if kernel not in self.tuned
            and not any(key[: len(kernel[1])] == kernel[1] for key in self.on_disk.get(kernel[0], ()))
        ]

    def seconds(self, row: Row) -> float:
        """About how long it takes to time FLA on this row."""
        compiling = 0 if self._variant(row) in self.compiled else COMPILE_SECONDS
        return TIMING_SECONDS + compiling + sum(TUNING_SECONDS[name] for name, _ in self.missing(row))

    def ran(self, row: Row) -> None:
        """FLA has run this row in this process."""
        self.tuned.update(kernels_of(row))
        self.compiled.add(self._variant(row))

    @staticmethod
    def _variant(row: Row) -> tuple:
        return row.H, row.form.gate, row.form.v_first, row.seqlens is not None
