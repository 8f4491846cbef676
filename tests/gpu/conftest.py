"""What holds for every GPU test: free memory is full of NaN when it begins, so that nothing can pass on leftovers."""

import pytest
import torch

from tests.gpu import DEVICE
from tests.kdakit import compare


@pytest.fixture(autouse=True)
def free_memory_is_poisoned():
    if torch.cuda.is_available():
        compare.poison_cuda_memory(DEVICE, megabytes=64)
