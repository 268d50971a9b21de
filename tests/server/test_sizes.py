"""Sizes in bytes as people write them. pydantic would read 16mbit as 2 MB, and ignore what stands behind a unit."""

import pytest
from fa_serve.server.settings import Settings, load
from fa_serve.server.sizes import Size, is_size, shown_size
from pydantic import BaseModel, ValidationError


class Limits(BaseModel):
    body: Size = 0
    more: Size | None = None
    count: int = 0


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("16_384", 16384),
        ("12b", 12),
        ("16MiB", 16 << 20),
        (" 16 mib ", 16 << 20),
        ("1.5GiB", 3 << 29),
        ("16MB", 16_000_000),
        ("16M", 16_000_000),
        ("16Mi", 16 << 20),
        ("2k", 2000),
        (77, 77),
    ],
)
def test_bytes_are_read(text, size):
    assert Limits(body=text, more=text).model_dump() == {"body": size, "more": size, "count": 0}


@pytest.mark.parametrize(
    "text",
    [
        "16mbit",
        "16 Mibit",
        "1bit",
        "16MiB/s",
        "16MiB 3",
        "16MiB-1",
        "1.5",
        "1.5b",
        ".5GiB",
        "-1",
        "1e9",
        "",
        "MiB",
        "1.5.5GiB",
        "٣MiB",
    ],
)
def test_what_is_no_number_of_bytes_is_refused(text, monkeypatch):
    for name in ("body", "more"):
        with pytest.raises(ValidationError):
            Limits(**{name: text})
    for name in ("max_body_bytes", "lora_bytes"):
        with pytest.raises(ValueError, match=f"^{name} must be a number of bytes, or a size such as 16MiB, got "):
            load({name: text})
    if text:
        monkeypatch.setenv("FA_SERVE_LORA_BYTES", text)
        with pytest.raises(ValueError, match="lora_bytes must be a number of bytes, or a size such as 16MiB"):
            load({})


def test_a_switch_is_no_size():
    with pytest.raises(ValidationError):
        Limits(body=True)


def test_fields_of_sizes_are_told_from_others():
    assert [is_size(field.annotation) for field in Limits.model_fields.values()] == [True, True, False]
    assert sum(is_size(field.annotation) for field in Settings.model_fields.values()) > 10


def test_a_size_is_shown_with_its_largest_unit():
    assert [shown_size(size) for size in (16 << 20, 1536 << 20, 8192, 5, 3 << 30)] == ["16MiB", "1536MiB", "8KiB", "5B", "3GiB"]
