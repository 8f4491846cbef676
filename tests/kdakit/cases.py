"""Which calls do real models make? Every caller form x layout x gate regime, enumerated once.

    for case in cases.all_cases():
        call = cases.build(case, tokens=192, heads=2, device="cuda", seed=0)
        o, state = chunk_kda(**call.arguments)
        o_exact, state_exact = recurrent_kda(**call.judge)

`arguments` holds exactly the keywords that the caller passes to `chunk_kda`, in its dtypes, memory layouts and
spellings; `judge` says the same to the fp64 recurrence of `fla_kda_backend.reference`. Inputs depend on the seed
alone, not on the device.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

HEAD_DIM = 128
LOWER_BOUND = -5.0


@dataclass(frozen=True)
class Caller:
    """One form of the call, as one public model or trainer makes it.

    gate: "activated" (g is the log-decay, unbounded), "activated_bounded" (the log-decay, within [-5, 0)),
        "softplus" or "bounded" (g is raw and the gate is computed in the kernel).
    g_dtype, beta_dtype, parameter_dtype: of g, of beta, and of A_log and dt_bias; None is the model's dtype.
    beta: "sigmoid" (after the sigmoid) or "logits" (the sigmoid is in the kernel).
    state_in, state_out: whether `initial_state` is given and `output_final_state` set. v_first: the state's layout.
    layout_keyword: how the caller spells the V-first layout.
    """

    name: str
    gate: str
    beta: str
    g_dtype: torch.dtype | None = None
    beta_dtype: torch.dtype | None = None
    parameter_dtype: torch.dtype = torch.float32
    state_in: bool = True
    state_out: bool = True
    v_first: bool = False
    layout_keyword: str = "state_v_first"
    qk_norm_in_kernel: bool = True
    safe_gate: bool = False
    allow_neg_eigval: bool = False
    split_views: bool = False
    value_heads_per_head: int = 1
    packed_only: bool = False
    cu_seqlens_dtype: torch.dtype = torch.int32
    parameters_2d: bool = False

    @property
    def gate_in_kernel(self) -> bool:
        return self.gate in ("softplus", "bounded")


# Inputs that are [B, T, ...].
TOKENWISE = ("q", "k", "v", "g", "beta")

_K3 = dict(gate="bounded", safe_gate=True)
_FP32 = dict(g_dtype=torch.float32, beta_dtype=torch.float32)
_OLD_KEYWORD = dict(v_first=True, layout_keyword="transpose_state_layout")
_NO_STATE = dict(state_in=False, state_out=False)

CALLERS: tuple[Caller, ...] = (
    # 1: Kimi-Linear-48B, remote code: a prefill that continues a cached state, and the first one.
    Caller("1-kimi-linear", gate="activated", beta="sigmoid", **_FP32),
    Caller("1-kimi-linear-first", gate="activated", beta="sigmoid", state_in=False, **_FP32),
    # 2: transformers' KimiLinearForCausalLM: q, k, v are views with token stride 1; with a cache, and without.
    Caller("2-transformers", gate="activated", beta="sigmoid", g_dtype=torch.float32, split_views=True),
    Caller("2-transformers-fp32-beta", gate="activated", beta="sigmoid", split_views=True, state_in=False, **_FP32),
    Caller(
        "2-transformers-no-cache",
        gate="activated",
        beta="sigmoid",
        g_dtype=torch.float32,
        split_views=True,
        **_NO_STATE,
    ),
    # 3: Kimi-K3, remote code: flat A_log and dt_bias in either dtype, fp32 logits for beta.
    Caller("3-kimi-k3", beta="logits", beta_dtype=torch.float32, **_K3, **_OLD_KEYWORD),
    Caller(
        "3-kimi-k3-bf16-parameters",
        beta="logits",
        beta_dtype=torch.float32,
        parameter_dtype=torch.bfloat16,
        **_K3,
        **_OLD_KEYWORD,
    ),
    # 4: FLA's KimiDeltaAttention with safe_gate=True.
    Caller("4-fla-safe-gate", beta="logits", v_first=True, cu_seqlens_dtype=torch.int64, **_K3),
    # 5: FLA's KimiDeltaAttention as configured by default; with negative eigenvalues; with more value heads (GVA).
    Caller("5-fla-default", gate="softplus", beta="logits", v_first=True, cu_seqlens_dtype=torch.int64),
    Caller("5-fla-neg-eigval", gate="softplus", beta="logits", v_first=True, allow_neg_eigval=True),
    Caller("5-fla-gva", gate="softplus", beta="logits", v_first=True, value_heads_per_head=2),
    # 6: FLA 0.5.0's layer: the sigmoid of beta outside, K-first state; dt_bias as [H, K].
    Caller("6-fla-0.5.0", gate="softplus", beta="sigmoid", cu_seqlens_dtype=torch.int64),
    Caller("6-fla-0.5.0-2d-parameters", gate="softplus", beta="sigmoid", parameters_2d=True),
    # 7 and 8: NeMo AutoModel, Kimi-Linear and K3 (the bounded gate computed outside, yet safe_gate=True).
    Caller("7-nemo-kimi-linear", gate="activated", beta="sigmoid", **_FP32, **_NO_STATE),
    Caller("8-nemo-k3", gate="activated_bounded", beta="sigmoid", safe_gate=True, **_FP32, **_OLD_KEYWORD),
    # 9: Megatron-Bridge, K3.
    Caller("9-megatron-bridge-k3", beta="sigmoid", beta_dtype=torch.float32, **_K3, **_OLD_KEYWORD, **_NO_STATE),
    # 10: Megatron-LM: q and k arrive normalised, sequences packed.
    Caller(
        "10-megatron-lm",
        gate="softplus",
        beta="sigmoid",
        beta_dtype=torch.float32,
        qk_norm_in_kernel=False,
        packed_only=True,
        **_NO_STATE,
    ),
    # 11: torchtitan, K3.
    Caller("11-torchtitan-k3", beta="logits", **_K3, **_NO_STATE),
)

# 12, long-context serving, is any of these forms with few heads and many tokens: LONG_CONTEXT_CALLERS at "dense".
LONG_CONTEXT_CALLERS: tuple[str, ...] = ("1-kimi-linear", "3-kimi-k3", "5-fla-default")

# How the tokens are laid out: batch size, and what makes up the sequences (see `sequence_lengths`).
LAYOUTS: tuple[str, ...] = (
    "dense",  # one sequence of a multiple of 16 tokens
    "dense-tail",  # one sequence whose last chunk is shorter
    "dense-batch",  # three sequences side by side, with a tail
    "dense-short",  # two tokens
    "varlen",  # sequences of uneven lengths
    "varlen-empty",  # empty ones first, in the middle and last
    "varlen-many",  # many of one to five tokens
    "varlen-uncovered",  # rows after the last sequence, holding NaN
)

# Gates of every strength: log-decays of so many nats or a little more. Those from 15 on leave fp32's exponents within
# 16 tokens, and a token that follows feels those below 44.
STRENGTHS = (0.1, 5.0, 15.0, 22.0, 30.0, 44.0, 60.0, 110.0)

# What the gates look like; for callers whose gate is bounded, "steep" is the bound itself.
GATES: tuple[str, ...] = (
    "randn",  # spread over the bounded range, or softplus of randn
    "strong",  # close to the lower bound; about -6 a token where there is none
    "long-memory",  # nearly no decay
    "trained",  # softplus gate with A_log and dt_bias as initialised for training
    "steep-all",  # -80 a token on every channel
    "steep-some",  # -80 a token on some channels
    "mixed",  # steep, strong and gentle tokens in turn
)

STEEP = -80.0


@dataclass(frozen=True)
class Case:
    caller: Caller
    layout: str
    gate: str

    def __str__(self) -> str:
        return f"{self.caller.name}/{self.layout}/{self.gate}"


@dataclass
class BuiltCall:
    """Keywords for `chunk_kda`, the same for the fp64 recurrence, and how many rows of the T axis belong to a
    sequence."""

    arguments: dict
    judge: dict
    covered: int
    lengths: list[int] | None = field(default=None)


def caller(name: str) -> Caller:
    return next(form for form in CALLERS if form.name == name)


def all_cases(layouts=LAYOUTS, gates=GATES, callers=CALLERS) -> Iterator[Case]:
    """Every combination that a caller makes: packed-only callers have no dense layouts."""
    for form in callers:
        for layout in layouts:
            if form.packed_only and not layout.startswith("varlen"):
                continue
            for gate in gates:
                yield Case(form, layout, gate)


def quick_cases() -> Iterator[Case]:
    """Every caller, every layout and every gate regime at least once per kind of gate, without their full product."""
    for form in CALLERS:
        layouts = [layout for layout in LAYOUTS if layout.startswith("varlen") or not form.packed_only]
        for index in range(max(len(layouts), len(GATES))):
            yield Case(form, layouts[index % len(layouts)], GATES[index % len(GATES)])


def sequence_lengths(layout: str, tokens: int) -> list[int] | None:
    """Lengths of the packed sequences of a varlen layout, about `tokens` rows in all; None for dense layouts."""
    if layout == "varlen":
        head = [max(1, tokens // 2 - 5), 1, 17, 64 if tokens > 160 else 16]
        return [*head, max(1, tokens - sum(head))]
    if layout == "varlen-empty":
        return [0, tokens // 3, 0, 0, 16, max(1, tokens - tokens // 3 - 16), 0]
    if layout == "varlen-many":
        return [1 + (index * 3) % 5 for index in range(max(1, tokens // 3))]
    if layout == "varlen-uncovered":
        return [tokens // 2 + 3, max(1, tokens // 2 - 20)]
    return None


def build(
    case: Case,
    *,
    tokens: int = 192,
    heads: int = 2,
    device="cpu",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = HEAD_DIM,
) -> BuiltCall:
    """The inputs of one case. `tokens` is the length of a dense sequence, or roughly the packed total; `heads` is H."""
    form = case.caller
    random = torch.Generator().manual_seed(seed)
    lengths = sequence_lengths(case.layout, tokens)
    if lengths is None:
        batch = 3 if case.layout == "dense-batch" else 1
        total = {"dense": tokens - tokens % 16, "dense-short": 2}.get(case.layout, tokens - tokens % 16 + 11)
        covered, count = total, batch
    else:
        batch, covered, count = 1, sum(lengths), len(lengths)
        total = covered + (13 if case.layout == "varlen-uncovered" else 0)
    value_heads = heads * form.value_heads_per_head

    def randn(*shape) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    q = randn(batch, total, heads, head_dim)
    k = randn(batch, total, heads, head_dim)
    v = randn(batch, total, value_heads, head_dim)
    if not form.qk_norm_in_kernel:
        q, k = (x / x.square().sum(-1, keepdim=True).add(1e-6).sqrt() for x in (q, k))
    A_log, dt_bias = gate_parameters(form, case.gate, value_heads, head_dim, random)
    g = gate_values(form, case.gate, randn(batch, total, value_heads, head_dim), A_log, dt_bias)
    beta = randn(batch, total, value_heads)
    if form.beta == "sigmoid":
        beta = beta.sigmoid()

    q, k, v = (x.to(dtype) for x in (q, k, v))
    if form.split_views:
        q, k, v = as_split_views(q, k, v)
    arguments = dict(q=q, k=k, v=v, g=g.to(form.g_dtype or dtype), beta=beta.to(form.beta_dtype or dtype))
    if form.gate_in_kernel:
        arguments["use_gate_in_kernel"] = True
        arguments["A_log"] = A_log.to(form.parameter_dtype)
        arguments["dt_bias"] = dt_bias.to(form.parameter_dtype)
        if form.parameters_2d:
            arguments["A_log"] = arguments["A_log"].view(1, 1, value_heads, 1)
            arguments["dt_bias"] = arguments["dt_bias"].view(value_heads, head_dim)
    if form.gate == "bounded":
        arguments["lower_bound"] = LOWER_BOUND
    if form.safe_gate:
        arguments["safe_gate"] = True
    if form.beta == "logits":
        arguments["use_beta_sigmoid_in_kernel"] = True
    if form.allow_neg_eigval:
        arguments["allow_neg_eigval"] = True
    if form.qk_norm_in_kernel:
        arguments["use_qk_l2norm_in_kernel"] = True
    if form.state_in:
        arguments["initial_state"] = randn(count, value_heads, head_dim, head_dim)
    if form.state_out:
        arguments["output_final_state"] = True
    if form.v_first:
        arguments[form.layout_keyword] = True
    if lengths is not None:
        boundaries = torch.tensor([0, *lengths]).cumsum(0)
        arguments["cu_seqlens"] = boundaries.to(form.cu_seqlens_dtype)
        for name in TOKENWISE:
            arguments[name][:, covered:] = math.nan
    arguments = {name: to_device(value, device) for name, value in arguments.items()}
    return BuiltCall(arguments, judge_arguments(arguments), covered, lengths)


def with_tokens(arguments: dict, rows: slice) -> dict:
    """The call with a part of its tokens."""
    return arguments | {name: arguments[name][:, rows] for name in TOKENWISE}


def as_packed(arguments: dict, lengths: tuple[int, ...], seed: int = 0) -> dict:
    """The dense call's first tokens as packed sequences of `lengths`, with random states, asked for the final ones."""
    v = arguments["v"]
    random = torch.Generator(v.device).manual_seed(seed)
    states = torch.randn(len(lengths), v.shape[2], HEAD_DIM, HEAD_DIM, device=v.device, generator=random)
    borders = torch.tensor((0, *lengths), device=v.device).cumsum(0)
    return arguments | {"cu_seqlens": borders, "initial_state": states, "output_final_state": True}


