"""Does the entry point leave `import torch` as quick and as safe as it was, whatever state FLA is in?"""

import compileall
from pathlib import Path

import pytest

from tests.kdakit.fla_versions import ROOT, run_with

# What PyTorch's `import torch` may become slower by.
ENTRY_POINT_SECONDS = 1e-3
TIMED_PROCESSES = 5


def test_the_entry_point_is_declared():
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = declared.split('[project.entry-points."torch.backends"]\n')[1].split("\n\n")[0]
    assert section == 'fla_kda_backend = "fla_kda_backend.autoload:install"'


TIMED = """
import sys, time
import torch
assert "fla_kda_backend" not in sys.modules
before, start = set(sys.modules), time.perf_counter()
from fla_kda_backend.autoload import install      # what an entry point's load() does, then the call
install()
seconds = time.perf_counter() - start
start = time.perf_counter()
install()
report(seconds=seconds, again=time.perf_counter() - start, modules=sorted(set(sys.modules) - before))
"""


def test_the_entry_point_takes_less_than_a_millisecond_and_imports_nothing_heavy():
    compileall.compile_dir(ROOT / "fla_kda_backend", quiet=1, maxlevels=0)  # as an installation is
    # The least of a few: a busy machine makes single times longer, never shorter.
    runs = [run_with([], TIMED, TORCH_DEVICE_BACKEND_AUTOLOAD="0") for _ in range(TIMED_PROCESSES)]
    assert min(facts["seconds"] for facts in runs) < ENTRY_POINT_SECONDS
    assert min(facts["again"] for facts in runs) < ENTRY_POINT_SECONDS / 10
    assert set(runs[0]["modules"]) == {"fla_kda_backend", "fla_kda_backend.autoload"}


def fake_fla(folder: Path, kda: str, chunk: str = "", root: str = "") -> list[Path]:
    """A package named fla whose modules have these sources, as a folder to put first on the path."""
    package = folder / "fla" / "ops" / "kda"
    package.mkdir(parents=True)
    (folder / "fla" / "__init__.py").write_text(root)
    (folder / "fla" / "ops" / "__init__.py").write_text("")
    (package / "__init__.py").write_text(kda)
    (package / "chunk.py").write_text(chunk)
    return [folder]


HOOKED = """
import sys
import torch
from fla_kda_backend import autoload
try:
    import fla.ops.kda
    error = None
except BaseException as problem:
    error = f"{type(problem).__name__}: {problem}"
report(
    error=error, hooked=autoload._finder in sys.meta_path, marks=getattr(sys.modules.get("fla.ops.kda"), "mark", None),
    registration="fla_kda_backend.registration" in sys.modules, torch=torch.zeros(1).item(),
)
"""


def test_without_fla_nothing_happens(tmp_path):
    absent = fake_fla(tmp_path, "", root="raise ModuleNotFoundError('No module named fla', name='fla')")
    facts = run_with(absent, HOOKED)
    assert facts["error"].startswith("ModuleNotFoundError")
    assert facts["hooked"] and not facts["registration"] and "fla_kda_backend" not in facts["stderr"]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise ImportError('no Triton here')", "ImportError: no Triton here"),
        ("raise SystemExit('odd')", "SystemExit: odd"),
        ("from .nothing import here", "ModuleNotFoundError: No module named 'fla.ops.kda.nothing'"),
        ("a b", "SyntaxError: invalid syntax (__init__.py, line 1)"),
    ],
    ids=["import-error", "system-exit", "missing-module", "syntax"],
)
def test_a_broken_fla_fails_with_its_own_error(tmp_path, source, error):
    facts = run_with(fake_fla(tmp_path, source), HOOKED)
    assert facts["error"] == error
    assert not facts["registration"] and "fla_kda_backend" not in facts["stderr"]


