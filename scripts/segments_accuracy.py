"""How exact are segments? Long sequences of few heads, which the Hopper kernel cuts, against the recurrence in float64.

    python scripts/segments_accuracy.py [--json segments_accuracy.json]

8192 tokens in every regime of tests/kdakit/accuracy.py, and 131,072 tokens with long memory; the path is witnessed.
Writes a list of {what, segments, error_o, error_state}: relative L2 errors. Exits with 1 when a tolerance breaks or a
sequence was not cut, with 2 where there is no GPU or no kernels. Takes about 40 seconds on an H200.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.gpu_check import write_json  # noqa: E402
from tests.kdakit import accuracy, cases, compare  # noqa: E402
from tests.kdakit.run import OperatorCalls, run_exactly, run_exactly_in_chunks, run_on_kernels  # noqa: E402

DEVICE = "cuda"
TOKENS, HEADS = 8192, 4
LONG_TOKENS, LONG_HEADS = 131072, 2
# Added to the gates of "long-memory", randn - 8: over so many tokens they would forget next to nothing.
LONG_SHIFT = 2


def measure(what: str, arguments: dict, judge: Callable[[dict], tuple]) -> dict:
    """One call on the kernels, judged by `judge`."""
    with OperatorCalls() as operator:
        o, state = run_on_kernels(arguments)
    exact_o, exact_state = judge(cases.judge_arguments(arguments))
    errors = {"error_o": compare.relative_l2(o, exact_o), "error_state": compare.relative_l2(state, exact_state)}
    return {"what": what, "segments": operator.calls[-1]["segments"]} | errors


def records():
    """Each as it is found."""
    for regime in accuracy.REGIMES:
        arguments = accuracy.inputs(regime, heads=HEADS, tokens=TOKENS, device=DEVICE)
        yield measure(f"{TOKENS} tokens, {HEADS} heads, {regime}", arguments, run_exactly)
    arguments = accuracy.inputs("long-memory", heads=LONG_HEADS, tokens=LONG_TOKENS, device=DEVICE)
    arguments["g"] = arguments["g"] + LONG_SHIFT
    yield measure(f"{LONG_TOKENS} tokens, {LONG_HEADS} heads, randn - 6", arguments, run_exactly_in_chunks)


def is_right(record: dict) -> bool:
    bound = compare.CUDA_FORWARD
    return record["segments"] > 1 and record["error_o"] <= bound.o and record["error_state"] <= bound.state


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, default=Path("segments_accuracy.json"))
    options = parser.parse_args()
    from tests.conftest import reason_without_kernels

    problem = reason_without_kernels()
    if problem is not None:
        print(f"segments_accuracy: {problem}", file=sys.stderr)
        return 2
    found = []
    for record in records():
        found.append(record)
        print(record, flush=True)
        write_json(found, options.json)
    return 0 if all(map(is_right, found)) else 1


if __name__ == "__main__":
    sys.exit(main())
