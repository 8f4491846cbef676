"""The paths that need no GPU kernel: the float64 judge, chunked KDA and decode for CPU tensors, all plain PyTorch."""

from .recurrence import recurrent_kda

__all__ = ["recurrent_kda"]
