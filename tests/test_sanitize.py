"""Is what the checkers say read rightly? Outputs of compute-sanitizer as it writes them, and a stand-in for it."""

import json
import os
import stat
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import sanitize  # noqa: E402

PAIRS = [("hopper", "steep gates"), ("portable", "steep gates")]


def begin(pair=PAIRS[0]) -> str:
    return f"{sanitize.MARK} begin {json.dumps({'kernel': pair[0], 'case': pair[1]})}\n"


def end(pair=PAIRS[0], **facts) -> str:
    facts = {"segments": 1, "error_o": 0.002, "seconds": 1.5} | facts
    return f"{sanitize.MARK} end {json.dumps({'kernel': pair[0], 'case': pair[1]} | facts)}\n"


BANNER = f"========= COMPUTE-SANITIZER\n{sanitize.MARK} ready\n"
INVALID_WRITE = """\
========= Invalid __global__ write of size 4 bytes
=========     at void kda::sm90::chunk_kda_fwd_kernel<float, 1>(ChunkKdaFwdParams)+0x1a0
=========     by thread (31,0,0) in block (0,0,0)
=========     Access at 0x7f1a5e000400 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f1a5e000000 of size 1024 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
"""
UNINITIALISED = """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void kda::sm80::chunk_kda_fwd_kernel<float>(ChunkKdaFwdParams)+0x40
=========
"""
BARRIER = """\
========= Barrier error detected. Divergent thread(s) in block
=========     at void kda::sm80::chunk_kda_fwd_kernel<float>(ChunkKdaFwdParams)+0x40
=========
"""
RACE_ERROR = """\
========= Error: Race reported between Write access at void kernel(int)+0x90
=========     and Read access at void kernel(int)+0x100 [128 hazards]
=========
"""
RACE_WARNING = """\
========= Warning: Race reported between Write access at void kernel(int)+0x90
=========     and Write access at void kernel(int)+0x100 [32 hazards]
=========
"""


def judged(text: str, tool="memcheck", returncode=0) -> tuple[dict, list[dict]]:
    output = sanitize.Output.parse(text)
    rows = sanitize.rows_of(tool, PAIRS, output)
    return sanitize.judge_tool(output, returncode, 2.0, rows), rows


def test_a_clean_run_is_clean():
    text = BANNER + begin() + end() + begin(PAIRS[1]) + end(PAIRS[1]) + "========= ERROR SUMMARY: 0 errors\n"
    tool, rows = judged(text)
    assert tool == {"status": "finished", "errors": 0, "warnings": 0, "seconds": 2.0, "note": None}
    assert [row["status"] for row in rows] == ["clean", "clean"]
    assert rows[0]["error_o"] == 0.002 and rows[0]["segments"] == 1


@pytest.mark.parametrize("report", [INVALID_WRITE, UNINITIALISED, BARRIER], ids=["memcheck", "initcheck", "synccheck"])
def test_a_report_belongs_to_the_case_that_was_running(report):
    text = BANNER + begin() + end() + begin(PAIRS[1]) + report + end(PAIRS[1]) + "========= ERROR SUMMARY: 1 error\n"
    tool, rows = judged(text, returncode=1)
    assert (tool["status"], tool["errors"]) == ("finished", 1)
    assert [(row["status"], row["errors"]) for row in rows] == [("clean", 0), ("errors", 1)]
    assert rows[1]["first"].splitlines()[0] == report.splitlines()[0].removeprefix("========= ")
    assert len(rows[1]["first"].splitlines()) <= sanitize.REPORT_LINES


def test_races_are_errors_or_warnings():
    summary = "========= RACECHECK SUMMARY: 160 hazards displayed (1 error, 1 warning)\n"
    text = BANNER + begin() + RACE_WARNING + end() + begin(PAIRS[1]) + RACE_ERROR + end(PAIRS[1]) + summary
    tool, rows = judged(text, "racecheck")
    assert (tool["status"], tool["errors"], tool["warnings"]) == ("finished", 1, 1)
    assert [(row["status"], row["errors"], row["warnings"]) for row in rows] == [("clean", 0, 1), ("errors", 1, 0)]
    assert "Race reported" in rows[0]["first"]


def test_errors_that_were_not_printed_or_belong_to_no_case_still_count():
    tool, rows = judged(BANNER + begin() + end() + begin(PAIRS[1]) + end(PAIRS[1]) + INVALID_WRITE
                        + "========= ERROR SUMMARY: 7 errors\n")  # fmt: skip
    assert tool["errors"] == 7 and "Invalid __global__ write" in tool["note"]
    record = sanitize.summarise({}, {"memcheck": tool}, rows, complete=True)
    assert record["groups"]["sanitizer/memcheck"] == {"passed": 2, "failed": 1, "skipped": 0}
    assert sanitize.exit_status(record) == 1


