"""What holds for every GPU test: free memory is full of NaN when it begins, so that nothing can pass on leftovers."""

import pytest
import torch

from tests.kdakit import compare


@pytest.fixture(autouse=True)
def free_memory_is_poisoned(request):
    devices = range(2 if request.node.get_closest_marker("two_gpus") else 1)
    if torch.cuda.device_count() >= len(devices):
        for device in devices:
            compare.poison_cuda_memory(f"cuda:{device}", megabytes=64)
