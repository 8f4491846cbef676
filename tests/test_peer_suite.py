"""Does the runner of FLA's own suite see what happened? On a small suite of ours, laid out as theirs, on the CPU."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytest.importorskip("fla.backends", reason="FLA 0.6.0 or newer is not installed")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import peer_suite  # noqa: E402

SUITE = {
    "tests/conftest.py": "",
    "tests/models/__init__.py": "",
    "tests/ops/test_kda.py": """
        import importlib.util
        import os
        import pytest
        import torch
        from fla.ops.kda import chunk_kda

        def tensors():
            x = torch.randn(1, 20, 2, 16)
            return dict(q=x, k=x, v=x, g=-x.abs(), beta=x[..., 0].sigmoid())

        def test_flash_kda_served():
            assert importlib.util.find_spec("flash_kda") is not None
            assert chunk_kda(**tensors())[0].shape == (1, 20, 2, 16)
            chunk_kda(**tensors())

        def test_chunk_invalid_chunk_size():
            with pytest.raises(ValueError, match="chunk_size"):
                chunk_kda(**tensors(), chunk_size=16)

        def test_flash_kda_fails_with_or_without():
            assert False

        def test_flash_kda_fails_only_with_us():
            import fla_kda_backend
            assert fla_kda_backend.status()["registration"] is None

        @pytest.mark.skip(reason="not here")
        def test_flash_kda_skipped(): pass

        def test_another(): assert False, "not in the selection"
    """,
    "tests/models/test_modeling_kda.py": """
        from . import __name__ as package
        def test_flash_kda_in_a_package(): assert package == "models"
    """,
}


def run(source: Path, folder: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "peer_suite.py"), "--fla-source", str(source), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("run")
    for name, text in SUITE.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(textwrap.dedent(text))
    done = run(source, folder, "--json", str(folder / "record.json"))
    assert (folder / "record.json").exists(), done.stdout + done.stderr
    return done, json.loads((folder / "record.json").read_text())


def test_every_chosen_test_has_an_outcome_and_its_calls(outcome):
    _, record = outcome
    tests = {entry["test"].split("::")[1]: entry for entry in record["tests"]}
    assert {name: entry["outcome"] for name, entry in tests.items()} == {
        "test_flash_kda_served": "passed",
        "test_chunk_invalid_chunk_size": "passed",
        "test_flash_kda_fails_with_or_without": "failed without us, too",
        "test_flash_kda_fails_only_with_us": "failed",
        "test_flash_kda_skipped": "skipped",
        "test_flash_kda_in_a_package": "passed",
    }
    assert tests["test_flash_kda_served"]["calls"] == {"reference": 2}
    refused = tests["test_chunk_invalid_chunk_size"]
    assert refused["calls"] == {"triton": 1} and "chunk_size 16" in refused["reasons"][0]


def test_counts_groups_and_exit_status_follow(outcome):
    done, record = outcome
    assert done.returncode == 1, "one test failed through us"
    assert record["complete"] and record["wrong"] == []
    assert record["groups"] == {
        "peer/test_kda": {"passed": 2, "failed": 1, "skipped": 2},
        "peer/test_modeling_kda": {"passed": 1, "failed": 0, "skipped": 0},
        "peer/paths of calls": {"passed": 3, "failed": 0, "skipped": 0},
    }
    assert record["counts"] == {"peer tests passed": 3, "peer calls served": 2, "peer calls left to FLA": 1}
    assert record["versions"]["registration"] == "fla.backends"


def test_a_folder_without_their_tests_is_refused(tmp_path):
    done = run(tmp_path, tmp_path)
    assert done.returncode == 2 and "has no tests/ops/test_kda.py" in done.stderr


def test_a_call_that_goes_another_way_than_it_should_is_wrong():
    recorder = peer_suite.Recorder()
    recorder.test = "tests/ops/test_kda.py::test_one"
    recorder.saw("triton", "some reason", expected=True, served=False)
    recorder.saw("hopper", "", expected=True, served=True)
    recorder.saw("portable", "", expected=False, served=True)
    record = peer_suite.make_record({}, recorder, set(), complete=True)
    assert [(one["path"], one["expected"]) for one in record["wrong"]] == [("triton", "ours"), ("portable", "FLA")]
    assert record["groups"]["peer/paths of calls"] == {"passed": 1, "failed": 2, "skipped": 0}


def on_gpu(**changes) -> dict:
    """A call as it would be on a GPU: only what can be looked at without one."""

    class Fake(torch.Tensor):
        device = torch.device("cuda", 0)

    def fake(*shape, dtype=torch.bfloat16, requires_grad=False):
        return torch.zeros(*shape, dtype=dtype).as_subclass(Fake).requires_grad_(requires_grad)

    arguments = {name: fake(1, 4, 1, 128) for name in ("q", "k", "v", "g")} | {"beta": fake(1, 4, 1)}
    return arguments | {name: change(fake) if callable(change) else change for name, change in changes.items()}


@pytest.mark.parametrize(
    "changes, served",
    [
        ({}, True),
        ({"g": lambda fake: fake(1, 4, 1, 128, dtype=torch.float32)}, True),
        ({"q": lambda fake: fake(1, 4, 1, 128, dtype=torch.float16)}, False),
        ({"q": lambda fake: fake(1, 4, 1, 64)}, False),
        ({"v": lambda fake: fake(1, 4, 1, 128, requires_grad=True)}, False),
        ({"return_intermediate_states": True}, False),
        ({"chunk_size": 16}, False),
        ({"use_gate_in_kernel": True}, False),
        ({"use_gate_in_kernel": True, "lower_bound": -5.0}, True),
        ({"cp_context": object()}, False),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else str(value),
)
def test_what_should_be_served_on_a_gpu(changes, served):
    assert peer_suite.should_be_served(on_gpu(**changes)) is served


def test_only_the_first_configuration_that_works_is_tried(monkeypatch):
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    tried = []

    def bench(self, *args, config, **meta):
        tried.append(config)
        return [float("inf")] * 3 if config == "too large" else [1.0, 1.0, 1.0]

    def run_all(self, *args, **kwargs):
        times = {config: self._bench(config=config) for config in ("too large", "works", "faster")}
        return min(times, key=times.get)

    monkeypatch.setattr(autotuner, "run", run_all)
    monkeypatch.setattr(autotuner, "_bench", bench)
    peer_suite.take_the_first_configuration_that_works()
    tuner = autotuner.__new__(autotuner)
    assert autotuner.run(tuner) == "works" and tried == ["too large", "works"]
    assert autotuner.run(tuner) == "works" and len(tried) == 4, "each call starts anew"
