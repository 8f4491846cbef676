"""Tests that launch the CUDA kernels; tests/conftest.py skips them, with the reason, where that is not possible."""

DEVICE = "cuda"
