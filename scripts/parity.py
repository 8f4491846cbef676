"""Do our kernels agree with the exact recurrence, form by form, and how does FLA's Triton compare?

    python scripts/parity.py [--quick] [--json PATH] [--fla some|all|none] [--minutes 9]

Every caller form x layout x gate regime of tests/kdakit/cases.py is run on the kernels (the path is witnessed) and
judged by the fp64 recurrence. FLA's Triton kernels, with the dispatch off, are judged by the same inputs where they
are asked for: they tune themselves for about 100 seconds at every new head count and kind of gate on a machine whose
TRITON_CACHE_DIR is empty, so that `some` (the default) runs them for few variants of one head count, and none is
started later than the time allows.

--json writes a list of {caller, layout, gate, path, error_o, error_state, passed, fla_path, fla_error_o,
fla_error_state}: relative L2 errors against the recurrence, null where there is no such result. The accuracy table
goes to accuracy.json beside it. Exits with 1 when a tolerance of tests/kdakit/compare.py breaks, with 2 where there
is no GPU or no kernels.
"""

import argparse
import json
import math
import sys
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import fla_kda_backend  # noqa: E402
from tests.kdakit import accuracy, cases, compare  # noqa: E402
from tests.kdakit.run import (  # noqa: E402
    copies_of_inputs,
    environment,
    kernel_paths,
    run_exactly,
    run_on_fla,
    run_on_kernels,
    written_to,
)

DEVICE = "cuda"
TOKENS, HEADS = 256, 2
# FLA is compared at one head count, for which its tuning can be kept in TRITON_CACHE_DIR.
FLA_HEADS, FLA_TOKENS = 32, 1024
FLA_SOME = ("1-kimi-linear", "2-transformers", "4-fla-safe-gate", "3-kimi-k3")
FLA_GATES = ("randn", "strong", "long-memory", "trained")
# What FLA needs to tune one new variant on a cold cache, with a margin.
TUNING_SECONDS = 150


def why_not_here() -> str | None:
    """Why the kernels cannot run on this machine, in one sentence, or None."""
    from tests.conftest import reason_without_kernels

    return reason_without_kernels()


class Fla:
    """FLA's Triton kernels, as far as time allows: `run` returns None where it does not."""

    def __init__(self, deadline: float, enabled: bool = True):
        self.deadline, self.enabled = deadline, enabled
        self.tuned: set[tuple] = set()

    def run(self, arguments: dict, what: str) -> tuple | None:
        if not self.enabled:
            return None
        # What FLA's kernels are specialised for, beside the head dimension.
        variant = (
            arguments["v"].shape[2],
            bool(arguments.get("use_gate_in_kernel")),
            arguments.get("lower_bound") is not None,
            bool(arguments.get("state_v_first") or arguments.get("transpose_state_layout")),
            "cu_seqlens" in arguments,
        )
        began = time.monotonic()
        if variant not in self.tuned:
            if self.deadline - began < TUNING_SECONDS:
                print(f"no time left to tune FLA for {what}", flush=True)
                return None
            print(f"FLA's Triton kernels may tune now, for {what} ...", flush=True)
        result = run_on_fla(arguments)
        torch.cuda.synchronize()
        if variant not in self.tuned:
            print(f"... {time.monotonic() - began:.0f} s", flush=True)
        self.tuned.add(variant)
        return result


def errors_of(result: tuple, exact: tuple, covered: int) -> tuple[float, float | None]:
    (o, state), (exact_o, exact_state) = result, exact
    error_state = None if exact_state is None else compare.relative_l2(state, exact_state)
    return compare.relative_l2(o[:, :covered], exact_o[:, :covered]), error_state


def compare_case(case: cases.Case, heads: int, tokens: int, fla: Fla | None) -> list[dict]:
    """A row for each of our kernels, with FLA beside it where `fla` is given, against the recurrence."""
    call = cases.build(case, tokens=tokens, heads=heads, device=DEVICE, seed=zlib.crc32(str(case).encode()))
    exact = run_exactly(call.judge)
    facts = {"caller": case.caller.name, "layout": case.layout, "gate": case.gate, "heads": heads, "tokens": tokens}
    fla_side = {"fla_path": None, "fla_error_o": None, "fla_error_state": None}
    reference = fla.run(call.arguments, str(case)) if fla is not None else None
    if reference is not None:
        fla_o, fla_state = errors_of(reference, exact, call.covered)
        fla_side = {"fla_path": "triton", "fla_error_o": fla_o, "fla_error_state": fla_state}
    rows = [facts | compare_path(case, call, exact, path) | fla_side for path in kernel_paths()]
    return [{name: finite(value) for name, value in row.items()} for row in rows]


