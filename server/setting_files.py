"""Reads and checks the files that settings name, before anything slow is imported or loaded.

    text = read_file("chat_template", Path("template.jinja"))
    require_setting_files(settings, with_engine=True)    # a ValueError names the setting, the rule and the file

No import here is slow, so a wrong path is reported within a second. Left out: the settings (settings.py), and whether a chat
template writes a conversation, because that takes the model's tokenizer (tokenization.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from fa_serve.named_files import NamedFiles, find_wrong_file


class SettingFiles(NamedFiles, Protocol):
    """The server's settings that name files, in addition to those of the engine. They mean the same as in `Settings`."""

    @property
    def all_keys(self) -> tuple[str, ...]: ...
    @property
    def chat_template(self) -> Path | None: ...
    @property
    def lora_folder(self) -> Path | None: ...


def require_setting_files(settings: SettingFiles, *, with_engine: bool) -> None:
    """Raise ValueError for bad keys, and for a setting whose file or folder is missing or is of the wrong kind.

    with_engine: whether the engine runs on this machine, so that the files it reads must be here as well
    """
    _ = settings.all_keys
    if settings.chat_template is not None:
        _check_template(settings.chat_template)
    if settings.lora_folder is not None and not settings.lora_folder.is_dir():
        raise ValueError(f"lora_folder must be an existing folder, got {settings.lora_folder}")
    if with_engine and (wrong := find_wrong_file(settings)):
        raise ValueError(f"{wrong.field} must {wrong.rule}, got {wrong.value!r}")


def _check_template(file: Path) -> None:
    """Raise ValueError, which names the wrong line, for a file that is not a template."""
    import jinja2.ext

    class Generation(jinja2.ext.Extension):
        """The block {% generation %} around an answer, which transformers adds to Jinja."""

        tags = {"generation"}  # noqa: RUF012 (as its base has it)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    text = read_file("chat_template", file)
    try:
        jinja2.Environment(extensions=[Generation, jinja2.ext.loopcontrols]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        where = f"{file}, line {error.lineno}: {error.message}"
        raise ValueError(f"chat_template must be a valid Jinja template, got {where}") from None


def read_file(name: str, file: Path) -> str:
    """The text of a file that a setting names. Raises ValueError, which names setting and file, if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} must be text in UTF-8, got {file}: {error}") from None
    except OSError as error:
        raise ValueError(f"{name} must be a file that can be read, got {file}: {error.strerror}") from None


def keys_in(file: Path) -> list[str]:
    """The keys of a file, one in each line, without the spaces around them. Only a # that begins a line starts a comment."""
    lines = [line.strip() for line in read_file("api_key_file", file).splitlines()]
    keys = []
    for number, line in enumerate(lines, start=1):
        if line and not line.startswith("#"):
            check_key(line, f"api_key_file: line {number} of {file}")
            keys.append(line)
    if not keys:
        raise ValueError(f"api_key_file must hold at least one key, got none in {file}")
    return keys


def check_key(key: str, where: str) -> None:
    """Refuse a key that no client can send, such as one that is followed by a comment. The message does not show the key."""
    if not key.isprintable() or " " in key:
        raise ValueError(f"{where} must be one word without spaces, got {len(key)} characters; a comment needs a separate line")
