"""CUDA kernels for Kimi Delta Attention that plug into flash-linear-attention."""

from fla_kda_backend._version import __version__

__all__ = ["__version__"]