def compare_path(case: cases.Case, call: cases.BuiltCall, exact: tuple, path: str) -> dict:
    """What one of our kernels makes of a call: the path that ran, its errors, and whether they are within bounds, rows
    of no sequence zero, and inputs as they were."""
    copies = copies_of_inputs(call.arguments)
    compare.poison_cuda_memory(DEVICE, megabytes=64)
    try:
        with environment("FLA_KDA_FORCE", path):
            result = run_on_kernels(call.arguments, path)
    except Exception as error:
        print(f"{case} on {path}: {error}", flush=True)
        ran = fla_kda_backend.last_dispatch().path
        return {"path": ran, "error_o": None, "error_state": None, "passed": False}
    tolerance = compare.tolerance_for(case.layout, case.gate)
    error_o, error_state = errors_of(result, exact, call.covered)
    passed = error_o <= tolerance.o and (error_state is None or error_state <= tolerance.state)
    passed = passed and not result[0][:, call.covered :].any().item()
    passed = passed and not written_to(call.arguments, copies)
    return {"path": path, "error_o": error_o, "error_state": error_state, "passed": passed}


def finite(value):
    """JSON has no NaN: a result that is not a number is the word "nan" or "inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf"
    return value


def compare_accuracy(fla: Fla | None) -> list[dict]:
    """The accuracy table: errors over 2048 tokens and 4 heads with a random state, by gate regime.

    FLA runs the same four heads as the first of 32, since its kernels tune for every head count.
    """
    rows = []
    for regime in accuracy.REGIMES:
        wide = accuracy.inputs(regime, heads=FLA_HEADS, device=DEVICE)
        arguments = accuracy.first_heads(wide, accuracy.HEADS)
        exact_o, exact_state = run_exactly(cases.judge_arguments(arguments))
        fla_errors = (None, None)
        reference = fla.run(wide, f"the accuracy table, {regime}") if fla is not None else None
        if reference is not None:
            fla_o, fla_state = reference[0][:, :, : accuracy.HEADS], reference[1][:, : accuracy.HEADS]
            fla_errors = (compare.relative_l2(fla_o, exact_o), compare.relative_l2(fla_state, exact_state))
        goal = compare.ACCURACY_GOALS.get(regime)
        if goal is not None:
            goals = (goal.o, goal.state)
        else:  # no worse than FLA
            goals = fla_errors if reference is not None else (compare.CUDA_FORWARD.o, compare.CUDA_FORWARD.state)
        for path in kernel_paths():
            with environment("FLA_KDA_FORCE", path):
                o, state = run_on_kernels(arguments, path)
            error_o, error_state = compare.relative_l2(o, exact_o), compare.relative_l2(state, exact_state)
            row = {"regime": regime, "path": path, "bf16_rounding": compare.relative_l2(exact_o.bfloat16(), exact_o)}
            row |= {"error_o": error_o, "error_state": error_state}
            row |= {"fla_error_o": fla_errors[0], "fla_error_state": fla_errors[1]}
            row |= {"goal_o": goals[0], "goal_state": goals[1]}
            row["passed"] = error_o <= goals[0] and error_state <= goals[1]
            rows.append({name: finite(value) for name, value in row.items()})
    return rows


def compare_all(deadline: float, quick: bool = False, fla_scope: str = "some") -> tuple[list[dict], list[dict]]:
    """(rows of every case, rows of the accuracy table). `deadline`, of time.monotonic, bounds what FLA may start."""
    chosen = list(cases.quick_cases() if quick else cases.all_cases())
    rows, began = [], time.monotonic()
    for index, case in enumerate(chosen, 1):
        rows += compare_case(case, HEADS, TOKENS, None)
        if index % 100 == 0 or index == len(chosen):
            print(f"{index} of {len(chosen)} cases, {time.monotonic() - began:.0f} s", flush=True)
    for name in cases.LONG_CONTEXT_CALLERS:
        case = cases.Case(cases.caller(name), "dense", "trained")
        long = compare_case(case, heads=4, tokens=4096 if quick else 32768, fla=None)
        rows += [row | {"caller": f"12-long-context ({name})"} for row in long]
    print(f"long context, {time.monotonic() - began:.0f} s", flush=True)

    fla = Fla(deadline, enabled=fla_scope != "none")
    table = compare_accuracy(fla)
    if fla.enabled:
        some = [cases.Case(cases.caller(name), "dense-tail", gate) for name in FLA_SOME for gate in FLA_GATES]
        everything = cases.all_cases(layouts=("dense-tail", "varlen"), gates=FLA_GATES)
        for case in some if fla_scope == "some" else everything:
            rows += compare_case(case, FLA_HEADS, FLA_TOKENS, fla)
        print(f"comparison with FLA, {time.monotonic() - began:.0f} s", flush=True)
    return rows, table


def write(rows: list[dict], table: list[dict], path: Path) -> None:
    """The rows to `path`, the accuracy table to accuracy.json beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    path.with_name("accuracy.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in table) + "\n]\n")


