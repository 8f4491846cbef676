"""Does the record of a GPU run say what happened, and to which sources? What can be tested without a GPU."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "gpu_check.py"
sys.path.insert(0, str(ROOT / "scripts"))
import gpu_check  # noqa: E402


def test_source_hash_needs_nothing_but_python_and_is_stable():
    # -S: no site-packages, hence no torch.
    command = [sys.executable, "-I", "-S", SCRIPT, "--source-hash"]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout == gpu_check.source_hash() + "\n"
    assert len(gpu_check.source_hash()) == 64


@pytest.fixture
def sources(tmp_path, monkeypatch):
    for name in ("csrc/api/library.cpp", "fla_kda_backend/ops.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(name)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    return tmp_path


def test_source_hash_follows_names_and_contents(sources):
    seen = {gpu_check.source_hash()}
    (sources / "csrc/api/library.cpp").write_text("changed")
    seen.add(gpu_check.source_hash())
    (sources / "csrc/api/library.cpp").rename(sources / "csrc/api/renamed.cpp")
    seen.add(gpu_check.source_hash())
    (sources / "fla_kda_backend/more.py").touch()
    seen.add(gpu_check.source_hash())
    assert len(seen) == 4


def test_source_hash_ignores_what_is_built(sources):
    before = gpu_check.source_hash()
    for name in ("fla_kda_backend/_C/libfla_kda.so", "fla_kda_backend/_C/no_kernels.txt", "csrc/__pycache__/x.pyc"):
        (sources / name).parent.mkdir(exist_ok=True)
        (sources / name).touch()
    assert gpu_check.source_hash() == before


GROUPS = {
    "test_one.py": """
        import pytest
        @pytest.mark.fault("leftovers")
        def test_passes(record_property): record_property("count:repeats", 250)
        @pytest.mark.fault("not guarded")
        def test_fails(record_property):
            record_property("count:repeats", 1000)
            assert False
        @pytest.mark.two_gpus
        @pytest.mark.fault("leftovers", "another device")
        def test_passes_on_two(record_property): record_property("count:repeats", 50)
        @pytest.mark.skip(reason="not today")
        def test_skipped(): pass
        @pytest.fixture
        def broken(): raise RuntimeError
        def test_error(broken): pass
    """,
    "test_two.py": """
        def test_passes(): pass
    """,
}


def test_record_counts_outcomes_by_file_and_survives_being_cut_short(tmp_path):
    for name, text in GROUPS.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    program = (
        "import sys, pytest; sys.path.insert(0, sys.argv[1]); import gpu_check; from pathlib import Path\n"
        "record = gpu_check.Record(Path('record.json'), {'source_sha256': 'x', 'gpu': 'y', 'versions': {}})\n"
        "pytest.main(['-q', '-p', 'no:cacheprovider', '.'], plugins=[gpu_check.GroupCounter(record, 'hopper')])\n"
        "assert record.failed()"
    )
    done = subprocess.run([sys.executable, "-c", program, SCRIPT.parent], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    record = json.loads((tmp_path / "record.json").read_text())  # written when the second file began
    assert record["complete"] is False
    assert record["groups"]["hopper/test_one"] == {"passed": 2, "failed": 2, "skipped": 1}
    # Only what passed counts.
    assert record["counts"] == {"repeats": 300, "two-GPU tests": 1, "fault kinds": 2}
    assert record["faults"] == ["another device", "leftovers"]
    assert set(record) == {
        "source_sha256", "gpu", "versions", "groups", "counts", "faults", "seconds", "complete",
    }  # fmt: skip


@pytest.mark.parametrize(
    "outcomes, failed",
    [(["passed", "skipped"], False), (["skipped"], True), ([], True), (["passed", "failed"], True)],
    ids=str,
)
def test_a_check_in_which_nothing_passed_has_failed(outcomes, failed, tmp_path):
    record = gpu_check.Record(tmp_path / "record.json", {})
    for outcome in outcomes:
        record.add("group", outcome)
    assert record.failed() is failed


def record_of(group: str, **changes) -> dict:
    groups = {group: {"passed": 3, "failed": 0, "skipped": 1}}
    record = {"source_sha256": "x", "gpu": "a GPU", "versions": {"torch": "1"}, "groups": groups, "seconds": 2.5}
    return record | {"counts": {"repeats": 10, "fault kinds": 1}, "faults": ["one"], "complete": True} | changes


def test_joined_records_are_one():
    mine = record_of("hopper/test_stability")
    theirs = {
        "source_sha256": "x",
        "groups": {"sanitizer/memcheck": {"passed": 5, "failed": 0, "skipped": 0}},
        "counts": {"sanitizer tools": 4, "repeats": 7},
        "complete": True,
    }
    two = record_of("two_gpus/hopper/test_concurrency", gpus=2, faults=["one", "two"])

    joined = gpu_check.join({"results/mine.json": mine, "sanitizer.json": theirs, "two.json": two}, "x")

    assert list(joined["groups"]) == ["hopper/test_stability", "sanitizer/memcheck", "two_gpus/hopper/test_concurrency"]
    assert joined["counts"] == {"repeats": 27, "sanitizer tools": 4, "fault kinds": 2}
    assert joined["faults"] == ["one", "two"] and joined["seconds"] == 5.0 and joined["complete"]
    assert joined["versions"] == {"torch": "1"}
    assert [(part["file"], part["gpus"]) for part in joined["parts"]] == [
        ("mine.json", 1), ("sanitizer.json", 1), ("two.json", 2),
    ]  # fmt: skip


def test_one_part_that_was_cut_short_makes_the_whole_incomplete():
    cut = record_of("b", complete=False)
    assert not gpu_check.join({"a": record_of("a"), "b": cut}, "x")["complete"]


@pytest.mark.parametrize(
    "other, words",
    [
        (record_of("b", source_sha256="y"), "b.json was made from other sources"),
        (record_of("a"), "b.json has groups that another record has: a"),
        ({"rows": []}, "b.json is not a record"),
        ([], "b.json is not a record"),
    ],
    ids=["other sources", "twice", "no record", "a list"],
)
def test_what_does_not_belong_together_is_not_joined(other, words):
    with pytest.raises(gpu_check.CannotJoin, match=words):
        gpu_check.join({"a.json": record_of("a"), "b.json": other}, "x")


def test_joining_needs_neither_torch_nor_a_gpu(tmp_path):
    sources = gpu_check.source_hash()
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(record_of(name, source_sha256=sources)))
    command = [sys.executable, "-I", "-S", SCRIPT, "--join", "a.json", "b.json", "--json", "both.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "both.json").read_text())["counts"]["repeats"] == 20

    (tmp_path / "b.json").write_text(json.dumps(record_of("b", source_sha256="older")))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "b.json was made from other sources" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("script", ["gpu_check.py", "parity.py"])
def test_without_a_gpu_the_scripts_say_so_in_one_sentence(script, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / script], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("no CUDA GPU is visible to torch")
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_what_the_table_covers_is_a_test_that_is_there():
    path, _, name = gpu_check.IN_THE_TABLE.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()
