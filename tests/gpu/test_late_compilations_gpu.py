"""After a start ahead, no request waits for a compiler, whatever it asks for; nor for PyTorch to load its kernels."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_folders import LETTERS, save_encoder
from every_type import tiny_model
from image_inputs import CHANGES, IMAGE
from image_models import picture
from random_params import random_requests
from tiny_models import SIZES, make_tokenizer
from tower_pictures import processes
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from fa_serve.engine import Encoder, Engine, EngineConfig, SamplingParams
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.start import start_up


def make_model(vocab_size: int) -> PreTrainedModel:
    sizes = {"head_dim": 64, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": vocab_size}
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | sizes | {"max_position_embeddings": 4096})
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def make_engine(vocab_size: int = 512, **settings: Any) -> Engine:
    model = make_model(vocab_size).to("cuda")
    config = {"num_pages": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 1024, "device": "cuda", "seed": 0}
    return Engine(EngineConfig(**config | settings), model=model, tokenizer=make_tokenizer(), ahead=True)


def serve(engine: Engine, adapters: tuple[str | None, ...] = (None,)) -> None:
    """Random requests, some of them alone, and some in batches that do not hold all of them."""
    draw = random.Random(3)
    for _ in range(16):
        prompts, params = random_requests(draw, (1, 3, 40), vocab=320, longest=1024)
        engine.generate(prompts, params, adapter=[draw.choice(adapters) for _ in params])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"deterministic": True}, id="deterministic"),
        pytest.param({"deterministic": True, "speculative": "ngram"}, id="deterministic-ngram"),
        pytest.param({"speculative": "ngram"}, id="ngram"),
        pytest.param({"target_itl": None}, id="chunks"),
        pytest.param({"logprobs_mode": "processed_logprobs"}, id="processed"),
        pytest.param({"kv_cache_dtype": "fp8"}, id="float8-cache"),
        pytest.param({"cascade_attention": True}, id="cascades"),
        pytest.param({"eager": True}, id="eager"),
    ],
)
def test_no_combination_of_parameters_is_compiled_for_a_request(settings: dict[str, Any]) -> None:
    engine = make_engine(**settings)
    before = engine.preparations()
    assert before[0] > 20, "kernels were compiled or loaded"
    serve(engine)
    assert engine.preparations()[0] == before[0]
    assert "speculative" not in settings or engine.stats().speculation.num_draft_tokens > 0


def test_no_adapter_is_compiled_for_a_request(tmp_path: Path) -> None:
    peft_adapters = pytest.importorskip("peft_adapters", exc_type=ImportError)  # the GPU suite may run without peft
    engine = make_engine(lora_bytes=1 << 28, max_lora_rank=32)
    before = engine.preparations()
    for name, rank in (("small", 2), ("two-pages", 20)):
        folder = peft_adapters.save_adapter(tmp_path / name, model=make_model(512), r=rank)
        engine.load_adapter(name, folder)
    serve(engine, (None, "small", "two-pages"))
    assert engine.preparations()[0] == before[0]


def test_the_first_sampled_batch_takes_no_longer_than_the_second() -> None:
    """PyTorch loads each of its kernels when it is first launched, and memory is asked of the driver once."""
    engine = make_engine(vocab_size=128_256)
    warm = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = [[7 + index] * 40 for index in range(64)]
    engine.generate(prompts, warm)  # captures what the offline engine captures on its way
    engine.generate(prompts, warm)
    params = SamplingParams(max_tokens=8, top_p=0.9, top_k=50, frequency_penalty=0.5, logprobs=5, ignore_eos=True)
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.generate(prompts, params)
        seconds.append(time.perf_counter() - begin)
    assert seconds[0] < 1.5 * min(seconds[1:]) + 0.02, f"seconds of each run: {seconds}"


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_no_text_of_an_encoder_is_compiled_for(tmp_path: Path, family: str) -> None:
    sizes = {"max_position_embeddings": 2050, "hidden_size": 256}
    told = {"max_seq_length": 2048, "do_lower_case": False}
    path = save_encoder(tmp_path, family, transformer=told, **sizes)
    encoder = Encoder(EngineConfig(model=path, device="cuda", dtype="bfloat16", max_num_batched_tokens=4096), ahead=True)
    before = encoder.preparations()
    assert before[0] > 4
    draw = random.Random(0)
    for _ in range(20):
        lengths = [int(2000 ** draw.random()) for _ in range(draw.choice((1, 3, 20)))]
        encoder.encode([" ".join(draw.choices(LETTERS, k=length)) for length in lengths])
    assert encoder.preparations() == before


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl"])
def test_no_picture_is_compiled_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    towers = {"vision_config": {"hidden_size": 160, "num_heads": 2, "fullatt_block_indexes": [1]}} if "qwen" in name else {}
    model = tiny_model(name, CHANGES[name] | towers).to("cuda", torch.bfloat16)
    process = processes(name, (28 * 28, 1400 * 1400))
    monkeypatch.setattr(start_up, "find_process", lambda *_: process)
    limits = {"num_pages": 1024, "page_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 4096, "max_model_len": 480}
    begin = time.perf_counter()
    engine = Engine(EngineConfig(device="cuda", **limits), model=model, ahead=True)
    print(f"{name}: started in {time.perf_counter() - begin:.1f} s")
    before = engine.preparations()[0]
    reader = engine._runner.images.reader
    draw = random.Random(1)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for _ in range(20):
        prompts = []
        images = []
        for _ in range(draw.choice((1, 3, 20))):
            tokens = [draw.randrange(1, 140) for _ in range(draw.randint(1, 40))]
            own = []
            for _ in range(draw.randint(0, 4)):
                image = ImageInput.of(process(picture(draw.randrange(9), *(int(8 * 120 ** draw.random()) for _ in range(2)))))
                if len(tokens) + reader.num_tokens(image.inputs) < 440:
                    own.append(image)
                    tokens += [IMAGE] * reader.num_tokens(image.inputs) + [7]
            prompts.append(tokens)
            images.append(own)
        engine.generate(prompts, params, images=images)
    assert engine._runner.images.num_encoded > 40
    assert engine.preparations()[0] == before