def show(value) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.2e}"


def print_tables(rows: list[dict], table: list[dict]) -> None:
    """The worst row of each caller and layout, every failed row, FLA's side, and the accuracy table."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["caller"], row["layout"], row["heads"], row["path"]), []).append(row)

    def worst(group, name):
        values = [row[name] for row in group if row[name] is not None]
        return max(values, key=lambda value: math.inf if isinstance(value, str) else value, default=None)

    print("\nlargest relative L2 error against the fp64 recurrence over the gate regimes")
    numbers = " ".join(f"{title:>8s}" for title in ("o", "state", "FLA o", "FLA S"))
    print(f"{'caller':36s} {'layout':17s} {'H':>3s} {'path':9s} {numbers} passed")
    for (caller, layout, heads, path), group in groups.items():
        numbers = [show(worst(group, name)) for name in ("error_o", "error_state", "fla_error_o", "fla_error_state")]
        passed = sum(row["passed"] for row in group)
        columns = " ".join(f"{number:>8s}" for number in numbers)
        print(f"{caller:36s} {layout:17s} {heads:3d} {path:9s} {columns} {passed}/{len(group)}")
    for row in rows:
        if not row["passed"]:
            print(f"FAILED {row}")

    print(f"\naccuracy, T={accuracy.TOKENS} H={accuracy.HEADS}, random state: o / state")
    print(f"{'gates':12s} {'path':9s} {'bf16':>8s} {'FLA Triton':>19s} {'ours':>19s} {'goal':>19s} met")
    for row in table:
        pairs = [f"{show(row[f'{side}_o'])} / {show(row[f'{side}_state'])}" for side in ("fla_error", "error", "goal")]
        columns = " ".join(f"{pair:>19s}" for pair in pairs)
        met = "yes" if row["passed"] else "NO"
        print(f"{row['regime']:12s} {row['path']:9s} {show(row['bf16_rounding']):>8s} {columns} {met}")
    failed = sum(not row["passed"] for row in rows + table)
    print(f"\n{len(rows) + len(table) - failed} passed, {failed} failed", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the kernels with the exact recurrence and with FLA's Triton.")
    parser.add_argument("--quick", action="store_true", help="each caller, layout and regime, without their product")
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--fla", choices=("some", "all", "none"), help="(default: some; none with --quick)")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no comparison with FLA that would end later")
    options = parser.parse_args()
    problem = why_not_here()
    if problem is not None:
        print(f"parity: {problem}", file=sys.stderr)
        return 2
    scope = options.fla or ("none" if options.quick else "some")
    rows, table = compare_all(time.monotonic() + options.minutes * 60, options.quick, scope)
    if options.json is not None:
        write(rows, table, options.json)
    print_tables(rows, table)
    return 0 if all(row["passed"] for row in rows + table) else 1


if __name__ == "__main__":
    sys.exit(main())
