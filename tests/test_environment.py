"""Variables of the environment: one table of all names, and no name that nobody reads."""

import re

import pytest
from documentation import ROOT
from fa_serve.server.settings import SETTING_VARIABLES, load

from fa_serve.environment import VARIABLES, refuse_unknown

FOLDERS = ("fa_serve", "server", "tests", "benchmarks", "examples", "deploy", "docs", ".github", ".ci")
PLACEHOLDERS = {"FA_SERVE_NAME", "FA_SERVE_MAX_NUM_SEQ"}  # in texts about any variable, and a misspelt one in tests
OF_KUBERNETES = re.compile(r"FA_SERVE_(SERVICE_\w+|RAY_\w+|PORT_\d\w*)")


def named() -> dict[str, str]:
    """The variables that the repository names, each with a file that does."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = {}
    for path in files:
        if (
            path.name != "test_environment.py"
            and path.suffix in (".py", ".md", ".toml", ".yaml", ".yml", ".service", ".html", "")
            and "log" not in path.parts
        ):
            for name in re.findall(r"\bFA_SERVE_[A-Z0-9_]*[A-Z0-9]\b", path.read_text(encoding="utf-8", errors="ignore")):
                found[name] = str(path.relative_to(ROOT))
    return found


def test_every_variable_that_the_repository_names_is_in_the_table():
    known = {*VARIABLES, *SETTING_VARIABLES, *PLACEHOLDERS}
    found = named()
    unknown = {name: where for name, where in found.items() if name not in known and not OF_KUBERNETES.fullmatch(name)}
    assert unknown == {}, "add them to fa_serve/environment.py"
    assert len(found) > 30


def test_the_table_and_the_settings_do_not_overlap():
    assert not VARIABLES.keys() & set(SETTING_VARIABLES)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("FA_SERVE_MAX_NUM_SEQ", "did you mean FA_SERVE_MAX_NUM_SEQS?"),
        ("FA_SERVE_APIKEY", "did you mean FA_SERVE_API_KEY?"),
        ("FA_SERVE_CHEK", "did you mean FA_SERVE_CHECK?"),
        ("FA_SERVE_TEST_RAI", "did you mean FA_SERVE_TEST_RAY?"),
        ("fa_serve_max_num_seq", "did you mean FA_SERVE_MAX_NUM_SEQS?"),
        ("FA_SERVE_MODEL_PATH", "did you mean FA_SERVE_MODEL?"),
        ("FA_SERVE_XYZZY", "unset it; docs/settings.md lists the settings"),
        ("FA_SERVE_", "unset it; docs/settings.md lists the settings"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_name(name, said):
    with pytest.raises(ValueError, match=r"the environment variable .* is unknown") as refused:
        refuse_unknown({name: "secret"}, SETTING_VARIABLES)
    assert str(refused.value) == f"the environment variable {name} is unknown: {said}"


def test_a_server_is_told_the_variable_of_servers():
    """Before: the server was told FA_SERVE_API_KEY, and with that it warned that FA_SERVE_API_KEYS was meant."""
    for name in ("FA_SERVE_APIKEY", "FA_SERVE_API_KEYZ", "FA_SERVE_APIKEYS"):
        with pytest.raises(ValueError, match=r"did you mean FA_SERVE_API_KEYS\?$"):
            refuse_unknown({name: "secret"}, SETTING_VARIABLES, serves=True)
    refuse_unknown({"FA_SERVE_API_KEY": "secret"}, SETTING_VARIABLES, serves=True)  # of a client on the same machine


def test_the_settings_are_read_for_a_server(monkeypatch):
    monkeypatch.setenv("FA_SERVE_APIKEY", "secret")
    with pytest.raises(ValueError, match=r"did you mean FA_SERVE_API_KEYS\?$"):
        load({})


def test_other_variables_pass():
    refuse_unknown(
        dict.fromkeys([*VARIABLES, *SETTING_VARIABLES, "fa_serve_port", "PATH", "FA_SERVED"], "1"), SETTING_VARIABLES
    )


def test_variables_that_kubernetes_sets_for_a_service_pass():
    links = {
        "FA_SERVE_SERVICE_HOST": "10.0.0.1",
        "FA_SERVE_SERVICE_PORT_HTTP": "8000",
        "FA_SERVE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "FA_SERVE_PORT_8000_TCP_PROTO": "tcp",
        "FA_SERVE_RAY_SERVICE_HOST": "10.0.0.2",
        "FA_SERVE_RAY_PORT": "tcp://10.0.0.2:6379",
    }
    refuse_unknown(links, SETTING_VARIABLES)
    with pytest.raises(ValueError, match="FA_SERVE_HTTP_PORT"):
        refuse_unknown({"FA_SERVE_HTTP_PORT": "8000"}, SETTING_VARIABLES)
