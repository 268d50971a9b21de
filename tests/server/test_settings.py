"""Settings: which source wins, what the engine gets of them, and what is refused; flags and help are in tests/test_cli.py."""

from dataclasses import fields

import pytest
from fa_serve.server.settings import EXTRA_WAITING, Settings, load

from fa_serve.engine import EngineConfig


def test_settings_of_the_engine_have_its_defaults():
    """Except that a service cares for latencies, and offline use for tokens per second."""
    others = {"max_num_batched_tokens": 5120, "target_itl": None, "lora": []}
    for field in fields(EngineConfig):
        default = others.get(field.name, field.default)
        assert Settings.model_fields[field.name].default == default, field.name


def test_the_queue_of_the_engine_is_longer_than_that_of_the_service():
    config = load({"max_waiting": 5000, "max_num_seqs": 7, "page_size": 3}).engine_config()
    assert config.max_waiting == 5000 + EXTRA_WAITING
    assert (config.max_num_seqs, config.page_size, config.seed) == (7, 3, None)


@pytest.mark.parametrize(("name", "sign"), [("fa-serve.toml", " ="), ("fa-serve.yaml", ":")])
def test_a_flag_wins_over_the_environment_and_the_environment_over_the_file(name, sign, tmp_path, monkeypatch):
    file = tmp_path / name
    file.write_text(f'port{sign} 1\nmax_n{sign} 2\nseed{sign} 3\ncors_origins{sign} ["https://a", "https://b"]\n')
    monkeypatch.setenv("FA_SERVE_MAX_N", "20")
    monkeypatch.setenv("FA_SERVE_SEED", "30")
    settings = load({"seed": 300}, file)
    assert (settings.port, settings.max_n, settings.seed) == (1, 20, 300)
    assert settings.cors_origins == ["https://a", "https://b"]
    assert load({}).port == 8000


def test_keys_come_from_environment_and_file(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("# ours\none\n\n  # theirs\ntwo#2\n")
    monkeypatch.setenv("FA_SERVE_API_KEYS", "three, four")
    settings = load({"api_key_file": tmp_path / "keys"})
    assert settings.all_keys == ("three", "four", "one", "two#2")
    assert "three" not in repr(settings)


def test_a_file_of_keys_must_hold_one(tmp_path):
    (tmp_path / "keys").write_text("# none yet\n\n")
    settings = load({"api_key_file": tmp_path / "keys"})
    with pytest.raises(ValueError, match=r"api_key_file must hold at least one key, got none in .*keys"):
        _ = settings.all_keys
    with pytest.raises(ValueError, match=r"api_key_file must be a file that can be read, got .*missing: No such file"):
        _ = load({"api_key_file": tmp_path / "missing"}).all_keys


def test_the_administrators_key_is_no_key_of_a_client(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("one\ntwo\n")
    monkeypatch.setenv("FA_SERVE_ADMIN_KEY", "two")
    with pytest.raises(ValueError, match=r"^admin_key must not be one of the API keys: their holders could then load adapters"):
        _ = load({"api_key_file": tmp_path / "keys"}).all_keys
    monkeypatch.setenv("FA_SERVE_ADMIN_KEY", "three")
    assert load({"api_key_file": tmp_path / "keys"}).all_keys == ("one", "two")


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("request_timeout", "10m", "must be a number of seconds, got '10m'"),
        ("max_model_len", "4k", "must be an integer, got '4k'"),
        ("target_itl", "5ms", "must be a number, got '5ms'"),
        ("log_slow", "1s", "must be a number, got '1s'"),
    ],
)
def test_numbers_with_a_unit_are_told_which_one_is_meant(name, value, rule):
    with pytest.raises(ValueError, match=f"^{name} {rule}$"):
        load({name: value})


def test_without_keys_there_are_none():
    assert load({}).all_keys == ()


def test_empty_variables_are_as_if_they_were_not_set(monkeypatch):
    monkeypatch.setenv("FA_SERVE_PORT", "")
    assert load({}).port == 8000


def test_secrets_may_come_from_the_file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('api_keys = ["one"]\nadmin_key = "two"\n')
    settings = load({}, file)
    assert (settings.all_keys, settings.admin_key.get_secret_value()) == (("one",), "two")


def test_a_port_of_a_kubernetes_service_says_where_it_comes_from(monkeypatch):
    monkeypatch.setenv("FA_SERVE_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(ValueError, match=r"port must be an integer, got 'tcp://10.0.0.1:8000', .* enableServiceLinks: false"):
        load({})
    assert load({"port": 9000}).port == 9000


def test_settings_do_not_change():
    settings = load({})
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1


def test_every_bad_setting_is_named(monkeypatch):
    monkeypatch.setenv("FA_SERVE_MAX_NUM_SEQS", "0")
    with pytest.raises(ValueError, match="port") as caught:
        load({"port": 99999, "colour": "red"})
    assert sorted(part.partition(" ")[0] for part in str(caught.value).split("; ")) == ["colour", "max_num_seqs", "port"]
    assert "port must be at most 65535, got 99999" in str(caught.value)


def test_a_bad_key_is_not_shown():
    with pytest.raises(ValueError, match=r"api_keys\.0 must be a string") as caught:
        load({"api_keys": [12345]})
    assert "12345" not in str(caught.value)


@pytest.mark.parametrize("value", ["https://a.org", "a.org/x", "a.org:443", "*.a.org", "a.org,b c", "[::1]"])
def test_hosts_of_images_that_no_address_can_name(value):
    """They would be allowed without an effect."""
    with pytest.raises(
        ValueError, match=r"^image_hosts must name hosts such as images[.]example[.]org, without scheme, port, path or"
    ):
        load({"image_hosts": value})
    assert load({"image_hosts": "Images.example.org, 93.184.216.34"}).image_hosts == ["Images.example.org", "93.184.216.34"]


@pytest.mark.parametrize("value", [" , ", ","])
@pytest.mark.parametrize("name", ["api_keys", "cors_origins"])
def test_a_list_of_nothing_but_commas_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must hold at least one item between its commas"):
        load({name: value})


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("fa-serve.toml", "prot = 1", "prot is not a setting: did you mean port\\?"),
        ("fa-serve.yaml", "prot: 1", "prot is not a setting: did you mean port\\?"),
        ("fa-serve.toml", "port =", "fa-serve.toml must be a table of settings"),
        ("fa-serve.yml", "- port", "fa-serve.yml must be a table of settings"),
    ],
)
def test_a_bad_file_is_refused(name, text, said, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        load({}, tmp_path / name)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config must be an existing TOML or YAML file, got .*none\.toml"):
        load({}, tmp_path / "none.toml")
