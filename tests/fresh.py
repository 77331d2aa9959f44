"""Scripts in processes of their own: forks of one process that has imported torch but not te_fast.

Each script would need seconds to import torch; a fork need not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

# A line of JSON asks for scripts, which run at the same time; a line of JSON answers with the output of each.
SERVER = """
import json, os, sys, tempfile, traceback, types
import torch

def start(script):
    file = tempfile.TemporaryFile("w+")
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        code = 0
        try:
            # A module like any other: torch.compile imports it by its name.
            case = sys.modules["case"] = types.ModuleType("case")
            exec(script, case.__dict__)
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
            print(*[left.code] * (code != left.code), file=sys.stderr)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return child, file

for line in sys.stdin:
    answers = []
    for child, file in [start(script) for script in json.loads(line)]:
        _, status = os.waitpid(child, 0)
        file.seek(0)
        answers.append([os.waitstatus_to_exitcode(status), file.read()])
    print(json.dumps(answers), flush=True)
"""

#: A warning that torch 2.11 gives where it loads a program that it has saved itself.
OF_TORCH = "ignore:The given buffer is not writable:UserWarning"


class Processes:
    """Forks of one process, which starts with the first script."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] | None = None

    def together(self, *scripts: str) -> list[str]:
        """Run scripts at the same time; return their stdout and stderr. A script that fails raises here."""
        if self.server is None:
            # A thread of OpenBLAS beside the main one would make fork warn; a script's own warnings are errors.
            env = {"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1"}
            env["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
            self.server = subprocess.Popen(
                [sys.executable, "-W", "error", "-W", OF_TORCH, "-c", SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
                start_new_session=True,
            )
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(scripts) + "\n")
        self.server.stdin.flush()
        answers = json.loads(self.server.stdout.readline())
        for code, output in answers:
            assert code == 0, f"exit code {code}:\n{output}"
        return [output for _, output in answers]

    def __call__(self, script: str) -> str:
        """Run one script and return its output."""
        return self.together(script)[0]

    def close(self) -> None:
        """End the process and scripts that hang."""
        if self.server is not None:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.communicate()
