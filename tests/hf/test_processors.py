"""What is asked of a processor comes from its own code, whatever its order of work is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_models import picture, save_llava
from image_processors import ProcessorCase
from transformers import AutoProcessor

from fa_serve.hf.processors import (
    WrittenPrompt,
    find_image_text,
    find_image_token,
    load_image_token,
    load_processor,
    own_tokens,
    process_image,
    write_prompt,
)
from fa_serve.spec import ParameterError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    save_llava(path)
    return path


@pytest.fixture
def llava(folder: Path) -> Any:
    return load_processor(str(folder), trust_remote_code=False)


def test_one_image(llava: Any) -> None:
    inputs, text = process_image(llava, picture(1))
    expected = llava(text="<image>", images=[picture(1)], return_tensors="pt")
    assert text == "<image>" * 4
    assert [*inputs] == ["pixel_values"]
    assert torch.equal(inputs["pixel_values"], expected["pixel_values"])
    assert torch.equal(process_image(llava, np.array(picture(1)))[0]["pixel_values"], expected["pixel_values"])


def test_the_processor_itself_is_left_as_it_is(llava: Any) -> None:
    before = dict(vars(llava))
    process_image(llava, picture(1))
    write_prompt(llava, "<image>", ["+"])
    own_tokens(llava, "<image>", [picture(1)])
    assert vars(llava) == before


def test_a_prompt(llava: Any) -> None:
    assert write_prompt(llava, "a <image> b <image>", ["++", "-"]) == WrittenPrompt("a ++ b -", False)
    assert own_tokens(llava, "a<image>", [picture(1)]) == llava(text="a<image>", images=[picture(1)])["input_ids"][0]


def test_what_a_processor_writes_around_a_question() -> None:
    case = ProcessorCase("paligemma")
    written = write_prompt(case.processor, "<image>caption en", ["<image>" * 4])
    assert written == WrittenPrompt("<image>" * 4 + "<image_start>caption en\n", False)


def test_special_tokens_are_added_where_the_processor_has_them_added(llava: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llava.tokenizer, "num_special_tokens_to_add", lambda: 1)
    assert write_prompt(llava, "<image>", ["+"]).special_tokens
    kind = type(llava)
    own = kind._merge_kwargs

    def without(self: Any, *args: Any, **kwargs: Any) -> Any:
        merged = own(self, *args, **kwargs)
        merged["text_kwargs"]["add_special_tokens"] = False
        return merged

    monkeypatch.setattr(kind, "_merge_kwargs", without)
    assert not write_prompt(llava, "<image>", ["+"]).special_tokens


def test_a_processor_that_writes_before_it_sees(llava: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Idefics 2: it expands images without their pixels, and joins neighbours."""

    def call(self: Any, images: Any, text: list[str], return_tensors: Any = None) -> Any:
        written = [each.replace("<image>", "(<image><image>)").replace(")(", "|") for each in text]
        return self.tokenizer(written) | self.image_processor(images, return_tensors=return_tensors)

    monkeypatch.setattr(type(llava), "__call__", call)
    inputs, text = process_image(llava, picture(1))
    assert inputs["pixel_values"].shape == (1, 3, 28, 28)
    assert text == "(<image><image>)"
    assert write_prompt(llava, "<image><image>", [text, text]).text == "(<image><image>|<image><image>)"


def test_a_processor_that_finds_the_text_by_pixels(llava: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Qwen-Omni: what it wrote for each image alone stands in the prompt."""

    def call(self: Any, images: Any, text: list[str], return_tensors: Any = None) -> Any:
        seen = self.image_processor(images, return_tensors=return_tensors)
        count = seen["pixel_values"].shape[-1] // 14
        return self.tokenizer([each.replace("<image>", "<image>" * count) for each in text]) | seen

    monkeypatch.setattr(type(llava), "__call__", call)
    _, text = process_image(llava, picture(1))
    assert text == "<image>" * 2
    assert write_prompt(llava, "a <image> b", [text]).text == "a <image><image> b"


def test_a_processor_without_a_tokenizer(llava: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(llava), "__call__", lambda *_, **__: {})
    with pytest.raises(NotImplementedError, match="LlavaProcessor has not called its tokenizer"):
        write_prompt(llava, "<image>", ["+"])


def test_what_a_chat_template_puts_around_an_image_is_wanted_in_prompts_alone(
    llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As HunYuan-VL checks it."""

    def validate(self: Any, images: Any = None, text: Any = None, **_: Any) -> None:
        if any("[<image>]" not in each for each in text):
            raise ValueError("an image stands in brackets")

    monkeypatch.setattr(type(llava), "validate_inputs", validate)
    assert process_image(llava, picture(1))[1] == "<image>" * 4
    assert len(own_tokens(llava, "<image>", [picture(1)])) == 4
    with pytest.raises(ValueError, match="an image stands in brackets"):
        write_prompt(llava, "<image>", ["+"])
    assert write_prompt(llava, "<image>", ["+"], checked=False).text == "+"
    assert write_prompt(llava, "[<image>]", ["+"]).text == "[+]"


def test_the_text_that_stands_for_an_image(llava: Any, folder: Path) -> None:
    assert find_image_text(llava) == "<image>"
    # its image token stands in expanded prompts, and another text in the place of an image
    qianfan = ProcessorCase("qianfan_ocr").processor
    assert qianfan.image_token == "<IMG_CONTEXT>"
    assert find_image_text(qianfan) == "<image>"
    llava.image_token = None
    with pytest.raises(ParameterError, match="images must be empty, because LlavaProcessor does not expand any text"):
        find_image_text(llava)


def test_a_processor_that_replaces_nothing_is_refused_when_it_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(AutoProcessor.from_pretrained(folder))
    monkeypatch.setattr(kind, "get_text_with_replacements", lambda self, text, *_: (text, []))
    with pytest.raises(ParameterError, match="LlavaProcessor does not expand any text into image tokens"):
        load_processor(str(folder), trust_remote_code=False)


def test_a_processor_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="images must be empty, because the model's processor cannot be loaded"):
        load_processor(str(tmp_path), trust_remote_code=False)


def test_the_token_of_the_model(folder: Path, tmp_path: Path) -> None:
    from tiny_models import make_model

    assert load_image_token(str(folder), trust_remote_code=False) == 296
    model = make_model("llama")
    assert find_image_token(model.config) is None
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ParameterError, match="images must be empty, because the model's config names no image token"):
        load_image_token(str(tmp_path), trust_remote_code=False)