@pytest.mark.parametrize(
    "chunk", ["", "raise RuntimeError('no')", "chunk_kda = 5"], ids=["no-function", "raises", "no-callable"]
)
def test_a_fla_that_we_cannot_use_is_imported_as_without_us(tmp_path, chunk):
    facts = run_with(fake_fla(tmp_path, "mark = 'executed'", chunk), HOOKED)
    assert facts["error"] is None and facts["marks"] == "executed"
    (line,) = [line for line in facts["stderr"].splitlines() if "fla_kda_backend" in line]
    assert line.startswith("[fla_kda_backend] not registered, FLA runs as without it: ")


def test_a_failure_of_ours_breaks_neither_torch_nor_fla(tmp_path):
    code = "import sys\nsys.modules['fla_kda_backend.registration'] = None\n" + HOOKED
    facts = run_with(fake_fla(tmp_path, "mark = 'executed'"), code)
    assert facts["error"] is None and facts["marks"] == "executed"
    assert "not registered" in facts["stderr"]


SWITCHED_OFF = """
import torch
import sys
from fla_kda_backend import autoload
hooked = autoload._finder in sys.meta_path
import fla.ops.kda
report(hooked=hooked, registration="fla_kda_backend.registration" in sys.modules)
"""


def test_the_kill_switch_keeps_us_out(tmp_path):
    facts = run_with(fake_fla(tmp_path, ""), SWITCHED_OFF, FLA_KDA_BACKEND="0")
    assert not facts["hooked"] and not facts["registration"]


DISABLED = """
import sys
from fla_kda_backend import autoload
hooks = [autoload._finder in sys.meta_path]
import fla_kda_backend
fla_kda_backend.disable()
hooks.append(autoload._finder in sys.meta_path)
autoload.install()                                # torch's entry point may come later
hooks.append(autoload._finder in sys.meta_path)
way = fla_kda_backend.enable()
hooks.append(autoload._finder in sys.meta_path)
fla_kda_backend.enable()
report(hooks=hooks, way=way, finders=sum(type(finder) is type(autoload._finder) for finder in sys.meta_path))
"""


def test_disable_keeps_the_hook_out_until_enable(tmp_path):
    facts = run_with(fake_fla(tmp_path, ""), DISABLED)
    assert facts["hooks"] == [True, False, False, True]
    assert facts["way"] is None and facts["finders"] == 1


LOADER = """
import importlib, importlib.util, inspect, sys
import torch

class Old:                                        # an import hook from before find_spec
    def find_module(self, name, path=None):
        return None

sys.meta_path.insert(0, Old())
import fla.ops.kda as kda
from importlib.machinery import SourceFileLoader
calls = []
from fla_kda_backend import registration
registration.fla_was_loaded = lambda: calls.append(1)
importlib.reload(kda)
importlib.reload(kda)
report(
    calls=len(calls), loader=type(kda.__loader__) is SourceFileLoader, source=inspect.getsource(kda).strip(),
    package=kda.__path__[0].endswith("kda"), spec=importlib.util.find_spec("fla.ops.kda").name,
)
"""


def test_fla_keeps_its_loader_and_every_import_of_it_is_seen(tmp_path):
    facts = run_with(fake_fla(tmp_path, "mark = 1", "def chunk_kda(q, k, v, g, beta): pass"), LOADER)
    assert facts["calls"] == 2
    assert facts["loader"] and facts["source"] == "mark = 1" and facts["package"] and facts["spec"] == "fla.ops.kda"


def test_importing_the_package_does_not_import_torch():
    code = """
    import sys
    import fla_kda_backend
    hidden = sorted(set(fla_kda_backend.__all__) - set(dir(fla_kda_backend)))
    report(torch="torch" in sys.modules, hidden=hidden)
    try:
        fla_kda_backend.nothing
    except AttributeError as problem:
        report(problem=str(problem))
    """
    facts = run_with([], code)
    assert not facts["torch"] and facts["hidden"] == []
    assert facts["problem"] == "module 'fla_kda_backend' has no attribute 'nothing'"
