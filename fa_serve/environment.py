"""All environment variables `FA_SERVE_*` that are not settings, and the check that a command knows all variables that are set.

    refuse_unknown(os.environ, settings=["FA_SERVE_PORT", ...])

A misspelt variable would be ignored silently. So a command refuses variables that are neither settings nor in this table. Left
out: what a variable means (see the code that reads it), and the settings (server/settings.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from fa_serve.nearest import nearest_name

PREFIX = "FA_SERVE_"
VARIABLES = {
    "FA_SERVE_API_KEY": "the key of fa-serve chat and bench, and of examples",
    "FA_SERVE_CHECK": "checks of values on a GPU",
    "FA_SERVE_CONFIG": "the settings file",
    "FA_SERVE_RANK_KEY": "the secret of ranks that torchrun starts",
    "FA_SERVE_SGLANG": "whether the plugin for SGLang registers itself",
    "FA_SERVE_VLLM": "whether the plugin for vLLM registers itself",
    "FA_SERVE_BENCH_MODELS": "benchmarks: the folder of models",
    "FA_SERVE_COMMIT": "benchmarks: the commit that results name",
    "FA_SERVE_CASES": "tests: all cases instead of a sample of each grid",
    "FA_SERVE_FUZZ": "tests: the number of random requests to each route",
    "FA_SERVE_FUZZ_SECONDS": "tests: how long random requests are sent",
    "FA_SERVE_FUZZ_SEED": "tests: the seed of random requests",
    "FA_SERVE_LOAD": "tests: whether attacks run, and how long",
    "FA_SERVE_SHARE": "tests: which share of the files runs, such as 0/2",
    "FA_SERVE_SCREENSHOTS": "tests: the folder for pictures of the playground",
    "FA_SERVE_TEST_NEW": "tests: a variable of a forked process",
    "FA_SERVE_TEST_OLD": "tests: a variable of a forked process",
    "FA_SERVE_TEST_PROGRAM": "tests: a program that takes the place of fa-serve",
    "FA_SERVE_TEST_RANKS": "tests: whether ranks fail",
    "FA_SERVE_TEST_RAY": "tests: whether Ray is started",
    "FA_SERVE_TEST_TORCHRUN": "tests: what a rank of torchrun does",
    "FA_SERVE_TEST_WITHOUT": "tests: the protection that is taken away",
    "FA_SERVE_WRITE_DOCS": "tests: whether generated tables are written into the documentation",
}
"""What each variable is for."""
OF_CLIENTS = {"FA_SERVE_API_KEY"}
"""Variables that only a client reads. The errors of a server never suggest one of them."""
SERVICE_LINK = re.compile(r".*_(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP|SCTP)\w*)|.*_PORT")
"""Variables that Kubernetes sets in each pod for a service; the value of the last kind is an address."""


def refuse_unknown(environment: Mapping[str, str], settings: Iterable[str], *, serves: bool = False) -> None:
    """Raise ValueError for a variable `FA_SERVE_*` that is neither a setting nor in the table. Values are not shown.

    settings: the names of the variables of settings
    serves:   the command reads settings, so the error names no variable of clients
    """
    known = {*settings, *VARIABLES}
    meant = sorted(known - OF_CLIENTS if serves else known)
    for name in environment:
        if not name.upper().startswith(PREFIX) or name.upper() in known or _is_service_link(name, environment[name]):
            continue
        nearest = nearest_name(name[len(PREFIX) :], [each[len(PREFIX) :] for each in meant])
        remedy = f"did you mean {PREFIX}{nearest}?" if nearest else "unset it; docs/settings.md lists the settings"
        raise ValueError(f"the environment variable {name} is unknown: {remedy}")


def _is_service_link(name: str, value: str) -> bool:
    found = SERVICE_LINK.fullmatch(name)
    return found is not None and (found[1] is not None or "://" in value)
