"""The files that settings name: keys exactly as they stand, templates that are read before anything is loaded."""

from pathlib import Path

import pytest
from fa_serve.server.setting_files import keys_in, read_file, require_setting_files
from fa_serve.server.settings import load

TEMPLATE = "{% for message in messages %}{% if loop.first %}{% continue %}{% endif %}{% generation %}{{ message.content }}"


def test_a_chat_template_of_transformers_is_one(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE + "{% endgeneration %}{% endfor %}")
    require_setting_files(load({"chat_template": file}), with_engine=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEMPLATE, "line 1: Unexpected end of template. Jinja was looking for"),
        ("{% for message in messages %}\n{{ message.content }\n{% endfor %}", "line 2: unexpected '}'"),
        ("{% generate %}", "line 1: Encountered unknown tag 'generate'"),
    ],
)
def test_a_broken_chat_template_is_told_before_the_model_is_loaded(tmp_path: Path, text: str, said: str) -> None:
    """Before: when the weights had been loaded."""
    file = tmp_path / "template.jinja"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"^chat_template must be a valid Jinja template, got ") as refused:
        require_setting_files(load({"chat_template": file}), with_engine=False)
    assert f"{file}, {said}" in str(refused.value)


def test_engines_elsewhere_have_their_files_elsewhere(tmp_path: Path) -> None:
    """In a cluster of Ray, what the engines read need not be on the machine of the server."""
    settings = load({"model": "/only/there", "lora": "a=/only/there"})
    require_setting_files(settings, with_engine=False)
    with pytest.raises(ValueError, match=r"model must be a hub name, .*, or an existing folder, got '/only"):
        require_setting_files(settings, with_engine=True)
    with pytest.raises(ValueError, match="lora_folder must be an existing folder, got /only/there"):
        require_setting_files(load({"lora_folder": "/only/there"}), with_engine=False)


def test_keys_are_the_lines_of_their_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n one \n\nk#x\n")
    assert keys_in(file) == ["one", "k#x"]
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="api_key_file must be text in UTF-8"):
        read_file("api_key_file", file)
    with pytest.raises(ValueError, match=r"api_key_file must be a file that can be read, got .*: No such file or directory"):
        require_setting_files(load({"api_key_file": tmp_path / "none"}), with_engine=False)
