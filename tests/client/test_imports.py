"""The clients speak HTTP only: they import no torch, no engine and no server."""

import subprocess
import sys

PROGRAM = """
import sys
import fa_serve.client.bench, fa_serve.client.bench_report, fa_serve.client.chat, fa_serve.client.http_connection
ours = {name for name in sys.modules if name.startswith("fa_serve.") and not name.startswith("fa_serve.client")}
print(sorted(ours & {"fa_serve.engine", "fa_serve.server", "fa_serve.api", "fa_serve.backends"}))
print(sorted({"torch", "transformers", "fastapi"} & sys.modules.keys()))
"""


def test_clients_know_nothing_of_engine_and_server():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["[]", "[]"]
