"""Programs in fresh interpreters that have imported PyTorch, which takes 2.5 seconds, and nothing else of ours or of others.

    done = after_torch("import fa_serve; print(fa_serve.__version__)")       # as subprocess.run of `python -c`
    done = after_transformers("import fa_serve.hf")

They are forked from one process. Programs that must not find PyTorch imported start an interpreter themselves. Those of
`after_transformers` find imported what `transformers.modeling_utils` imports, but not that module, which holds the registry of
attention: a program that imports it executes it.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache

PARENT = """
import json, os, sys, traceback, torch
if "transformers" in sys.argv:
    import transformers.modeling_utils
    del sys.modules["transformers.modeling_utils"]
for line in sys.stdin:
    program, environment, out, err = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.environ.clear()
            os.environ.update(environment)
            for number, name in ((1, out), (2, err)):
                os.dup2(os.open(name, os.O_WRONLY), number)
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _parent(*imported: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PARENT, *imported]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(parent.communicate)  # which closes its input
    return parent


def after_torch(program: str) -> subprocess.CompletedProcess[str]:
    return _run(_parent(), program)


def after_transformers(program: str) -> subprocess.CompletedProcess[str]:
    return _run(_parent("transformers"), program)


def _run(parent: subprocess.Popen[str], program: str) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        print(json.dumps([program, dict(os.environ), out.name, err.name]), file=parent.stdin, flush=True)
        code = int(parent.stdout.readline())
        return subprocess.CompletedProcess(program, code, out.read(), err.read())
