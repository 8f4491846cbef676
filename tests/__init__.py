"""The test suite: what runs anywhere here, what needs a GPU in tests/gpu, what both share in tests/kdakit."""