def to_device(value, device):
    # Tensor.to keeps the strides of dense tensors and of nothing else; split views are rebuilt around their storage.
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_contiguous():
        return value.to(device)
    storage = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(device)
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


def judge_arguments(arguments: dict) -> dict:
    """The arguments of `chunk_kda`, as those of the fp64 recurrence (which knows only the newest names)."""
    judged = dict(arguments)
    if "transpose_state_layout" in judged:
        judged["state_v_first"] = judged.pop("transpose_state_layout")
    judged.pop("safe_gate", None)
    return judged


def as_split_views(q, k, v) -> tuple[torch.Tensor, ...]:
    """The same values as transformers lays them out: views of one [B, channels, T] tensor, with token stride 1."""
    batch, tokens = q.shape[:2]
    packed = torch.cat([x.reshape(batch, tokens, -1) for x in (q, k, v)], dim=-1).transpose(1, 2).contiguous()
    parts = torch.split(packed.transpose(1, 2), [x.shape[2] * x.shape[3] for x in (q, k, v)], dim=-1)
    return tuple(part.view(x.shape) for part, x in zip(parts, (q, k, v), strict=True))


def gate_parameters(form: Caller, regime: str, heads: int, head_dim: int, random) -> tuple[torch.Tensor, torch.Tensor]:
    """(A_log [heads], dt_bias [heads * head_dim]), fp32. "trained" is FLA's own initialisation of the softplus gate."""
    uniform = torch.rand(heads, generator=random)
    if regime == "trained":
        A_log = torch.log(1 + 15 * uniform) if form.gate in ("activated", "softplus") else torch.zeros(heads)
        low, high = math.log(1e-3), math.log(1e-1)
        step = torch.exp(low + (high - low) * torch.rand(heads * head_dim, generator=random))
        return A_log, step + torch.log(-torch.expm1(-step))
    if regime.startswith("steep") or regime == "mixed":
        A_log = torch.full((heads,), math.log(16.0)) if form.gate in ("activated", "softplus") else uniform
        return A_log, torch.zeros(heads * head_dim)
    return uniform, torch.rand(heads * head_dim, generator=random)


