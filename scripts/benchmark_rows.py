"""What does scripts/benchmark.py measure? The rows, their inputs, and the floor under each row's time.

A row is a shape, a kind of gate and a form of the call. Forms, as public models make them (tests/kdakit/cases.py):
"k3", the gate, beta's sigmoid and the norms in the kernel, raw bf16 g, fp32 logits, V-first states in and out; and
"kimi_linear", fp32 g activated outside and promised no bound, fp32 beta after the sigmoid, K-first states.

Gates: "short", g = randn behind the bounded gate (-5); "long", g = randn - 6, which remembers for hundreds of tokens;
"softplus", the softplus gate with A_log and dt_bias as FLA initialises them for training. And, where g is activated
outside, steep ones, of which 16 tokens leave fp32's exponents (STEEP).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from tests.kdakit import cases

HEAD_DIM = cases.HEAD_DIM
GATES = ("short", "long", "softplus")
GATE_SHIFT = {"short": 0.0, "long": -6.0, "softplus": 0.0}
# Log-decays of so many nats a token and up to one more, on every channel.
STEEP_NATS = {"steep-6": 6, "steep-15": 15, "steep-30": 30, "steep-80": 80}
# Of 80 on every seventh channel and short memory on the others; and for each entry one of cases.STRENGTHS.
STEEP = (*STEEP_NATS, "steep-some", "steep-mixed")
FORMS = {
    # The newer name of the state's layout: the old one warns at every call.
    "k3": replace(cases.caller("3-kimi-k3"), layout_keyword="state_v_first"),
    "kimi_linear": cases.caller("1-kimi-linear"),
}


@dataclass(frozen=True)
class Row:
    """One thing to measure. seqlens: lengths of the sequences packed into B = 1, None for dense. goal_ms: if any."""

    B: int
    T: int
    H: int
    seqlens: tuple[int, ...] | None = None
    gate: str = "short"
    call: str = "k3"
    goal_ms: float | None = None

    @property
    def sequences(self) -> int:
        return self.B if self.seqlens is None else len(self.seqlens)

    @property
    def form(self) -> cases.Caller:
        """The form of the call; the softplus gate is in the kernel where the form has its gate there."""
        form = FORMS[self.call]
        if self.gate == "softplus" and form.gate_in_kernel:
            form = replace(form, gate="softplus", safe_gate=False)
        return form

    def __str__(self) -> str:
        return f"{shape_label(self.B, self.T, self.H, self.seqlens)}, {self.call}, {self.gate}"


def shape_label(B: int, T: int, H: int, seqlens: Iterable[int] | None) -> str:
    return f"B {B}, T {T}, H {H}" + ("" if seqlens is None else f", {sequences_label(seqlens)}")


def sequences_label(seqlens: Iterable[int] | None) -> str:
    """Lengths for people: "[1024]x8" for equal ones, all of them otherwise, "" for None."""
    if seqlens is None:
        return ""
    lengths = list(seqlens)
    return f"[{lengths[0]}]x{len(lengths)}" if len(set(lengths)) == 1 else str(lengths).replace(" ", "")


# Shapes whose times have goals, on an H200.
MAIN: tuple[Row, ...] = (
    Row(1, 8192, 96, goal_ms=0.42),
    Row(1, 8192, 96, (1300, 547, 2048, 963, 271, 3063), goal_ms=0.42),
    Row(1, 8192, 96, (1024,) * 8, goal_ms=0.40),
    Row(1, 8192, 64, goal_ms=0.32),
    Row(1, 8192, 32, goal_ms=0.20),
    Row(8, 2048, 32, goal_ms=0.28),
    Row(1, 8192, 8, goal_ms=0.08),
    Row(1, 32768, 8, goal_ms=0.25),
    Row(1, 131072, 8, goal_ms=0.9),
    Row(1, 65536, 4, goal_ms=0.25),
    Row(1, 1048576, 4, goal_ms=4.0),
    Row(1, 8192, 32, (32,) * 256, goal_ms=0.5),
    Row(1, 8192, 8, (4,) * 2048, goal_ms=0.8),
    Row(1, 8192, 32, call="kimi_linear", goal_ms=0.25),
)
SWEEP_TOKENS = tuple(1024 * 2**power for power in range(8))
SWEEP_TOKENS_HEADS = (8, 32)
SWEEP_HEADS = (4, 8, 16, 32, 48, 64, 96)
SWEEP_HEADS_TOKENS = 8192


def main_rows() -> list[Row]:
    return [replace(row, gate=gate) for row in MAIN for gate in GATES]


def sweep_rows() -> list[Row]:
    """Over T and over H, each row once, with its goal where it is one of the main rows."""
    goals = {replace(row, goal_ms=None): row for row in main_rows()}
    over_tokens = [Row(1, tokens, heads) for heads in SWEEP_TOKENS_HEADS for tokens in SWEEP_TOKENS]
    over_heads = [Row(1, SWEEP_HEADS_TOKENS, heads) for heads in SWEEP_HEADS]
    return [goals.get(row, row) for row in dict.fromkeys(over_tokens + over_heads)]


def steep_rows() -> list[Row]:
    """Steep gates of every kind for one shape, some for others, and short memory in the same form of the call."""
    rows = [Row(1, 8192, 32, gate=gate, call="kimi_linear") for gate in ("short", *STEEP)]
    for heads, seqlens in ((8, None), (64, None), (96, None), (96, (1024,) * 8)):
        rows += [Row(1, 8192, heads, seqlens, gate, "kimi_linear") for gate in ("short", "steep-15", "steep-mixed")]
    return rows


def select(which: str) -> list[Row]:
    """The rows of "main", "sweeps" or "all", the main ones first, none twice; or those of "steep"."""
    if which == "steep":
        return steep_rows()
    main = main_rows() if which in ("main", "all") else []
    sweeps = sweep_rows() if which in ("sweeps", "all") else []
    return list(dict.fromkeys(main + sweeps))


def traffic_bytes(row: Row) -> int:
    """Bytes that no kernel can avoid: q, k, v, g read once, o written once, the states read and written once."""
    g_bytes = (row.form.g_dtype or torch.bfloat16).itemsize
    per_token = HEAD_DIM * (4 * torch.bfloat16.itemsize + g_bytes)
    states = 2 * row.sequences * HEAD_DIM * HEAD_DIM * torch.float32.itemsize
    return row.H * (row.B * row.T * per_token + states)


def floor_ms(row: Row, bytes_per_second: float) -> float:
    return traffic_bytes(row) / bytes_per_second * 1e3


def sets_to_rotate(input_bytes: int, cache_bytes: int) -> int:
    """How many sets of inputs to take turns with, so that none is found in a cache that one set would fit."""
    return 1 if input_bytes > cache_bytes else -(-2 * cache_bytes // input_bytes)


def input_bytes(arguments: dict) -> int:
    return sum(x.numel() * x.element_size() for x in arguments.values() if isinstance(x, torch.Tensor))


def steep_gates(kind: str, mild: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Log-decays of one of STEEP, in the place of `mild` ones."""
    more = torch.rand(mild.shape, generator=random, device=mild.device)
    if kind == "steep-some":
        return torch.where(torch.arange(HEAD_DIM, device=mild.device) % 7 == 0, -80 - more, mild)
    if kind == "steep-mixed":
        return -cases.any_strength(mild.shape, random) - more
    return -STEEP_NATS[kind] - more


