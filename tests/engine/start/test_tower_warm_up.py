"""A start computes pictures of all sizes, so that no picture of a request needs a kernel that was not met."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_launches import CountedLaunches, counted_launches
from every_type import tiny_model
from image_inputs import CHANGES, IMAGE, one_image
from image_models import picture, save_llava
from sampled_cases import examples
from tower_pictures import processes

from fa_serve.backends.hopper.forward.tiles import hopper_forward_tiles
from fa_serve.backends.triton.tiles import forward_tiles
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.start import start_up, tower_warm_up
from fa_serve.engine.start.tower_warm_up import SIDES, find_process, tower_calls
from fa_serve.engine.start.warm_up import powers_of_two
from fa_serve.hf.images import ImageReader
from fa_serve.launching.compilations import Compilers, run_compiled
from fa_serve.launching.launch import NotCompiledError
from fa_serve.spec import ParameterError

LIMITS = {"num_pages": 256, "page_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 192, "max_model_len": 128}
BOTH_KINDS = {"fullatt_block_indexes": [1]}
"""One layer of the tower attends in windows, and one to the whole picture."""
SHORT = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


def make(name: str) -> Engine:
    changes = CHANGES[name] | ({"vision_config": BOTH_KINDS} if name == "qwen2_5_vl" else {})
    engine = Engine(EngineConfig(device="cpu", **LIMITS), model=tiny_model(name, changes).to(torch.bfloat16))
    # kernels are counted and compute nothing, so how pictures are joined is found out before
    process = processes(name)
    engine._runner.images.reader.encode_all([process(picture(seed)) for seed in (1, 2)])
    assert engine._runner.images.reader._joined_dim == 0
    return engine


def serve(engine: Engine, name: str, rounds: int = 12) -> Iterator[None]:
    """Random pictures in random prompts, alone and beside others, some of them cached. Yields after each round."""
    draw = random.Random(1)
    process = processes(name)
    reader = engine._runner.images.reader
    apart = int(name.startswith("qwen"))  # its processor puts tokens around each picture
    for _ in range(rounds):
        prompts = []
        images = []
        for _ in range(draw.choice((1, 3, 10))):
            tokens = [draw.randrange(1, 140) for _ in range(draw.randint(1, 20))]
            own = []
            for _ in range(draw.randint(0, 3)):
                width, height = (int(8 * 50 ** draw.random()) for _ in range(2))
                image = ImageInput.of(process(picture(draw.randrange(9), width, height)))
                count = reader.num_tokens(image.inputs)
                if len(tokens) + count < 110:
                    own.append(image)
                    tokens += [IMAGE] * count + [draw.randrange(1, 140) for _ in range(draw.randint(apart, 5))]
            prompts.append(tokens)
            images.append(own)
        engine.generate(prompts, SHORT, images=images)
        if draw.random() < 0.3:
            engine._runner.images.forget()
        yield
    assert engine._runner.images.num_encoded > 40


def late(engine: Engine, name: str, counted: CountedLaunches, process: Any = None, needed: str = "a name of none") -> list[str]:
    """The kernels that pictures need after the warm-up, up to one whose name begins with `needed`."""
    start_up.warm_up(engine._runner, engine.config, 128, Compilers(), process=process)
    compiled = len(counted.kernels)
    for _ in serve(engine, name):
        if any(kernel.startswith(needed) for kernel in counted.kernels[compiled:]):
            break
    return counted.kernels[compiled:]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm90", "sm80"])
@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl"])
def test_no_picture_needs_a_kernel_that_the_warm_up_leaves_out(name: str, target: str, caplog) -> None:
    if target == "sm80" and name == "llava":
        pytest.skip("its towers launch what those of Gemma 3 launch")
    engine = make(name)
    with counted_launches(target) as counted:
        assert late(engine, name, counted, processes(name)) == []
    assert "the warm-up failed" not in caplog.text


def without_blocks(patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(start_up, "two_way_steps", lambda *_: [])
    return processes("gemma3")


LACKS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], Any]]] = {
    "no-pictures": ("llava", lambda patch: None),
    "no-blocks": ("gemma3", without_blocks),
    "no-pictures-in-windows": ("qwen2_5_vl", lambda patch: None),
}


@pytest.mark.parametrize("lack", LACKS)
def test_a_lack_of_the_warm_up_is_seen(lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = LACKS[lack]
    engine = make(name)
    with counted_launches() as counted:
        found = late(engine, name, counted, plant(monkeypatch), needed="attn_fwd")
    assert any(kernel.startswith("attn_fwd") for kernel in found)


@pytest.mark.slow
@pytest.mark.parametrize(("sides", "is_complete"), [(SIDES, True), ((16, 100), False), ((700, 1024), False)])
def test_pictures_of_all_sizes_are_needed(sides: tuple[int, int], is_complete: bool, monkeypatch) -> None:
    """Heads of 80 numbers, as the towers of Qwen2.5-VL have: tiles differ by the number of patches, up to some thousand."""
    monkeypatch.setattr(tower_warm_up, "SIDES", sides)
    monkeypatch.setattr(tower_warm_up, "MAX_IMAGE_TOKENS", 1024)  # more than the largest picture has
    tower = {"hidden_size": 80, "num_heads": 1, **BOTH_KINDS}
    model = tiny_model("qwen2_5_vl", CHANGES["qwen2_5_vl"] | {"vision_config": tower})
    reader = Engine(EngineConfig(device="cpu", num_pages=8), model=model.to(torch.bfloat16))._runner.images.reader
    process = processes("qwen2_5_vl", (28 * 28, 700 * 700))
    reader.encode_all([process(picture(seed)) for seed in (1, 2)])
    draw = random.Random(2)
    with counted_launches() as counted:
        for call in tower_calls(reader, process, 4096):
            reader.encode_all(call)
        met = len(counted.kernels)
        for _ in range(examples(36)):
            sizes = [[int(16 * 45 ** draw.random()) for _ in range(2)] for _ in range(draw.choice((1, 1, 3)))]
            reader.encode_all([process(picture(1, *size)) for size in sizes])
            if not is_complete and counted.kernels[met:]:
                break
        assert (counted.kernels[met:] == []) == is_complete


@pytest.mark.parametrize("dim", [64, 72, 80, 88, 96, 128])
def test_attention_to_more_patches_has_no_other_tiles(dim: int) -> None:
    most = (SIDES[1] // 16) ** 2

    def tiles(patches: int, packed: bool) -> object:
        hopper = hopper_forward_tiles(dim, dim, (-1, -1), patches, patches, packed)
        return hopper, forward_tiles(80, 2, dim, dim, patches, patches, causal=False, paged=False, masked=False)

    for packed in (False, True):
        assert len({tiles(patches, packed) for patches in range(most, 1 << 17, 509)}) == 1
        assert len({tiles(patches, packed) for patches in range(1, most, 7)}) > 1


@pytest.mark.slow
def test_blocks_stand_behind_any_number_of_keys() -> None:
    engine = make("gemma3")
    seen: list[tuple[int, int]] = []
    forward = engine._runner._forward

    def check(inputs: Any) -> Any:
        seen.extend((each.last - each.first, each.end) for each in inputs.paged.blocks)
        assert all(each.end <= inputs.paged.block_table.shape[1] * 16 for each in inputs.paged.blocks)
        return forward(inputs)

    engine._runner._forward = check
    start_up.warm_up(engine._runner, engine.config, 128, Compilers(), process=processes("gemma3"))
    assert set(seen) == {(count, end) for count in powers_of_two(128) for end in powers_of_two(128) if end >= count}


def test_pictures_grow_up_to_what_the_processor_and_a_prompt_allow() -> None:
    reader = ImageReader(tiny_model("qwen2_5_vl", CHANGES["qwen2_5_vl"]))
    calls = [*tower_calls(reader, processes("qwen2_5_vl"), 128)]
    alone = [reader.num_tokens(call[0]) for call in calls if len(call) == 1]
    assert alone == sorted(alone)
    assert (alone[0], alone[-1]) == (1, 81)
    assert all(second <= 3 * first for first, second in pairwise(alone))
    assert [len(call) for call in calls if len(call) > 1] == [2, 3, 4096]
    assert max(reader.num_tokens(call[0]) for call in tower_calls(reader, processes("qwen2_5_vl"), 30)) <= 30
    assert [*tower_calls(reader, processes("qwen2_5_vl"), 0)] == []
    fixed = [*tower_calls(ImageReader(tiny_model("llava", CHANGES["llava"])), processes("llava"), 128)]
    assert [len(call) for call in fixed] == [1, 2, 3, 1024], "all pictures have one size"


def test_a_picture_that_the_processor_refuses_is_left_out() -> None:
    reader = ImageReader(tiny_model("llava", CHANGES["llava"]))
    process = processes("llava")

    def refuse(image: Any) -> Any:
        if image.shape[1] != 512:
            raise ParameterError("images", "be 512 pixels wide", image.shape[1])
        return process(image)

    assert len(next(tower_calls(reader, refuse, 128))) == 1


def test_the_process_is_that_of_the_models_folder(tmp_path: Path, caplog) -> None:
    save_llava(tmp_path)
    process = find_process(EngineConfig(model=tmp_path, device="cpu"), 352, 128)
    assert process is not None
    assert process(picture())["pixel_values"].shape == (1, 3, 28, 28)
    (tmp_path / "processor_config.json").unlink()
    with caplog.at_level("INFO", "fa_serve.engine"):
        assert find_process(EngineConfig(model=tmp_path, device="cpu"), 352, 128) is None
        assert find_process(EngineConfig(device="cpu"), 352, 128) is None
    assert caplog.text.count("no warm-up image could be made") == 2


def test_how_images_are_joined_is_found_out_once_the_kernels_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then no forward comes to its end, which must not look as if the model refused to take images together."""
    model = tiny_model("llava", CHANGES["llava"])
    reader = ImageReader(model)
    images = [one_image("llava", model, seed) for seed in (1, 2)]
    missing: Future[str] = Future()
    own = reader._encode_joined

    def encode_joined(*arguments: Any) -> Any:
        if not missing.done():
            missing.set_result("compiled")
            raise NotCompiledError(missing)
        return own(*arguments)

    monkeypatch.setattr(reader, "_encode_joined", encode_joined)
    assert run_compiled([lambda: reader.encode_all(images)], Compilers()) == []
    assert reader._joined_dim == 0
