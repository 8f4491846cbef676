"""How is a step of the examination run so that nothing it does can harm the examiner? In a process of its own.

A `Worker` keeps one child process and asks it one step after the other (`steps.py`). A step that raises, hangs, or
takes the process down, by a broken library or a driver, is an answer like any other; the next step gets a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

# Imports torch before anything of this package, as a user's program does, so that the step can tell whether torch has
# loaded the package by itself. What libraries print goes to stderr; answers have the old stdout for themselves.
_PROGRAM = """
import os, sys
answers = os.dup(1)
os.dup2(2, 1)
try:
    import torch
except BaseException:
    pass
loaded = "fla_kda_backend" in sys.modules
sys.path.append(sys.argv[1])
from fla_kda_backend.doctor.steps import serve
serve(answers, loaded)
"""
_PACKAGE_PARENT = Path(__file__).parents[2]
_LAST_WORDS = 2000


class Worker:
    """Runs steps in a child process, which is started when it is needed and replaced when it has died.

    Args:
        environment: of the child; that of this process when None.
    """

    def __init__(self, environment: dict[str, str] | None = None):
        self._environment = environment
        self._process: subprocess.Popen | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._stderr: IO[bytes] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception) -> None:
        self.end()

    def ask(self, step: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """Run one step: {"facts": its result}, or {"error": one sentence} when there is none within `seconds`."""
        try:
            if self._process is None:
                self._start()
            request = json.dumps({"step": step, "arguments": arguments}) + "\n"
            with contextlib.suppress(BrokenPipeError):  # it has died: the missing answer tells
                self._process.stdin.write(request)
                self._process.stdin.flush()
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            self.end()
            return {"error": f"no answer within {seconds:.0f} seconds"}
        except OSError as problem:
            self.end()
            return {"error": f"no process could be started: {problem}"}
        if answer is None:
            return {"error": self._obituary()}
        try:
            return json.loads(answer)
        except ValueError:
            self.end()
            return {"error": f"an answer that cannot be read: {answer[:80]!r}"}

    def end(self) -> None:
        """End the child process; the next step starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the compilers that Triton may have started
        process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        self._stderr.close()

    def _start(self) -> None:
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(_PACKAGE_PARENT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=self._environment,
            start_new_session=True,
        )
        self._answers = queue.Queue()
        threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True).start()

    def _obituary(self) -> str:
        """How the process died, and the last line that it wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        status = self._process.returncode
        if status is None:
            cause = "the process stopped answering"
        elif status < 0:
            cause = f"the process was killed by {_signal_name(-status)}"
        else:
            cause = f"the process ended with status {status}"
        self._stderr.seek(0, 2)
        self._stderr.seek(max(0, self._stderr.tell() - _LAST_WORDS))
        lines = self._stderr.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        self.end()
        return f"{cause}: {last}" if last else cause


def _read(stream: IO[str], answers: queue.Queue) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed under us when the process is ended
        for line in stream:
            answers.put(line)
    answers.put(None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
