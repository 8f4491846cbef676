"""How do we get beside FLA without a change to anybody's code?

`install` is the entry point of the group `torch.backends` that PyTorch calls at the end of `import torch`; `import
fla_kda_backend` calls it too. It puts a finder into `sys.meta_path` that lets FLA's KDA package be found and executed
as ever, and registers our backend right afterwards, before any model can bind FLA's function. It imports nothing
heavy and never raises, since an exception here would break `import torch`.
"""

import os
import sys

FLA_KDA = "fla.ops.kda"


class _AfterImport:
    """Finds nothing by itself: it has `registration.fla_was_loaded` called after FLA has executed its KDA."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != FLA_KDA:
            return None
        for finder in list(sys.meta_path):
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = find_spec(fullname, path, target) if find_spec is not None else None
            if spec is not None:
                _call_after_execution(spec.loader)
                return spec
        return None


def _call_after_execution(loader) -> None:
    """Make this loader, and no other, call us after it has executed FLA's KDA package."""
    execute = getattr(loader, "exec_module", None)
    if execute is None or getattr(execute, "calls_fla_kda_backend", False):
        return

    def exec_module(module):
        execute(module)
        if module.__name__ == FLA_KDA:
            _fla_was_loaded()

    exec_module.calls_fla_kda_backend = True
    try:
        loader.exec_module = exec_module
    except (AttributeError, TypeError) as problem:
        _report(problem)


_finder = _AfterImport()
_kept_out = False


def install() -> None:
    """Register our backend as soon as FLA's KDA is there: now if it is, else when it is imported. Never raises.

    Does nothing with `FLA_KDA_BACKEND=0`, after `disable()`, and when it has been called before.
    """
    try:
        if not _kept_out and os.environ.get("FLA_KDA_BACKEND") != "0":
            add_hook()
    except Exception as problem:  # an exception here would break `import torch`
        _report(problem)


def add_hook() -> None:
    """Install the import hook; register at once when FLA's KDA has been imported already."""
    global _kept_out
    _kept_out = False
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if fla_is_loaded():
        _fla_was_loaded()


def remove_hook() -> None:
    """Take the import hook out, and keep it out until somebody asks for it: `import torch` may still be to come."""
    global _kept_out
    _kept_out = True
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def fla_is_loaded() -> bool:
    """Whether FLA's KDA package has been imported and executed to its end."""
    module = sys.modules.get(FLA_KDA)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _fla_was_loaded() -> None:
    try:
        from fla_kda_backend import registration

        registration.fla_was_loaded()
    except Exception as problem:  # FLA works without us: its import must not fail because of us
        _report(problem)


def _report(problem: Exception) -> None:
    try:
        sys.stderr.write(f"[fla_kda_backend] not registered, FLA runs as without it: {problem!r}\n")
    except Exception:
        pass
