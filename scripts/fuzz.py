"""Do random calls mean the same with the plugin as without, and are those that we serve right?

    python scripts/fuzz.py [--calls 2000] [--seed S] [--json PATH] [--fla VERSION ...] [--place PLACE ...] [--triton 6]

Every call is made through FLA's own `chunk_kda` twice, with the plugin switched off and on; what has to agree is said
in tests/kdakit/differential.py. Without a GPU, for every FLA version that scripts/install_fla_versions.py has put into
.fla-versions, or for the installed one where there is none: --calls on CPU tensors, on CPU tensors that pass for those
of a GPU, and of `fla_kda_backend.chunk_kda`. With a GPU, for the installed FLA: --calls on the kernels, judged by the
recurrence in float64, into memory that held NaN; and --triton calls that are declined, on FLA's real Triton kernels,
with the plugin on and off. These are few: FLA tunes itself for minutes at the first.

The seed is printed. A call that fails is made small and printed as Python. --json writes {source_sha256, seed, torch,
gpu, runs: [{fla, place, calls, outcomes, seconds, failures: [{number, problem, python}]}], groups, counts, seconds,
complete}, of which scripts/gpu_check.py --join takes the groups and counts. Exits with 1 when a call failed, with 2
where the kernels cannot run although they are asked for.
"""

import argparse
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# In one process, so that a run of any length stays below the time that a process is given.
CALLS_PER_PROCESS = 1000
CPU_PLACES = ("cpu", "pretended", "public")
IN_ITS_OWN_PROCESS = """
import torch
torch.set_num_threads(1)
from tests.kdakit import differential
report(**differential.record({place!r}, {calls}, {seed!r}, first={first}))
"""


def run_beside(version: str, place: str, calls: int, seed: str, jobs: int) -> dict:
    """The record of one place beside one FLA version."""
    from tests.kdakit import fla_versions

    def part(first: int) -> dict:
        count = min(CALLS_PER_PROCESS, calls - first)
        code = IN_ITS_OWN_PROCESS.format(place=place, calls=count, seed=seed, first=first)
        return fla_versions.run(version, code)

    began = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        parts = list(pool.map(part, range(0, calls, CALLS_PER_PROCESS)))
    outcomes = sum((Counter(part["outcomes"]) for part in parts), Counter())
    failures = [failure for part in parts for failure in part["failures"]]
    seconds = round(time.monotonic() - began, 1)
    return dict(place=place, fla=version, calls=calls, outcomes=outcomes, seconds=seconds, failures=failures)


def show(record: dict) -> None:
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(record["outcomes"].items()))
    print(f"FLA {record['fla']:6s} {record['place']:10s} {record['seconds']:6.1f} s: {outcomes}", flush=True)
    for failure in record["failures"]:
        print(f"\ncall {failure['number']}: {failure['problem']}\n{failure['python']}\n", flush=True)


def record_of(runs: list[dict], facts: dict) -> dict:
    """The record of the whole, with groups and counts as those of scripts/gpu_check.py."""
    groups, counts = {}, Counter({"fuzz calls": 0})
    for run in runs:
        calls, failed = sum(run["outcomes"].values()), len(run["failures"])
        groups[f"fuzz/{run['fla']} {run['place']}"] = dict(passed=calls - failed, failed=failed, skipped=0)
        counts["fuzz calls"] += calls
        counts["fuzz calls served"] += run["outcomes"].get("served", 0)
    seconds = round(sum(run["seconds"] for run in runs), 1)
    return facts | dict(runs=runs, groups=groups, counts=dict(counts), seconds=seconds, complete=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare random calls with the plugin on and off.")
    parser.add_argument("--calls", type=int, default=2000, help="of each place and FLA version")
    parser.add_argument("--seed", help="of all calls (default: a new one)")
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--fla", nargs="+", metavar="VERSION", help="the FLA versions (default: all that are here)")
    parser.add_argument("--place", nargs="+", choices=(*CPU_PLACES, "cuda"), help="where calls run")
    parser.add_argument("--triton", type=int, default=6, help="declined calls on FLA's Triton kernels, on a GPU")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side, without a GPU")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else str(random.randrange(10**6))
    print(f"seed {seed}", flush=True)

    from tests.conftest import reason_without_kernels
    from tests.kdakit.fla_versions import installed_versions

    on_gpu = reason_without_kernels() is None
    places = options.place or (("cuda",) if on_gpu else CPU_PLACES)
    if "cuda" in places and not on_gpu:
        print(f"fuzz: {reason_without_kernels()}", file=sys.stderr)
        return 2
    records = []
    cpu_places = [place for place in places if place != "cuda"]
    versions = [] if not cpu_places else options.fla or installed_versions()
    for version in versions:
        for place in cpu_places:
            records.append(run_beside(version, place, options.calls, seed, options.jobs))
            show(records[-1])
    from tests.kdakit import differential

    for place in places if not versions else [place for place in places if place == "cuda"]:
        records.append(differential.record(place, options.calls, seed))
        show(records[-1])
    if "cuda" in places and options.triton:
        records.append(differential.record_triton(options.triton, seed))
        show(records[-1])

    import torch

    from scripts.gpu_check import source_hash, write_json

    gpu = torch.cuda.get_device_name() if on_gpu else None
    record = record_of(records, dict(source_sha256=source_hash(), seed=seed, torch=torch.__version__, gpu=gpu))
    if options.json:
        write_json(record, options.json)
    calls, failed = record["counts"]["fuzz calls"], sum(group["failed"] for group in record["groups"].values())
    print(f"{calls} calls, {failed} failed, seed {seed}")
    return 1 if failed or not calls else 0


if __name__ == "__main__":
    sys.exit(main())
