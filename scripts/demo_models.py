"""Which models does the demo run, and how does another KDA operator take the place of theirs?

Two models with random weights (nothing is downloaded): transformers' own `KimiLinearForCausalLM` and FLA's
`KDAForCausalLM`. Neither is changed for the plugin; what is replaced here is only what they are compared with.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

# transformers' model at the widths of Kimi-Linear-48B-A3B; depth, number of experts and vocabulary are the caller's
# choice.
KIMI_LINEAR_WIDTHS = dict(
    hidden_size=2304,
    intermediate_size=9216,
    moe_intermediate_size=1024,
    num_attention_heads=32,
    num_key_value_heads=32,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    linear_head_dim=128,
    linear_num_heads=32,
)
TINY_KIMI_LINEAR_WIDTHS = dict(
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=32,
    v_head_dim=32,
    linear_head_dim=32,
    linear_num_heads=2,
)
KDA_WIDTHS = dict(hidden_size=2304, head_dim=128, num_heads=32, intermediate_size=9216)
TINY_KDA_WIDTHS = dict(hidden_size=64, head_dim=32, num_heads=2, intermediate_size=96)


def kimi_linear(
    widths: dict,
    *,
    layer_types: list[str],
    vocab_size: int,
    device: str,
    dtype: torch.dtype,
    seed: int,
    num_experts: int = 8,
):
    """transformers' `KimiLinearForCausalLM`, initialised as transformers does from `seed`, in evaluation mode.

    The first layer's MLP is dense, the others are mixtures of experts. All experts are active, so that no choice of
    expert can flip on a rounding and hide how close the logits are. No token ends a generation.
    """
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    config = KimiLinearConfig(
        **widths,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        num_local_experts=num_experts,
        num_experts_per_tok=num_experts,
        vocab_size=vocab_size,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return _build(KimiLinearForCausalLM, config, device, dtype, seed)


def fla_kda(widths: dict, *, num_layers: int, vocab_size: int, device: str, dtype: torch.dtype, seed: int, **options):
    """FLA's `KDAForCausalLM` (layers of `KimiDeltaAttention`), initialised as FLA does from `seed`, in evaluation mode.

    Away from a GPU, where Triton cannot run, FLA's own switch turns its fused norm into PyTorch's, and the modules
    that have no such switch get a forward in plain PyTorch (`use_torch_forwards`).
    """
    from fla.models.kda import KDAConfig, KDAForCausalLM

    on_gpu = device.startswith("cuda")
    config = KDAConfig(
        **widths,
        **options,
        num_hidden_layers=num_layers,
        vocab_size=vocab_size,
        fuse_norm=on_gpu,
        fuse_swiglu=on_gpu,
        fuse_cross_entropy=on_gpu,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = _build(KDAForCausalLM, config, device, dtype, seed)
    return model if on_gpu else use_torch_forwards(model)


def _build(model_class, config, device: str, dtype: torch.dtype, seed: int):
    torch.manual_seed(seed)
    with torch.device(device):
        model = model_class(config)
    for name, parameter in model.named_parameters():
        # As checkpoints are: gates, routers and norms of the gate in fp32, everything else in the model's dtype.
        if not name.endswith(("A_log", "dt_bias", "mlp.gate.weight")):
            parameter.data = parameter.data.to(dtype)
    return model.eval()


# --- FLA's Triton-only modules, in plain PyTorch ---------------------------------------------------


def use_torch_forwards(model):
    """Give `model`'s short convolutions, gated norms and MLPs a forward without Triton; weights and call forms stay."""
    from fla.modules import FusedRMSNormGated, GatedMLP, ShortConvolution

    for module in model.modules():
        if isinstance(module, ShortConvolution):
            module.forward = types.MethodType(_short_convolution, module)
        elif isinstance(module, FusedRMSNormGated):
            module.forward = types.MethodType(_gated_rms_norm, module)
        elif isinstance(module, GatedMLP):
            module.forward = types.MethodType(_gated_mlp, module)
    return model


def _short_convolution(self, x, cache=None, output_final_state=False, cu_seqlens=None):
    """Causal depthwise convolution of x `[B, T, D]`; the cache `[N, D, W]` holds the last W inputs of each sequence."""
    W = self.kernel_size[0]
    lengths = None if cu_seqlens is None else cu_seqlens.diff().tolist()
    sequences = list(x) if lengths is None else list(x[0].split(lengths))  # each [tokens, D]
    outputs, caches = [], []
    for n, sequence in enumerate(sequences):
        past = x.new_zeros(W, x.shape[-1]) if cache is None else cache[n].t().to(x.dtype)
        padded = torch.cat((past, sequence))
        y = F.conv1d(padded.t()[None, :, 1:], self.weight.to(x.dtype), self.bias, groups=self.groups)[0].t()
        outputs.append(y if self.activation is None else F.silu(y))
        caches.append(padded[-W:].t())
    y = torch.stack(outputs) if lengths is None else torch.cat(outputs)[None]
    return y, torch.stack(caches) if output_final_state else None


def _gated_rms_norm(self, x, g):
    """RMS norm over the last dimension in fp32, times the activated gate."""
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
    gate = g.float().sigmoid() if self.activation == "sigmoid" else F.silu(g.float())
    return (normed * gate).to(x.dtype)


def _gated_mlp(self, x, **_):
    return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


# --- Another KDA operator in a model's place -------------------------------------------------------


def _operators(model) -> tuple[types.ModuleType, str, str]:
    """The module through whose names `model` calls KDA, and the names for prefill and for decode."""
    if has_torch_only(model):
        return inspect.getmodule(type(model)), "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"
    import fla.layers.kda

    return fla.layers.kda, "chunk_kda", "fused_recurrent_kda"


def kda_operators(model) -> tuple[Callable, Callable]:
    """What `model` calls for prefill and for decode right now."""
    module, prefill_name, decode_name = _operators(model)
    return getattr(module, prefill_name), getattr(module, decode_name)


@contextmanager
def kda_replaced(model, prefill: Callable, decode: Callable) -> Iterator[None]:
    """Inside, `model` calls `prefill` and `decode` for KDA; everything else is untouched."""
    module, prefill_name, decode_name = _operators(model)
    originals = kda_operators(model)
    setattr(module, prefill_name, prefill)
    setattr(module, decode_name, decode)
    try:
        yield
    finally:
        setattr(module, prefill_name, originals[0])
        setattr(module, decode_name, originals[1])


def has_torch_only(model) -> bool:
    """Whether `model` comes with KDA in plain PyTorch: transformers' does, FLA's does not."""
    return type(model).__module__.startswith("transformers.")


def torch_only(model):
    """transformers' own PyTorch implementation, the one that it falls back to where FLA is not installed."""
    return kda_replaced(model, *(inspect.unwrap(operator) for operator in kda_operators(model)))


def exact(model):
    """The fp64 recurrence in place of KDA, its o rounded once to the model's dtype; the rest of the model unchanged."""
    return kda_replaced(model, _exact_kda, _exact_kda)


def _exact_kda(q, k, v, g, beta, **keywords):
    from fla_kda_backend.reference import recurrent_kda

    understood = inspect.signature(recurrent_kda).parameters
    o, state = recurrent_kda(q, k, v, g, beta, **{name: x for name, x in keywords.items() if name in understood})
    return o.to(q.dtype), None if state is None else state.float()
