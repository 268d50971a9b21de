"""Folders of tiny models that see images, with tokenizers and processors, made without a download.

folder = save_llava(tmp_path)
engine = Engine(EngineConfig(model=folder, device="cpu"))
image = picture(seed=1)
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from every_type import tiny_model
from PIL import Image
from tiny_models import make_tokenizer
from transformers import LlavaProcessor, PreTrainedModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

IMAGE_TEXT = "<image>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def save_llava(folder: Path, vocab: int = 352) -> PreTrainedModel:
    """Write model, tokenizer, processor and chat template of a LLaVA whose pictures have 28 x 28 pixels and 4 tokens."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TEXT]})
    token = tokenizer.convert_tokens_to_ids(IMAGE_TEXT)
    tokenizer.chat_template = TEMPLATE
    size = {"height": 28, "width": 28}
    images = CLIPImageProcessorPil(size=size, crop_size=size)
    options = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = LlavaProcessor(images, tokenizer, **options)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = tiny_model("llava", {"image_token_index": token, "text_config": {"vocab_size": vocab}})
    model.save_pretrained(folder)
    return model


def picture(seed: int = 0, width: int = 40, height: int = 32) -> Image.Image:
    """A picture of random colours."""
    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def png(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The file of a picture."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()
