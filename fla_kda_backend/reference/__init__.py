"""The paths that need no GPU kernel: the float64 judge, chunked KDA and decode for CPU tensors, all plain PyTorch."""

from .chunk import chunk_kda
from .decode import declines_decode, fused_recurrent_kda_fwd
from .recurrence import recurrent_kda

__all__ = ["chunk_kda", "declines_decode", "fused_recurrent_kda_fwd", "recurrent_kda"]