def inputs(row: Row, *, device, seed: int = 0) -> dict:
    """Keywords for `chunk_kda`, drawn on the device."""
    form, random = row.form, torch.Generator(device).manual_seed(seed)

    def randn(*shape) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device)

    regime = "trained" if row.gate == "softplus" else "randn"
    parameters = cases.gate_parameters(form, regime, row.H, HEAD_DIM, torch.Generator().manual_seed(seed))
    A_log, dt_bias = (parameter.to(device) for parameter in parameters)
    arguments = {name: randn(row.B, row.T, row.H, HEAD_DIM).bfloat16() for name in ("q", "k", "v")}
    noise = randn(row.B, row.T, row.H, HEAD_DIM) + GATE_SHIFT.get(row.gate, 0.0)
    g = cases.gate_values(form, regime, noise, A_log, dt_bias)
    if row.gate in STEEP:
        assert form.gate == "activated", "steep gates are given"
        g = steep_gates(row.gate, g, random)
    beta = randn(row.B, row.T, row.H)
    arguments["g"] = g.to(form.g_dtype or torch.bfloat16)
    arguments["beta"] = (beta.sigmoid() if form.beta == "sigmoid" else beta).to(form.beta_dtype or torch.bfloat16)
    arguments["initial_state"] = randn(row.sequences, row.H, HEAD_DIM, HEAD_DIM)
    arguments |= dict(use_qk_l2norm_in_kernel=True, output_final_state=True)
    if form.gate_in_kernel:
        arguments |= dict(use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)
    if form.gate == "bounded":
        arguments |= dict(safe_gate=form.safe_gate, lower_bound=cases.LOWER_BOUND)
    if form.beta == "logits":
        arguments["use_beta_sigmoid_in_kernel"] = True
    if form.v_first:
        arguments[form.layout_keyword] = True
    if row.seqlens is not None:
        borders = torch.tensor([0, *row.seqlens]).cumsum(0)
        arguments["cu_seqlens"] = borders.to(device=device, dtype=form.cu_seqlens_dtype)
    return arguments
