"""The command line: its flags, its help, and settings that are refused before a server starts.

Running servers are in tests/server/test_process.py, the output of `fa-serve info` in tests/test_info_tables.py.
"""

import logging
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from documentation import ROOT, check_generated, table_cell
from fa_serve.server.settings import SECRETS, Settings, counts_bytes, load, shown_default
from typer.testing import CliRunner

import fa_serve
from fa_serve.__main__ import app
from fa_serve.engine.events import Phase
from fa_serve.environment import PREFIX
from fa_serve.flags import FOREIGN_FLAGS

WIDE = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


def run(*arguments: str, **environment: str):
    return CliRunner().invoke(app, arguments, env={**WIDE, **environment})


@pytest.fixture(autouse=True)
def log_ends_with_its_test(monkeypatch):
    """`serve` and `warm` send the log to stderr, which the runner closes when the command ends."""
    monkeypatch.setattr(logging.getLogger(), "handlers", list(logging.getLogger().handlers))


def test_without_its_extra_it_says_what_to_install():
    program = "import sys; sys.modules['typer'] = None; import fa_serve.__main__"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("fa-serve: the command line needs the server extra (in a clone: pip install '.[server]'): ")


def test_help_is_quick():
    """It imports no torch, no transformers and no web framework, which take seconds."""
    program = """
import sys
from fa_serve.__main__ import app
app(["serve", "--help"], standalone_mode=False)
print(sorted({"torch", "transformers", "fastapi", "uvicorn"} & sys.modules.keys()))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


def test_every_setting_is_a_flag():
    text = run("serve", "--help").stdout
    for name in Settings.model_fields:
        flag = f"--{name.replace('_', '-')}"
        assert (flag in text) == (name not in {*SECRETS, "model"}), name


COMMANDS = [(), ("serve",), ("ray",), ("warm",), ("chat",), ("bench",), ("info",), ("doctor",)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words) or "-")
def test_help_fits_80_columns_and_nothing_is_cut(command):
    lines = run(*command, "--help", COLUMNS="80").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if re.search(r"--([\w-]*-)?$", line)], "a flag is divided between two lines"
    assert not [line for line in lines if "…" in line or (line.endswith("...") and not line.startswith("Usage"))]


def test_at_80_columns_every_flag_is_whole_and_in_its_group():
    """Each flag begins a line of the section of its group, and a switch shows both forms."""
    section = ""
    found = {}
    for line in run("serve", "--help", COLUMNS="80").stdout.splitlines():
        if line and not line.startswith(" "):
            section = line.rstrip(":")
        elif flags := re.match(r"  (--[\w-]+)(?: / (--[\w-]+))?(?: |$)", line):
            found[flags[1]] = (section, flags[2])
    for name, field in Settings.model_fields.items():
        if name not in {*SECRETS, "model"}:
            flag = name.replace("_", "-")
            switch = bool in (field.annotation, *get_args(field.annotation))
            assert found[f"--{flag}"] == (field.json_schema_extra["group"], f"--no-{flag}" if switch else None)


def test_a_default_is_shown_as_it_is_written():
    text = " ".join(run("serve", "--help", COLUMNS="80").stdout.split())
    for default in ("[default: 256]", "[default: auto]", "[default: off]", "[default: on]", "[default: 127.0.0.1]"):
        assert default in text
    assert "[default: None]" not in text
    assert "[default: []]" not in text


def test_a_size_is_read_by_the_settings(monkeypatch):
    assert given("--kv-host-memory", "4GiB", monkeypatch=monkeypatch).kv_host_memory == 4 << 30
    settings = given("--max-body-bytes", "8MiB", monkeypatch=monkeypatch, FA_SERVE_LORA_BYTES="2GiB")
    assert (settings.max_body_bytes, settings.lora_bytes, settings.image_memory) == (8 << 20, 2 << 30, 1536 << 20)
    assert given("--max-url-bytes", "4096", monkeypatch=monkeypatch).max_url_bytes == 4096
    assert type(settings.engine_config().lora_bytes) is int


def test_every_setting_of_bytes_is_a_size():
    """And is shown with its unit: 16 million pixels are not 16 MiB."""
    named = {name for name in Settings.model_fields if re.search(r"_bytes|_memory$", name)}
    assert {name for name in Settings.model_fields if counts_bytes(name)} == named
    assert [shown_default(name) for name in ("max_body_bytes", "image_memory", "max_url_bytes", "kv_host_memory")] == [
        "16MiB",
        "1536MiB",
        "8KiB",
        "0",
    ]
    assert [shown_default(name) for name in ("max_inputs", "max_image_pixels", "lora_bytes")] == ["2048", "16777216", ""]
    text = " ".join(run("serve", "--help", COLUMNS="80").stdout.split())
    assert "--max-body-bytes SIZE Maximum size of a request's body. [default: 16MiB]" in text
    assert "The administrator's key comes from FA_SERVE_ADMIN_KEY." in text


def test_the_version():
    done = run("--version")
    assert (done.exit_code, done.stdout) == (0, f"fa-serve {fa_serve.__version__}\n")


@pytest.mark.parametrize("command", ["serve", "warm"])
def test_a_word_behind_a_switch_is_not_taken_for_a_model(command):
    done = run(command, "--eager", "true")
    assert (done.exit_code, done.stderr) == (
        2,
        "fa-serve: MODEL must be a hub name or a folder, got true: a switch takes no value, as in --eager or --no-eager\n",
    )


def given(*arguments, monkeypatch, **environment):
    """The settings that `serve` would take from these arguments, without a server."""
    found = []

    def stop(flags, file=None):
        found.append(load(flags, file))
        raise ValueError("stopped")

    monkeypatch.setattr("fa_serve.__main__.load", stop)
    assert run("serve", *arguments, **environment).exit_code == 2
    return found[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--api-key", "secret"), "No such option: --api-key. Use FA_SERVE_API_KEYS in the environment, or --api-key-file"),
        (("--tensor-parallel-size=2",), "No such option: --tensor-parallel-size. Use --tensor-parallel\n"),
        (("org/model", "--tokenizer-revision", "v2"), "Use --revision, which applies to all files of the model"),
        (("--tensor_parallel_size", "2"), "No such option: --tensor-parallel-size. Use --tensor-parallel\n"),
        (("--model", "org/model"), "No such option: --model. Use the model as the first argument: fa-serve serve MODEL\n"),
        (("-tp", "2"), "No such option: -tp. Use --tensor-parallel\n"),
        (
            ("--disable-log-requests",),
            "No such option: --disable-log-requests. Leave it out: prompts and answers are never logged",
        ),
        (("--dtype", "half"), "--dtype half is a value of vLLM. Use --dtype float16\n"),
        (("--generation-config=vllm",), "--generation-config vllm is a value of vLLM. Use --generation-config none\n"),
        (("--kv-cache-dtype", "fp8_e4m3"), "--kv-cache-dtype fp8_e4m3 is a value of vLLM. Use --kv-cache-dtype fp8, which is"),
        (("--kv-cache-dtype=bfloat16",), "--kv-cache-dtype bfloat16 is a value of vLLM. Use --dtype bfloat16: without"),
        (
            ("--tokenizer", "org/other"),
            "No such option: --tokenizer. Use a folder with the model's files, in which",
        ),
        (("--disable-log-stats",), "--disable-log-stats. Leave it out: statistics are not logged; /metrics has them\n"),
        (
            ("org/model", "--served-model-name", "a", "b"),
            "--served-model-name takes one name, got a b. Use --served-model-name a",
        ),
        (("--served-model-name", "a", "b", "c"), "--served-model-name takes one name, got a b c. Use --served-model-name a,"),
        (
            ("--quantization", "awq"),
            "--quantization awq is a value of vLLM. Use no --quantization: the format is read from the files",
        ),
    ],
)
@pytest.mark.parametrize("command", ["serve", "ray", "warm"])
def test_a_flag_of_vllm_is_refused_with_what_takes_its_place(command, arguments, said):
    result = run(command, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "secret" not in result.stderr


def test_a_model_may_stand_behind_its_name(monkeypatch):
    settings = given("--served-model-name", "a", "org/model", "--eager", monkeypatch=monkeypatch)
    assert (settings.served_model_name, settings.model, settings.eager) == ("a", "org/model", True)


@pytest.mark.parametrize("command", ["serve", "ray", "warm"])
def test_a_second_name_does_not_take_the_place_of_the_environments_model(command):
    """vLLM takes several names. The server would load, or download, a model that is called like the second one."""
    result = run(command, "--served-model-name", "a", "b", FA_SERVE_MODEL="org/model")
    assert result.exit_code == 2
    assert (
        "--served-model-name takes one name, and b behind it would take the place of FA_SERVE_MODEL=org/model" in result.stderr
    )
    assert f"fa-serve {command} b --served-model-name a" in result.stderr


@pytest.mark.parametrize("command", ["serve", "ray", "warm"])
@pytest.mark.parametrize("by_flag", [True, False], ids=["flag", "environment"])
def test_a_second_name_does_not_take_the_place_of_the_files_model(command, by_flag, tmp_path):
    file = tmp_path / "fa-serve.toml"
    file.write_text('model = "org/model"')
    flags, environment = (("--config", str(file)), {}) if by_flag else ((), {"FA_SERVE_CONFIG": str(file)})
    result = run(command, *flags, "--served-model-name", "a", "b", **environment)
    assert result.exit_code == 2
    assert f"b behind it would take the place of the model org/model of {file}. Leave b out" in result.stderr


def test_a_file_without_a_model_lets_it_stand_behind_its_name(monkeypatch, tmp_path):
    file = tmp_path / "fa-serve.toml"
    file.write_text("eager = true")
    settings = given("--served-model-name", "a", "org/model", monkeypatch=monkeypatch, FA_SERVE_CONFIG=str(file))
    assert (settings.served_model_name, settings.model, settings.eager) == ("a", "org/model", True)
    result = run("serve", "--served-model-name", "a", "b", FA_SERVE_CONFIG=str(tmp_path / "none.toml"))
    assert "config must be an existing TOML or YAML file" in result.stderr


def test_a_model_before_its_name_replaces_the_environments(monkeypatch):
    for arguments in (("b", "--served-model-name", "a"), ("--served-model-name", "a", "--eager", "b")):
        settings = given(*arguments, monkeypatch=monkeypatch, FA_SERVE_MODEL="org/model")
        assert (settings.served_model_name, settings.model) == ("a", "b")
    settings = given("--served-model-name", "a", "org/model", monkeypatch=monkeypatch, FA_SERVE_MODEL="org/model")
    assert (settings.served_model_name, settings.model) == ("a", "org/model")


@pytest.mark.parametrize("command", ["chat", "bench", "info", "doctor"])
def test_a_command_without_settings_names_none(command):
    for flag in ("--api-key", "--block-size"):
        result = run(command, flag, "1")
        assert result.exit_code == 2
        assert f"No such option: {flag}" in result.stderr
        assert "Use" not in result.stderr.split("No such option")[1]


def test_the_page_for_users_of_vllm_has_these_flags():
    """Each flag of its table is one of ours, or is refused with what takes its place; and the other way round."""
    page = (ROOT / "docs" / "moving" / "vllm.md").read_text()
    rows = page.split("## Server")[1].split("\n## ")[0].splitlines()
    named = {flag for row in rows if row.startswith("|") for flag in re.findall(r"--[a-z][a-z-]+", row.split("|")[1])}
    ours = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    assert named - ours == FOREIGN_FLAGS.keys()
    assert not FOREIGN_FLAGS.keys() & ours


def test_a_flag_turns_off_what_the_environment_turns_on(monkeypatch):
    environment = {"FA_SERVE_EAGER": "true", "FA_SERVE_PREFIX_CACHING": "true", "FA_SERVE_PROCESS": "true"}
    settings = given("--no-eager", "--no-prefix-caching", "--no-process", monkeypatch=monkeypatch, **environment)
    assert (settings.eager, settings.prefix_caching, settings.process) == (False, False, False)
    settings = given(monkeypatch=monkeypatch, **environment)
    assert (settings.eager, settings.prefix_caching, settings.process) == (True, True, True)
    settings = given("--eager", "--deterministic", monkeypatch=monkeypatch)
    assert (settings.eager, settings.deterministic, settings.trust_remote_code) == (True, True, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "99999"], "port must be at most 65535, got '99999'"),
        (["--config", "missing.toml"], "config must be an existing TOML or YAML file, got missing.toml"),
        (["--api-key-file", "missing"], "missing"),
        (["--dtype", "int4"], "int4"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--max-body-bytes", "16Mibit"], "max_body_bytes must be a number of bytes, or a size such as 16MiB, got '16Mibit'"),
        (["--image-memory", "1KiB"], "image_memory must be at least 1048576, got '1KiB'"),
        (["./nope"], "model must be a hub name, such as Qwen/Qwen3-0.6B, or an existing folder, got './nope'"),
        (["/", "--revision", "v1"], "model must be a folder with a config.json"),
        (["--revision", "v1"], "revision must be left out for the embedded model, which has only one revision"),
        (["--lora", "a=./nope"], "lora must be NAME=FOLDER with an existing folder, got 'a=./nope'"),
        (["--lora-folder", "nope"], "lora_folder must be an existing folder, got nope"),
        (["--generation-config", "./nope"], "generation_config must be auto, none, or a folder with a generation_config.json"),
        (["--speculative", "draft=./nope"], "speculative must name a draft model: model must be a hub name"),
        (["--kv-host-folder", "/dev/null/x"], "kv_host_folder must be a folder that can be read and written (/dev/null"),
        (["--chat-template", "/none"], "chat_template must be a file that can be read, got /none: No such file"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "warm"])
def test_bad_settings_are_refused_before_anything_is_loaded(command, arguments, said, monkeypatch):
    """Before: a path that is not there was told after the imports, or after the weights were loaded."""
    monkeypatch.setattr(Settings, "engine_config", lambda _: pytest.fail("PyTorch would be imported"))
    result = run(command, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("fa-serve.toml", "prot = 1", "prot"),
        ("fa-serve.yml", "prot: 1", "prot"),
        ("fa-serve.yml", "- port", "must be a table of settings"),
        ("fa-serve.yml", "port: [", "must be a table of settings"),
        ("fa-serve.yml", "api_keys: [12345]", "api_keys.0 must be a string\n"),  # and not what is in it
    ],
)
def test_a_bad_file_is_refused(name, text, said, tmp_path):
    (tmp_path / name).write_text(text)
    result = run("serve", FA_SERVE_CONFIG=str(tmp_path / name))
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize("command", ["serve", "ray", "warm", "chat", "bench", "info"])  # and doctor reports it
def test_a_variable_that_nobody_reads_is_refused_by_every_command(command, monkeypatch):
    if command == "ray":
        pytest.importorskip("ray")
    result = run(command, FA_SERVE_MAX_NUM_SEQ="4")
    assert result.exit_code == 2
    assert result.stderr == (
        "fa-serve: the environment variable FA_SERVE_MAX_NUM_SEQ is unknown: did you mean FA_SERVE_MAX_NUM_SEQS?\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "cud"), "device must be auto, cpu, cuda or cuda:N, got 'cud'"),
        (("--api-key-file", "/none"), "api_key_file must be a file that can be read, got /none: No such file or directory"),
        (("--api-key-file", "/"), "api_key_file must be a file that can be read, got /: Is a directory"),
        (("--chat-template", "/none"), "chat_template must be a file that can be read, got /none: No such file or directory"),
    ],
)
def test_a_setting_that_cannot_work_is_one_sentence(arguments, said):
    result = run("serve", *arguments)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, f"fa-serve: {said}")


@pytest.mark.every_case
@pytest.mark.parametrize("command", ["serve", "warm"])
@pytest.mark.parametrize(
    ("built", "count", "device", "said"),
    [
        (None, 0, "cuda", r"device must be auto or cpu, because PyTorch \S+ has no GPU support: install a build with CUDA"),
        ("13.0", 0, "cuda", r"device must be auto or cpu, because PyTorch finds no GPU: check the driver \(nvidia-smi\) and"),
        ("13.0", 2, "cuda:2", r"device must be cuda, or cuda:N with N below 2, the number of GPUs, got 'cuda:2'"),
    ],
    ids=["build", "driver", "number"],
)
def test_a_gpu_that_is_not_there_is_refused_before_anything_is_loaded(command, built, count, device, said, monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    result = run(command, "--device", device, "--no-process")
    assert result.exit_code == 2
    assert re.search(said, result.stderr)


@pytest.mark.parametrize("command", [("chat", "Hi"), ("chat",), ("bench",)], ids=["question", "conversation", "bench"])
def test_an_address_that_is_none_is_refused(command):
    result = run(*command, "--url", "127.0.0.1:8000")
    assert (result.exit_code, result.stderr) == (2, "fa-serve: --url must begin with http:// or https://, got 127.0.0.1:8000\n")


@pytest.mark.parametrize("command", [("chat", "Hi"), ("bench",), ("bench", "--model", "m")], ids=["chat", "bench", "model"])
def test_without_a_server_the_command_says_how_to_start_one(command):
    result = run(*command, "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    [said] = result.stderr.strip().splitlines()
    assert "http://127.0.0.1:1" in said
    assert said.endswith(": start a server with fa-serve serve, or give the address of one with --url")


def test_a_report_that_has_no_folder_is_refused_before_the_load(tmp_path):
    result = run("bench", "--json", str(tmp_path / "none" / "report.jsonl"))
    assert result.exit_code == 2
    assert "--json must name a file in an existing folder, got " in result.stderr


def test_a_port_that_is_taken_says_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port), "--device", "cpu")
    assert result.exit_code == 1
    said = result.stderr.splitlines()[-1]
    assert said.startswith(f"fa-serve: cannot listen on 127.0.0.1, port {port}: Address already in use")
    assert said.endswith("; choose another --port (0 takes a free one) or --host")


@pytest.mark.parametrize("model", ["./nope", "/nope", "a/b/c", "nope/"])
def test_info_of_a_folder_that_is_not_there(model):
    result = run("info", model)
    assert result.exit_code == 2
    assert (
        result.stderr == f"fa-serve: model must be a hub name, such as Qwen/Qwen3-0.6B, or an existing folder, got {model!r}\n"
    )


def test_an_empty_list_of_keys_is_refused():
    result = run("serve", FA_SERVE_API_KEYS=" , ")
    assert result.exit_code == 2
    assert "api_keys must hold at least one item" in result.stderr


def test_module_and_script_are_the_same():
    for command in ([sys.executable, "-m", "fa_serve"], [str(Path(sys.executable).parent / "fa-serve")]):
        assert "serve" in subprocess.run([*command, "--help"], capture_output=True, text=True, check=True, timeout=60).stdout


def reference():
    """The tables of docs/settings.md, generated from the settings."""
    rows = []
    group = None
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        if extra["group"] != group:
            group = extra["group"]
            rows += ["", f"**{group}**", "", "| flag | default | meaning |", "|---|---|---|"]
        flag = {"model": "`MODEL`"}.get(
            name, f"`--{name.replace('_', '-')}`" if name not in SECRETS else f"`{PREFIX}{name.upper()}`"
        )
        default = f"`{shown_default(name)}`" if shown_default(name) else ""
        rows.append(f"| {flag} | {default} | {table_cell(field.description)} |")
    return "\n".join(rows[1:]) + "\n"


def test_the_documented_settings_are_the_settings():
    """To generate the tables again: FA_SERVE_WRITE_DOCS=1 pytest tests/test_cli.py"""
    check_generated(ROOT / "docs" / "settings.md", "settings", reference())


def test_kernels_are_compiled_as_the_server_would(monkeypatch):
    """`warm` makes the engine of `serve` with everything ahead, in the server's folder of kernels, and ends."""
    seen = []
    monkeypatch.setattr("fa_serve.engine.EngineConfig.require_device", lambda config: None)

    class FakeEngine:
        def __init__(self, config, *, ahead, on_phase):
            seen.append((config.model, config.max_model_len, config.device, ahead))
            on_phase(Phase("kernels", "3 from the cache, 109 compiled", 9.8))

        def close(self):
            seen.append("closed")

    monkeypatch.setattr("fa_serve.engine.Engine", FakeEngine)
    monkeypatch.setattr(
        "fa_serve.launching.compilations.use_kernel_cache", lambda device, _: seen.append(f"the folder of {device}")
    )
    done = run("warm", "some/model", "--device", "cuda:1", "--max-model-len", "4096")
    assert (done.exit_code, done.stdout) == (0, "kernels      9.80 s   3 from the cache, 109 compiled\n")
    assert seen == ["the folder of cuda:1", ("some/model", 4096, "cuda:1", True), "closed"]


