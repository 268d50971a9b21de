"""Texts and pictures become what the model's own processor makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_models import picture, save_llava
from image_processors import ProcessorCase
from transformers import AutoProcessor

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.images.processed import PixelProcessor, ProcessedImage
from fa_serve.engine.images.processor import PromptMaker, prepare_prompts
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.request.prompts import PromptReader
from fa_serve.hf import processors
from fa_serve.hf.processors import load_processor
from fa_serve.spec import ParameterError

IMAGE = 296
"""The image token of the tiny LLaVA, whose pictures have 4 tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    save_llava(path)
    return path


@pytest.fixture(scope="module")
def maker(folder: Path) -> PromptMaker:
    processor = load_processor(str(folder), trust_remote_code=False)
    return PromptMaker(processor, PromptReader(processor.tokenizer, 352, 256), IMAGE)


@pytest.mark.parametrize("text", ["<image>What?", "one <image> two <image>\n", "<image><image>", "no picture"])
def test_as_the_processor(maker: PromptMaker, folder: Path, text: str) -> None:
    pictures = [picture(seed) for seed in range(text.count("<image>"))]
    expected = AutoProcessor.from_pretrained(folder)(text=text, images=pictures or None, return_tensors="pt")
    made = maker.prompt(text, pictures)
    assert list(made.tokens) == expected["input_ids"][0].tolist()
    for number, image in enumerate(made.images):
        assert image.inputs["input_ids"].tolist() == [[IMAGE] * 4]
        torch.testing.assert_close(image.inputs["pixel_values"], expected["pixel_values"][number : number + 1])


def test_the_key_of_a_picture_does_not_depend_on_the_prompt(maker: PromptMaker) -> None:
    [alone] = maker.prompt("<image>", [picture(1)]).images
    other, again = maker.prompt("x<image>y<image>", [picture(2), picture(1)]).images
    assert alone.key == again.key != other.key