def gate_values(
    form: Caller, regime: str, noise: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> torch.Tensor:
    """g as the caller passes it, fp32: raw values for a gate in the kernel, else what that gate makes of them."""
    raw = noise
    shift = {"strong": 6.0, "long-memory": -8.0}.get(regime)
    if shift is not None:
        raw = noise + shift
    elif regime.startswith("steep") or regime == "mixed":
        raw = steep_pattern(form, regime, noise)
    if form.gate_in_kernel:
        return raw
    heads, head_dim = noise.shape[-2:]
    biased = raw + dt_bias.view(heads, head_dim)
    rate = A_log.exp()[:, None]
    # "randn" keeps to the bounded range for every caller that passes activated gates, as do those that promise it.
    if form.gate == "activated_bounded" or regime in ("randn", "long-memory"):
        return LOWER_BOUND * torch.sigmoid(rate * biased)
    return -rate * torch.nn.functional.softplus(biased)


def any_strength(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """One of STRENGTHS at random for each entry, on the generator's device."""
    which = torch.randint(len(STRENGTHS), shape, generator=random, device=random.device)
    return torch.tensor(STRENGTHS, device=random.device)[which]


def steep_pattern(form: Caller, regime: str, noise: torch.Tensor) -> torch.Tensor:
    """Raw gates whose activation is steep (-80 with exp(A_log) = 16, or the bound itself) where the regime says so."""
    unbounded = form.gate in ("activated", "softplus")
    steep = torch.full_like(noise, -STEEP / 16 if unbounded else 40.0)
    gentle = noise - (9.0 if unbounded else 4.0)
    tokens, channels = torch.arange(noise.shape[1])[:, None, None], torch.arange(noise.shape[-1])
    if regime == "steep-all":
        return steep
    if regime == "steep-some":
        return torch.where(channels % 5 == 0, steep, gentle)
    # "mixed": bursts of steep tokens, tokens near the range that the reciprocal form just fails on, and gentle ones.
    strong = noise - 1.0
    burst = (tokens % 23 < 3) & ((channels + tokens) % 3 > 0)
    return torch.where(burst, steep, torch.where(tokens % 7 < 3, strong, gentle))
