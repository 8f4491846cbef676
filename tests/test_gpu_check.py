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
        def test_passes(): pass
        def test_fails(): assert False
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
    assert record["groups"]["hopper/test_one"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert set(record) == {"source_sha256", "gpu", "versions", "groups", "seconds", "complete"}


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
