"""Does scripts/segments_accuracy.py write what its record holds, and see what is wrong?"""

import json

import pytest
import torch

from scripts import segments_accuracy as script

RECORD = script.ROOT / "docs/results/h200/segments_accuracy.json"


def test_the_record_holds_what_the_script_measures(monkeypatch):
    monkeypatch.setattr(script, "measure", lambda what, arguments, judge: what)
    monkeypatch.setattr(script.accuracy, "inputs", lambda *args, **kwargs: {"g": torch.zeros(1)})
    record = json.loads(RECORD.read_text())
    assert [one["what"] for one in record] == list(script.records())
    assert all(map(script.is_right, record))


WRONG = [{"segments": 1}, {"error_o": 1e-2}, {"error_state": 1e-2}, {"error_o": float("nan")}]


@pytest.mark.parametrize("change", WRONG)
def test_a_sequence_in_one_piece_or_a_wrong_result_is_seen(change):
    (one, *_) = json.loads(RECORD.read_text())
    assert not script.is_right(one | change)


def test_without_kernels_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("tests.conftest.reason_without_kernels", lambda: "there is no GPU")
    monkeypatch.setattr("sys.argv", ["segments_accuracy.py"])
    assert script.main() == 2
    assert "there is no GPU" in capsys.readouterr().err
