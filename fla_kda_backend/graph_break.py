"""Where does a call run that cannot be part of a graph of `torch.compile`? Here, outside, behind a graph break.

Imported only while something is being compiled: `torch.compiler.disable` loads all of PyTorch's compiler.
"""

import torch

from fla_kda_backend.interface import serve

serve_outside_the_graph = torch.compiler.disable(
    serve, reason="fla_kda_backend.chunk_kda is one operator of a graph only without gradients and with plain arguments"
)
