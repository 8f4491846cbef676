"""Where do tests run? Tests in tests/gpu are skipped, with the reason shown, where the kernels cannot be launched."""

from functools import cache
from pathlib import Path

import pytest
import torch

GPU_TESTS = Path(__file__).parent / "gpu"

# Small tensors gain nothing from a second thread, and threads that wait for one another on a busy machine spin.
torch.set_num_threads(1)


@cache
def reason_without_kernels() -> str | None:
    """Why tests/gpu cannot run here, or None where it can."""
    if not torch.cuda.is_available():
        return "no CUDA GPU is visible to torch"
    from fla_kda_backend import dispatch, ops

    library = ops.library()
    if library is None:
        return f"the kernels are not loaded: {ops.load_error()}"
    capability = torch.cuda.get_device_capability()
    if dispatch.arch_for(capability, library.archs) is None:
        return f"the kernels were built for {', '.join(library.archs)}, the GPU is {'.'.join(map(str, capability))}"
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason_without_kernels() is not None:
                item.add_marker(pytest.mark.skip(reason=reason_without_kernels()))
            elif item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
                item.add_marker(pytest.mark.skip(reason="one CUDA GPU is visible, two are needed"))
