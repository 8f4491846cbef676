"""Which rounding to bf16 costs how much? The forward kernels' arithmetic on the CPU, one rounding left out at a time.

    python scripts/error_budget.py [--csv PATH]

Emulates the chunked form as docs/forward-*.md describe it, in fp32, with the operands that each kernel rounds rounded
to bf16 (or to two bf16 terms), over the inputs of the accuracy table, and compares it with the fp64 recurrence.
Exponentials, gates and sums are those of fp32, so that nothing but operand rounding is told apart. Takes about 15 s.
"""

import argparse
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from fla_kda_backend.reference.gates import L2NORM_EPS, log_decay, step_size  # noqa: E402
from tests.kdakit import accuracy, cases, compare  # noqa: E402
from tests.kdakit.run import run_exactly  # noqa: E402

CHUNK = 16
# Operands in the symbols of docs/forward-*.md. decay is 2^G of Kd and Qd, Ki is k 2^-G, rhs is beta (V - Kd S).
ROUNDED = {
    "portable": ("Kd", "Qd", "Ki", "Kr", "S", "inverse", "P", "rhs", "U"),
    "hopper": ("decay", "Kd", "Qd", "Ki", "S", "inverse", "P", "rhs", "U"),
}
TWO_TERMS = ("P", "rhs", "U")


def round_to_bf16(x: torch.Tensor, terms: int) -> torch.Tensor:
    high = x.bfloat16().float()
    return high if terms == 1 else high + (x - high).bfloat16().float()


def emulate(
    kernel: str,
    call: dict,
    exact: tuple[str, ...] = (),
    two_terms: tuple[str, ...] = TWO_TERMS,
    diagonal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, final_state) [H, T, V] and [H, K, V] in fp32, before o is rounded.

    Args:
        kernel: a key of `ROUNDED`. The portable one normalises q and k before it rounds their decayed forms, the
            Hopper one afterwards, in fp32.
        call: q, k, v, log-decays g [H, T, 128]; beta [H, T, 1]; state [H, K, V]; fp32.
        exact: operands that are not rounded.
        two_terms: operands that keep a second bf16 term.
        diagonal: whether P's diagonal is q k of raw rows, as in both kernels, or left to the product.
    """

    def rounded(name: str, x: torch.Tensor) -> torch.Tensor:
        return x if name in exact else round_to_bf16(x, 2 if name in two_terms else 1)

    S, identity, o = call["state"], torch.eye(CHUNK), []
    chunks = [call[name].split(CHUNK, dim=1) for name in ("q", "k", "v", "g", "beta")]
    for q, k, v, g, beta in zip(*chunks, strict=True):
        k_norm = torch.rsqrt(k.square().sum(-1, keepdim=True) + L2NORM_EPS)
        q_norm = k.shape[-1] ** -0.5 * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2NORM_EPS)
        same_token = torch.diag_embed((q * k).sum(-1))
        if kernel == "portable":
            same_token, q, k = same_token * q_norm * k_norm, q * q_norm, k * k_norm
            q_norm = k_norm = torch.ones_like(k_norm)
        G = g.cumsum(1)
        last = G[:, -1:]
        decay = rounded("decay", G.exp()) if kernel == "hopper" else G.exp()
        Kd, Qd, Ki = rounded("Kd", k * decay), rounded("Qd", q * decay), rounded("Ki", k * (-G).exp())
        L = (beta * k_norm * k_norm.mT * (Kd @ Ki.mT)).tril(-1)
        P = rounded("P", (Qd @ Ki.mT).tril(-1) + same_token if diagonal else (Qd @ Ki.mT).tril())
        inverse = torch.linalg.solve_triangular(identity + L, identity.expand_as(L), upper=False, unitriangular=True)
        state_operand = rounded("S", S)
        rhs = rounded("rhs", beta * (v - k_norm * (Kd @ state_operand)))
        U = rounded("U", k_norm * (rounded("inverse", inverse) @ rhs))
        o.append(q_norm * (Qd @ state_operand + P @ U))
        gamma = last.exp().mT
        if kernel == "portable":
            S = gamma * S + rounded("Kr", k * (last - G).exp()).mT @ U
        else:
            S = gamma * (S + Ki.mT @ U)
    return torch.cat(o, dim=1), S


def activated(arguments: dict) -> dict:
    """What `emulate` takes, from keywords of `chunk_kda` with B = 1, gate and beta in the kernel, a V-first state."""
    parameters = dict(use_gate_in_kernel=True, lower_bound=arguments.get("lower_bound"))
    g = log_decay(arguments["g"].float(), arguments["A_log"], arguments["dt_bias"], **parameters)
    beta = step_size(arguments["beta"].float(), use_beta_sigmoid_in_kernel=True, allow_neg_eigval=False)
    call = {name: arguments[name].float() for name in ("q", "k", "v")} | {"g": g, "beta": beta.unsqueeze(-1)}
    call = {name: x[0].transpose(0, 1) for name, x in call.items()}
    return call | {"state": arguments["initial_state"][0].mT.float()}


def measure(regime: str) -> list[dict]:
    arguments = accuracy.inputs(regime)
    exact_o, exact_state = run_exactly(cases.judge_arguments(arguments))
    exact_o, exact_state = exact_o[0].transpose(0, 1), exact_state[0].mT
    call, rows = activated(arguments), []

    def add(kernel: str, change: str, **how) -> None:
        o, state = emulate(kernel, call, **how)
        errors = {"error_o": compare.relative_l2(o.bfloat16(), exact_o)}
        errors |= {"error_state": compare.relative_l2(state, exact_state)}
        rows.append({"regime": regime, "kernel": kernel, "change": change} | errors)

    for kernel, names in ROUNDED.items():
        add(kernel, "as it is")
        for name in names:
            add(kernel, f"{name} not rounded", exact=(name,))
        add(kernel, "o alone rounded", exact=names)
        for name in TWO_TERMS:
            add(kernel, f"{name} in one term", two_terms=tuple(other for other in TWO_TERMS if other != name))
        add(kernel, "diagonal of P from the product", diagonal=False)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, help="write the rows there as well")
    path = parser.parse_args().csv
    torch.set_num_threads(1)
    rows = []
    for regime in accuracy.REGIMES:
        for row in measure(regime):
            rows.append(row | {name: f"{row[name]:.2e}" for name in ("error_o", "error_state")})
            line = "{regime:12s} {kernel:9s} {change:31s} o {error_o} state {error_state}"
            print(line.format(**rows[-1]), flush=True)
    if path:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