def test_a_wrong_result_is_a_failure_though_the_checker_is_content():
    text = BANNER + begin() + end(failed="o: relative L2 error 1.0") + begin(PAIRS[1]) + end(PAIRS[1])
    tool, rows = judged(text + "========= ERROR SUMMARY: 0 errors\n")
    assert rows[0]["status"] == "failed" and rows[0]["first"].startswith("o: relative")
    assert sanitize.exit_status(sanitize.summarise({}, {"memcheck": tool}, rows, True)) == 1


def test_a_tool_out_of_time_keeps_what_it_had():
    tool, rows = judged(BANNER + begin() + end() + begin(PAIRS[1]), returncode=None)
    assert tool["status"] == "out of time"
    assert [row["status"] for row in rows] == ["clean", "not run"]
    record = sanitize.summarise({}, {"memcheck": tool}, rows, True)
    assert record["groups"]["sanitizer/memcheck"] == {"passed": 1, "failed": 0, "skipped": 1}
    assert record["counts"] == {"sanitizer tools": 0, "sanitizer cases": 1} and sanitize.exit_status(record) == 3


def test_a_machine_on_which_the_checker_does_not_run_is_not_a_clean_one():
    text = "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to the manual.\n"
    tool, rows = judged(text, returncode=255)
    assert tool["status"] == "unavailable" and "Device not supported" in tool["note"]
    assert sanitize.exit_status(sanitize.summarise({}, {"memcheck": tool}, rows, True)) == 3


def test_a_process_that_dies_midway_is_a_failure():
    tool, rows = judged(BANNER + begin() + end() + begin(PAIRS[1]) + "Segmentation fault\n", returncode=-11)
    assert tool["status"] == "broken"
    assert sanitize.exit_status(sanitize.summarise({}, {"memcheck": tool}, rows, True)) == 1


def test_every_kernel_has_cases_of_every_kind():
    chosen = sanitize.choose(None, ("hopper", "portable"))
    assert len(chosen) == len(set(chosen)) and {kernel for kernel, _ in chosen} == {"hopper", "portable"}
    assert any(sanitize.CASES[name].segments for _, name in chosen)
    assert sanitize.choose("steep; no states", ("portable",)) == [
        ("portable", "steep gates"),
        ("portable", "packed, no states"),
    ]
    assert not [name for kernel, name in chosen if kernel == "portable" and sanitize.CASES[name].segments]


def test_cases_ask_for_what_their_names_say():
    from tests.kdakit import cases

    for name, case in sanitize.CASES.items():
        form = cases.caller(case.caller)
        assert ("packed" in name) == case.layout.startswith("varlen")
        assert "fp32" not in name or str(form.g_dtype) == "torch.float32"
        assert "bf16" not in name or form.g_dtype is None
        assert ("many heads" in name or case.turns) == (2 * case.heads > 132), "two blocks a head where that fits an H200"
        assert ("segments" in name, "turns" in name) == (case.segments, case.turns)
        assert not form.packed_only or case.layout.startswith("varlen")
        assert form.split_views == (name == "tokens side by side")
        assert ("longest first" in name) == case.ranked
        if case.layout.startswith("varlen"):
            built = cases.build(cases.Case(form, case.layout, case.gate), tokens=case.tokens, heads=case.heads)
            assert case.ranked == (len(built.lengths) * built.judge["v"].shape[2] > 132)


def stand_in(tmp_path: Path, body: str) -> str:
    path = tmp_path / "compute-sanitizer"
    path.write_text(f"#!{sys.executable}\n" + textwrap.dedent(body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_worker_gets_its_cases_and_tensors_of_their_own(tmp_path):
    program = stand_in(tmp_path, """
        import os, sys
        print(sys.argv[1:3], sys.argv[-2:], os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"])
    """)  # fmt: skip
    text, returncode, _ = sanitize.run_tool("racecheck", PAIRS, program, seconds=60)
    assert returncode == 0
    assert text.strip() == f"['--tool', 'racecheck'] ['--worker', '{json.dumps(PAIRS)}'] 1"


def test_a_tool_is_stopped_at_its_limit_with_what_it_watches(tmp_path):
    program = stand_in(tmp_path, """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid, flush=True)
        time.sleep(60)
    """)  # fmt: skip
    text, returncode, seconds = sanitize.run_tool("memcheck", PAIRS, program, seconds=3)
    assert returncode is None and seconds < 30
    deadline = time.monotonic() + 20
    while is_running(int(text)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(text))


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_without_a_gpu_the_script_says_so_in_one_sentence(tmp_path):
    import subprocess

    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "sanitize.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == "sanitize: no CUDA GPU is visible to torch"
    assert not list(tmp_path.iterdir())