def test_pixels_of_a_file_are_not_hashed(maker: PromptMaker, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the file is enough, together with what the processor does to pixels."""
    processor = load_processor(str(folder), trust_remote_code=False)
    made = PixelProcessor(processor).process(picture(1))
    files = [ProcessedImage(made.inputs, made.text, key) for key in (b"one", b"two")]
    [hashed] = maker.prompt("<image>", [picture(1)]).images
    monkeypatch.setattr(ImageInput, "of", None)
    first, second, again = maker.prompt("<image><image><image>", [*files, files[0]]).images
    assert again is first, "the tokens of an image that is kept are counted once"
    assert first.key != second.key
    assert {len(first.key), len(second.key)} == {16}
    assert sorted(first.inputs) == sorted(hashed.inputs)
    for name, x in hashed.inputs.items():
        torch.testing.assert_close(first.inputs[name], x, rtol=0, atol=0)
    processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    [other] = PromptMaker(processor, PromptReader(processor.tokenizer, 352, 256), IMAGE).prompt("<image>", files[:1]).images
    assert other.key != first.key


def test_plain_text_is_no_place(maker: PromptMaker) -> None:
    text = "<image> is <image>!"
    made = maker.prompt(text, [picture(1)], plain=[(11, 18)])
    assert list(made.tokens).count(IMAGE) == 4
    assert made.tokens[:4] == [IMAGE] * 4
    made = maker.prompt(text, [picture(1)], plain=[(0, 7)])
    assert list(made.tokens).count(IMAGE) == 4
    assert made.tokens[0] != IMAGE


def test_as_many_places_as_pictures(maker: PromptMaker) -> None:
    for text, count in (("<image>", 2), ("text", 1), ("<image><image>", 1)):
        with pytest.raises(ParameterError, match=rf"contain <image> once for each of its {count} images, got"):
            maker.prompt(text, [picture(1)] * count)


def test_a_picture_that_the_processor_refuses(maker: PromptMaker) -> None:
    rule = "images must hold images that the model's processor accepts"
    with pytest.raises(ParameterError, match=rf"{rule} .*, got 'type bytes'$"):
        maker.prompt("<image>", [b"file"])
    with pytest.raises(ParameterError, match=rf"{rule} .*, got 'an array of 2 x 3 x 4 x 5'$"):
        maker.prompt("<image>", [np.zeros((2, 3, 4, 5), dtype=np.uint8)])


def make_llava(folder: Path) -> Any:
    return load_processor(str(folder), trust_remote_code=False)


def test_only_the_token_of_the_model_is_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor counts as its own what begins, ends and divides an image (InternVL, Mistral 3, Cohere 2 Vision)."""
    processor = make_llava(folder)
    kind = type(processor)
    around = processor.tokenizer("<>")["input_ids"]
    monkeypatch.setattr(kind, "image_token_ids", property(lambda self: [*around, IMAGE]))
    own = kind.replace_image_token
    monkeypatch.setattr(kind, "replace_image_token", lambda self, *args, **kwargs: f"<{own(self, *args, **kwargs)}>")
    made = PromptMaker(processor, PromptReader(processor.tokenizer, 352, 256), IMAGE).prompt("a<image>", [picture(1)])
    assert made.images[0].inputs["input_ids"].tolist() == [[IMAGE] * 4]
    assert processor.tokenizer.decode(made.tokens) == "a<" + "<image>" * 4 + ">"


def test_a_processor_with_other_tokens_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = make_llava(folder)
    reader = PromptReader(processor.tokenizer, 352, 256)
    monkeypatch.setattr(processors, "own_tokens", lambda *_: [1, 2, 3])
    told = r"3 tokens for 1 image, but 7 when each image is processed separately"
    with pytest.raises(ParameterError, match=rf"LlavaProcessor cannot be used for one image at a time \({told}\)"):
        PromptMaker(processor, reader, IMAGE)

    def fail(*_: Any) -> None:
        raise ValueError("no chat template")

    monkeypatch.setattr(processors, "own_tokens", fail)
    with pytest.raises(ParameterError, match=r"LlavaProcessor .* \(it raises ValueError: no chat template\)"):
        PromptMaker(processor, reader, IMAGE)


def test_a_processor_that_makes_others_of_two_images_takes_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As LLaVA-OneVision, which cuts tiles of an image that is alone."""
    processor = make_llava(folder)
    kind = type(processor)
    own = kind._process_images

    def process(self: Any, images: Any, **kwargs: Any) -> Any:
        inputs, texts = own(self, images, **kwargs)
        return inputs, texts if len(texts) == 1 else ["<image>" for _ in texts]

    monkeypatch.setattr(kind, "_process_images", process)
    maker = PromptMaker(processor, PromptReader(processor.tokenizer, 352, 256), IMAGE)
    assert len(maker.prompt("<image>", [picture(1)]).tokens) == 4
    rule = "images must hold at most one image, because LlavaProcessor treats several images differently"
    with pytest.raises(ParameterError, match=rule):
        maker.prompt("<image><image>", [picture(1)] * 2)


def test_an_order_of_tokens_that_the_processor_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = make_llava(folder)
    maker = PromptMaker(processor, PromptReader(processor.tokenizer, 352, 256), IMAGE)

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("an image stands in brackets")

    monkeypatch.setattr(type(processor), "validate_inputs", refuse)
    rule = r"prompt must be a text that the model's processor accepts \(ValueError: an image stands in brackets\)"
    with pytest.raises(ParameterError, match=rule):
        maker.prompt("<image>", [picture(1)])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in the processor
def test_plain_text_in_a_prompt_that_the_processor_rewrites() -> None:
    """Its place is found again behind what was written before it, and it keeps its characters."""
    case = ProcessorCase("paligemma")
    text = "<image>see <image> and <image>\u2603"
    names = [(11, 18), (23, 30)]
    assert [text[begin:end] for begin, end in names] == ["<image>"] * 2
    tokens = case.maker.prompt(text, [picture(1)], plain=names).tokens
    assert list(tokens).count(case.image_token) == 4
    assert case.tokenizer.decode(tokens) == "<image>" * 4 + "<image_start>see <image> and <image>\u2603\n"
    with pytest.raises(ParameterError, match="once for each of its 1 images, got '3 of them'"):
        case.maker.prompt(text, [picture(1)])


def test_an_input_without_a_prompt(maker: PromptMaker) -> None:
    [expected] = maker.prompt("<image>", [picture(1)]).images
    assert maker.input_of(np.array(picture(1))).key == expected.key


def test_offline(folder: Path) -> None:
    engine = Engine(EngineConfig(model=folder, device="cpu", num_pages=64, max_model_len=128))
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    text = "Hello <image> and <image> what?"
    given: list[Any] = [[picture(1), picture(2)], []]
    first, second = engine.generate([text, "Hello"], params, images=given)
    processor = AutoProcessor.from_pretrained(folder)
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    for output, prompt, images in ((first, text, given[0]), (second, "Hello", None)):
        inputs = processor(text=prompt, images=images, return_tensors="pt")
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False, eos_token_id=None)
        assert list(output.token_ids) == tokens[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("images", [picture(), [picture()], ["cat.png"], "cat.png"], ids=["image", "flat", "path", "text"])
def test_images_are_a_list_for_each_prompt(maker: PromptMaker, images: Any) -> None:
    """Before: "object of type 'Image' has no len()", and the characters of a path were images."""
    with pytest.raises(ParameterError, match="images must be a list with a list of images for each prompt"):
        prepare_prompts(["<image>"], images, EngineConfig(device="cpu"), maker._reader)
