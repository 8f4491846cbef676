"""Does the doctor find this GPU healthy, with every kernel that runs on it tried and right?"""

from fla_kda_backend import doctor
from tests.kdakit.run import expected_path, kernel_paths


def test_every_path_of_this_gpu_passes_its_probe():
    report = doctor.examine(with_triton=False)
    problems = [finding["what"] for finding in report["findings"] if finding["kind"] == "problem"]
    assert problems == [] and report["healthy"]
    probes = {probe["name"]: probe for probe in report["probes"] if probe["device"] == "cuda:0"}
    for path in kernel_paths():
        assert probes[path]["status"] == "ok" and probes[path]["path"] == path, probes[path]
        assert 0 < probes[path]["o_error"] <= probes[path]["bound"]
    assert probes["fla"]["status"] == "ok" and probes["fla"]["path"] == expected_path()
    assert probes["triton"]["status"] == "skipped"