def test_several_ranks_have_no_warm_up():
    done = run("warm", "--device", "cuda", "--tensor-parallel", "2")
    assert done.exit_code == 2
    assert "warm supports only --tensor-parallel 1" in done.stderr


def test_a_cpu_needs_no_kernels():
    done = run("warm", "--device", "cpu")
    assert done.exit_code == 2
    assert "nothing is compiled for the device cpu" in done.stderr


@pytest.mark.parametrize(
    ("flags", "driver", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"device": "cpu"}, True, False),
        ({"device": "cuda:1"}, False, True),
        ({"device": "cuda", "process": False}, True, False),
        ({"device": "cpu", "process": True}, False, True),
    ],
    ids=str,
)
def test_the_process_of_an_engine_is_started_where_there_will_be_one(flags, driver, expected, tmp_path, monkeypatch):
    from fa_serve import __main__ as cli

    (tmp_path / "driver").touch()
    monkeypatch.setattr(cli, "GPU_FILES", (str(tmp_path / "other"), str(tmp_path / ("driver" if driver else "none"))))
    monkeypatch.setenv("RANK", "0")
    assert cli._has_process(Settings(**flags)) is expected
    monkeypatch.setenv("RANK", "1")
    assert not cli._has_process(Settings(**flags)), "it follows rank 0"


def test_it_is_started_before_the_server_is_imported(monkeypatch):
    done = []

    def stop(config):
        done.append("configured")
        raise ValueError("stopped")

    monkeypatch.setattr("fa_serve.engine.process.engine_process.start_ahead", lambda: done.append("started"))
    monkeypatch.setattr("fa_serve.engine.parallel.follower_main.follow_if_not_rank_0", stop)
    assert run("serve", "--device", "cpu", "--process").exit_code == 2
    assert run("serve", "--device", "cpu").exit_code == 2
    assert done == ["started", "configured", "configured"]
