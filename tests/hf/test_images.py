"""What the towers make of an image, found by the model's own forward."""

from __future__ import annotations

import pytest
import torch
from every_type import tiny_model
from image_inputs import CHANGES, IMAGE, one_image

from fa_serve import patch
from fa_serve.hf import images
from fa_serve.hf.images import ImageReader
from fa_serve.spec import UnsupportedModelError


@pytest.mark.parametrize(
    ("name", "two_way", "deep"),
    [("llava", "none", 0), ("gemma3", "images", 0), ("paligemma", "prompt", 0), ("qwen3_vl", "none", 2)],
)
def test_what_an_image_comes_to(name: str, two_way: str, deep: int) -> None:
    model = patch(tiny_model(name, CHANGES[name]))
    inputs = one_image(name, model, seed=1)
    features = ImageReader(model).encode(inputs)
    count = inputs["input_ids"].shape[1]
    assert features.embeds.shape == (count, 64)
    assert (features.two_way, len(features.deep)) == (two_way, deep)
    assert features.num_bytes == 4 * 64 * count * (1 + deep)
    other = ImageReader(model).encode(one_image(name, model, seed=2))
    assert (features.embeds - other.embeds).abs().max() > 1e-3, "another picture gives the same embeddings"


def test_embeddings_are_those_of_the_models_own_forward() -> None:
    model = tiny_model("llava", CHANGES["llava"])
    inputs = one_image("llava", model, seed=1)
    expected = model.model.get_image_features(inputs["pixel_values"]).pooler_output
    torch.testing.assert_close(ImageReader(model).encode(inputs).embeds, torch.cat(list(expected)).reshape(-1, 64))


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "idefics3", "gemma3"])
def test_images_are_encoded_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two are encoded alone as well, to prove that they may be joined; from then on, all of them take one forward."""
    model = tiny_model(name, CHANGES[name])
    reader = ImageReader(model)
    given = [one_image(name, model, seed) for seed in range(4)]
    expected = [reader.encode(inputs) for inputs in given]
    sizes: list[int] = []
    run = reader._run
    monkeypatch.setattr(reader, "_run", lambda inputs, counts: sizes.append(len(counts)) or run(inputs, counts))
    for forwards in ([1, 1, 2, 2], [4]):
        sizes.clear()
        found = reader.encode_all(given)
        assert sizes == forwards
        for one, other in zip(found, expected, strict=True):
            assert one.two_way == other.two_way
            for x, y in zip((one.embeds, *one.deep), (other.embeds, *other.deep), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_images_that_cannot_be_joined_are_encoded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llava", CHANGES["llava"])
    given = [one_image("llava", model, seed) for seed in range(3)]
    for fault in (lambda parts: [*reversed(parts)], lambda parts: [parts[0]] * len(parts)):
        reader = ImageReader(model)
        joined = reader._encode_joined
        monkeypatch.setattr(reader, "_encode_joined", lambda images, dim, f=fault, own=joined: f(own(images, dim)))
        for one, inputs in zip(reader.encode_all(given), given, strict=True):
            assert torch.equal(one.embeds, reader.encode(inputs).embeds)
        assert reader._joined_dim == "none"


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_tokens_of_joined_images_stay_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places of images are looked for among them. On a device the host would wait for all that is queued there."""
    model = tiny_model(name, CHANGES[name])
    reader = ImageReader(model)
    given = [one_image(name, model, seed) for seed in range(3)]
    reader.encode_all(given)
    moved: list[torch.Tensor] = []
    copied: list[bool] = []

    def move(x: torch.Tensor) -> torch.Tensor:
        moved.append(x.clone())
        return moved[-1]

    def join(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
        copied.extend(any(x is y for y in moved) == x.is_floating_point() for x in tensors)
        return cat(tensors, dim)

    cat = torch.cat
    with monkeypatch.context() as patch:
        patch.setattr(reader, "_moved", move)
        patch.setattr(images.torch, "cat", join)
        patch.setattr(reader, "_run", lambda inputs, counts: [])
        reader._encode_joined(given, reader._joined_dim)
    assert len(copied) >= 6
    assert all(copied), "pixels are joined on the device, and all else on the host"


def test_positions_of_three_axes() -> None:
    model = tiny_model("qwen2_5_vl", CHANGES["qwen2_5_vl"])
    inputs = one_image("qwen2_5_vl", model, seed=1)
    ids = torch.tensor([5, 6, *[IMAGE] * 4, 7])
    positions, delta = ImageReader(model).positions(ids, [inputs])
    assert positions.tolist() == [[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]]
    assert delta == -2
    llava = tiny_model("llava", CHANGES["llava"])
    assert ImageReader(llava).positions(ids, [one_image("llava", llava, seed=1)]) is None


def test_types_that_are_not_proven_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("chameleon", CHANGES["chameleon"])
    with pytest.raises(UnsupportedModelError, match=r"images of .* \(chameleon\) have not been compared with generate"):
        ImageReader(model)
    monkeypatch.setattr(images, "PROVEN", {"chameleon", "llama"})
    reader = ImageReader(model)
    inputs = {"input_ids": torch.full((1, 4), IMAGE), "pixel_values": torch.zeros(1, 3, 32, 32)}
    with pytest.raises(UnsupportedModelError, match=r"passes \['pixel_values'\] to its language model for an image"):
        reader.encode(inputs)


def test_types_without_prompts_are_refused_with_the_reason() -> None:
    assert images.PROVEN.isdisjoint(images.WITHOUT_PROMPTS)
    with pytest.raises(
        UnsupportedModelError, match=r"images of .* \(shieldgemma2\) are refused, because its processor replaces"
    ):
        ImageReader(tiny_model("shieldgemma2", CHANGES["shieldgemma2"]))


def test_a_model_without_images_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_models import make_model

    monkeypatch.setattr(images, "PROVEN", {"llama"})
    with pytest.raises(UnsupportedModelError, match="its config names no image token"):
        ImageReader(make_model("llama"))
