"""The engine on a GPU: exact tokens while the host works one step ahead, memory for the largest step, a long run."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_heads import copying_head, quiet_model, save_head
from tiny_models import CONFIGS, SIZES, greedy, make_model, make_tokenizer, random_prompts
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.soak.long_run import long_run
from fa_serve.engine import Completion, Engine, EngineConfig, SamplingParams, StructuredOutput
from fa_serve.hf.surgery.fuse.router import FusedRouter

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
pytestmark = pytest.mark.usefixtures("full_float32")
FLOAT8 = pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU that multiplies float8")


def make_engine(family: str = "llama", **settings: Any) -> Engine:
    config = EngineConfig(**{"device": "cuda", "num_pages": 512, "max_num_seqs": 16, "seed": 0} | settings)
    return Engine(config, model=make_model(family).to("cuda"), tokenizer=make_tokenizer())


def captured_prompts(engine: Engine) -> list[Any]:
    graphs = engine._runner._graphs
    assert graphs is not None
    return [shape for shape in graphs._replays if shape.kind == "prompts"]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_prompts_beside_decoding_sequences_by_graph_give_what_eager_steps_give(head_dim: int) -> None:
    """16-bit kernels: the log-probability of the most likely next token of each prompt, with graphs and without."""
    sizes = {"head_dim": head_dim, "hidden_size": 256, "vocab_size": 512, "initializer_range": 0.06, "num_attention_heads": 8}
    draw = random.Random(0)
    asked = [[draw.randrange(5, 512) for _ in range(draw.randint(1, 400))] for _ in range(160)]
    params = [SamplingParams(max_tokens=draw.randint(1, 12), temperature=0.0, ignore_eos=True, logprobs=0) for _ in asked]
    seen = []
    for eager in (False, True):
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES | sizes | {"max_position_embeddings": 1024})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
        settings = {"num_pages": 4096, "max_num_seqs": 32, "max_num_batched_tokens": 512}
        engine = Engine(EngineConfig(device="cuda", seed=0, **settings), model=model)
        assert engine._runner._graphs is not None
        engine._runner._graphs._prompts &= not eager
        completions = engine.generate(asked, params)
        seen.append(torch.tensor([c.logprobs[0].logprob for c in completions if c.logprobs]))
        assert eager != (len(captured_prompts(engine)) > 1)
    assert len(seen[0]) == 160
    assert seen[1].std() > 0.1, "prompts have different log-probabilities"
    torch.testing.assert_close(seen[0], seen[1], atol=0.06, rtol=0.0)


def test_a_closed_engine_makes_room_for_the_next() -> None:
    engine = make_engine(num_pages=20_000)
    engine.generate(random_prompts(4, 40), GREEDY)
    held = torch.cuda.memory_allocated()
    engine.close()
    assert held - torch.cuda.memory_allocated() >= 20_000 * engine._runner.bytes_per_page > 2**20


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="graphs"),
        pytest.param({"eager": True}, id="eager"),
        pytest.param({"fusion": False}, id="unfused"),
        pytest.param({"deterministic": True}, id="deterministic"),
        pytest.param({"prefix_caching": False}, id="no prefix cache"),
        pytest.param({"max_num_batched_tokens": 27}, id="chunked"),
        pytest.param({"num_pages": 16, "max_model_len": 128}, id="preempted"),
    ],
)
def test_greedy_tokens_are_those_of_generate(family: str, settings: dict[str, Any]) -> None:
    asked = random_prompts(24, 60)
    engine = make_engine(family, **settings)
    # the models name no end token: the engine then takes the tokenizer's, and `model.generate` takes none
    completions = engine.generate(asked, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    reference = make_model(family).to("cuda")
    assert [c.token_ids for c in completions] == [greedy(reference, prompt, 24) for prompt in asked]
    if "num_pages" in settings:
        assert engine.stats().num_preemptions > 0
    if "max_num_batched_tokens" in settings:
        assert captured_prompts(engine), "the same shape comes again and again"
    engine.check_integrity()
    assert engine.stats().num_pages_used == 0


def test_a_seed_gives_the_same_answer_alone_and_in_a_batch() -> None:
    params = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, top_k=50, seed=7)
    prompt, *others = random_prompts(12, 60)
    alone = make_engine().generate([prompt], params)[0].token_ids
    mixed = make_engine().generate([*others, prompt], [SamplingParams(max_tokens=30)] * 11 + [params])
    assert mixed[-1].token_ids == alone


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_answers_are_bitwise_the_same_alone_and_in_any_batch(dtype: str) -> None:
    """Among 64 others, in chunks, preempted, taken from the prefix cache; with graphs and without."""

    def bits(completion: Completion) -> Any:
        assert completion.logprobs is not None
        prompt = [entry and (entry.logprob, entry.top) for entry in completion.prompt_logprobs or []]
        return completion.token_ids, [(x.logprob, x.top) for x in completion.logprobs], prompt

    def engine(**settings: Any) -> Engine:
        return Engine(EngineConfig(**{"dtype": dtype, "deterministic": True, "num_pages": 1024, "max_num_seqs": 65} | settings))

    prompt, *others = random_prompts(65, 200, seed=3)
    prompt = (prompt * 20)[:300]
    asked = [
        SamplingParams(max_tokens=40, temperature=0.0, logprobs=3, prompt_logprobs=1),
        SamplingParams(max_tokens=40, seed=7, top_p=0.9, top_k=50, logprobs=0),
    ]
    crowd = [SamplingParams(max_tokens=60, seed=i, ignore_eos=True) for i in range(64)]
    alone = [bits(engine().generate([prompt], params)[0]) for params in asked]
    for settings in ({}, {"eager": True}, {"max_num_batched_tokens": 100}, {"num_pages": 260, "max_model_len": 1024}):
        running = engine(**settings)
        completions = running.generate([prompt, *others, prompt], [asked[0], *crowd, asked[1]])
        assert [bits(completions[0]), bits(completions[-1])] == alone, settings
        assert [bits(c) for c in running.generate([prompt, prompt], asked)] == alone, settings
        assert running.stats().num_preemptions > 0 or settings.get("num_pages") != 260


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_deterministic_mixtures_are_bitwise_the_same_alone_and_in_a_batch(family: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=2)
    prompt, *others = random_prompts(24, 60)
    alone = make_engine(family, deterministic=True).generate([prompt], params)[0]
    mixed = make_engine(family, deterministic=True, max_num_batched_tokens=40).generate([*others, prompt], params)[-1]
    assert mixed.token_ids == alone.token_ids
    assert [(x.logprob, x.top) for x in mixed.logprobs or []] == [(x.logprob, x.top) for x in alone.logprobs or []]


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_mixtures_decode_in_graphs_with_our_experts(family: str) -> None:
    engine = make_engine(family)
    assert engine._runner.model.config._experts_implementation == "fa_serve"
    assert engine._runner._graphs is not None
    routers = [vars(m).get("forward") for m in engine._runner.model.modules()]
    assert len([r for r in routers if isinstance(r, FusedRouter)]) == 2


def test_one_step_ahead_gives_each_token_once() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], GREEDY)
    assert engine.step() == [], "the first step is still running while the second is queued"
    counts = []
    while engine.has_unfinished():
        counts += [len(output.token_ids) for output in engine.step()]
    assert counts == [1] * 24


def test_the_cache_takes_what_is_left_of_the_share() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = 1 - free / total + 0.05
    engine = make_engine(num_pages=None, gpu_memory_utilization=share)
    used = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
    assert engine.config.num_pages > 1000
    assert used == pytest.approx(total * share, rel=0.05)
    assert len(engine.generate(random_prompts(32, 60), GREEDY)) == 32
    with pytest.raises(ValueError, match="must leave room for a KV cache"):
        make_engine(num_pages=None, gpu_memory_utilization=0.001)


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"frequency_penalty": 0.3, "top_p": 0.9},
    {"temperature": 0.0, "presence_penalty": 0.2, "logprobs": 3},
    {"logit_bias": {7: 2.0}},
    {"allowed_token_ids": (5, 6, 7)},
    {"prompt_logprobs": 2},
    {"structured": StructuredOutput(regex="[a-f]{3,9}")},
]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="graphs"),
        pytest.param({"eager": True}, id="eager"),
        pytest.param({"fusion": False}, id="unfused"),
        pytest.param({"deterministic": True}, id="deterministic"),
        pytest.param({"kv_cache_dtype": "fp8"}, id="fp8"),
        pytest.param({"attention_precision": "fp8"}, id="float8-products", marks=FLOAT8),
        pytest.param({"attention_precision": "qk8", "kv_cache_dtype": "fp8"}, id="float8-products-fp8", marks=FLOAT8),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_after_a_start_ahead_no_request_waits_for_a_compiler_or_a_capture(head_dim: int, settings: dict[str, Any]) -> None:
    """Prompts of all lengths beside decoding sequences, cached prefixes, chunks, and every parameter of sampling."""
    sizes = {"head_dim": head_dim, "hidden_size": 256, "num_attention_heads": 8, "max_position_embeddings": 4096}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | sizes), dtype=torch.bfloat16).to("cuda")
    config = {"num_pages": 4096, "max_num_seqs": 48, "max_num_batched_tokens": 1024, "device": "cuda", "seed": 0}
    engine = Engine(EngineConfig(**config | settings), model=model, tokenizer=make_tokenizer(), ahead=True)
    before = engine.preparations()
    assert before[0] > 20, "kernels were compiled or loaded"
    draw = random.Random(0)
    shared = [draw.randrange(5, 320) for _ in range(1500)]
    asked = []
    for index in range(150):
        length = int(2 ** draw.uniform(0, 11))
        own = [draw.randrange(5, 320) for _ in range(length)]
        asked.append(shared[: 16 * draw.randrange(90)] + own[:20] if index % 3 == 0 else own)
    params = [SamplingParams(max_tokens=draw.randint(1, 40), ignore_eos=True, **draw.choice(MIXED)) for _ in asked]
    completions = engine.generate(asked, params)
    assert {c.finish_reason for c in completions} <= {"length", "stop"}
    assert engine.preparations() == before
    for prompt, one in zip(asked[:20], params, strict=False):  # alone, in small batches
        engine.generate([prompt], one)
    assert engine.preparations() == before


@pytest.mark.timeout(600)
def test_a_long_run_loses_no_request_no_page_and_no_memory() -> None:
    engine = make_engine(num_pages=64, max_model_len=256, max_num_batched_tokens=96, max_num_seqs=32)
    report = long_run(engine, 2000, alive=40, longest=120)
    assert set(report["answers"]) >= {"length", "abort"}
    assert report["preemptions"] > 0


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"eager": True}], ids=["graphs", "deterministic", "eager"])
def test_speculation_changes_no_answer(family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are the tokens of an engine without speculation, one in five replaced; one step ahead, by graphs."""
    asked = random_prompts(8, 60)
    draw = random.Random(0)
    for params in (
        GREEDY,
        SamplingParams(max_tokens=24, temperature=0.8, seed=3, top_p=0.9, frequency_penalty=0.3, logprobs=0),
    ):
        expected = make_engine(family, **settings).generate(asked, params)
        answers = {tuple(prompt): [*prompt, *x.token_ids] for prompt, x in zip(asked, expected, strict=True)}

        def propose(_: Any, sequence: Any, count: int, answers: Any = answers) -> list[int]:
            rest = answers[tuple(sequence.request.prompt)][len(sequence.tokens) :][:count]
            return [token if draw.random() < 0.8 else (token + 1) % 320 for token in rest]

        monkeypatch.setattr("fa_serve.engine.speculation.drafts.NgramDrafter.propose", propose)
        engine = make_engine(family, speculative="ngram", **settings)
        found = engine.generate(asked, params)
        assert [x.token_ids for x in found] == [x.token_ids for x in expected]
        if "deterministic" in settings:
            assert found == expected
        assert engine.stats().speculation.num_accepted_tokens > 50
        graphs = engine._runner._graphs
        assert settings or (graphs is not None and any(shape.kind == "drafts" for shape in graphs._replays))
        engine.check_integrity()


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"eager": True}], ids=["graphs", "deterministic", "eager"])
def test_a_draft_model_changes_no_answer(settings: dict[str, Any], tmp_path: Path) -> None:
    """The draft model is the model with noise on its weights, and then the model itself, whose drafts are right."""
    asked = random_prompts(8, 60)
    for noise in (0.1, 0.0):
        draft = make_model()
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in draft.parameters():
                weight += noise * weight.std() * torch.randn_like(weight)
        draft.save_pretrained(tmp_path)
        make_tokenizer().save_pretrained(tmp_path)
        for params in (GREEDY, SamplingParams(max_tokens=24, temperature=0.8, seed=3, top_p=0.9)):
            expected = make_engine(**settings).generate(asked, params)
            engine = make_engine(speculative=f"draft={tmp_path}", **settings)
            found = engine.generate(asked, params)
            assert [x.token_ids for x in found] == [x.token_ids for x in expected]
            if "deterministic" in settings:
                assert found == expected
            counted = engine.stats().speculation
            assert counted.num_accepted_tokens > (0 if noise else 0.9 * counted.num_draft_tokens)
            engine.check_integrity()


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"eager": True}], ids=["graphs", "deterministic", "eager"])
def test_a_head_changes_no_answer(settings: dict[str, Any], tmp_path: Path) -> None:
    """An EAGLE-3 head that is right sometimes, by the model's hidden states, and then one that is right always."""
    asked = random_prompts(8, 60)
    for loudness in (0.005, 0.0):
        tensors = copying_head(quiet_model(), 20 * loudness)
        head = save_head(tmp_path, tensors)
        for params in (GREEDY, SamplingParams(max_tokens=24, temperature=0.8, seed=3, top_p=0.9)):
            engines = []
            for speculative in (None, head):
                config = EngineConfig(
                    device="cuda", num_pages=512, max_num_seqs=16, seed=0, speculative=speculative, **settings
                )
                engines.append(Engine(config, model=quiet_model(loudness=loudness).to("cuda"), tokenizer=make_tokenizer()))
            expected, found = (engine.generate(asked, params) for engine in engines)
            assert [x.token_ids for x in found] == [x.token_ids for x in expected]
            if "deterministic" in settings:
                assert found == expected
            counted = engines[1].stats().speculation
            assert counted.num_accepted_tokens > (0 if loudness else 0.9 * counted.num_draft_tokens)
            runner = engines[1]._runner.draft
            assert runner is not None
            assert (runner._graphs is not None) == ("eager" not in settings)
            engines[1].check_integrity()


def test_the_caches_of_both_models_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages that the engine takes by itself hold the keys of both models, which are equal: there are half as many.

    There are (share * total - others - peak) // bytes_per_page pages, with a share that leaves both models 0.3 of what other
    programs leave, which is measured once. A second model doubles the bytes, and adds its weights and one more largest step to
    the peak: 4,096 tokens of 32 numbers take some 10 MiB, and cuBLAS may take a workspace of 32 MiB in one of the engines only.
    1 % of 0.3 * 40 GiB is 123 MiB.
    """
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    gc.collect()  # engines of other tests, whose memory would be free for the second engine only
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - others - torch.cuda.memory_reserved(device), total))
    share = (others + 0.3 * (total - others)) / total
    settings: dict[str, Any] = {"num_pages": None, "gpu_memory_utilization": share, "max_model_len": 256}
    plain = make_engine(**settings)
    pages = plain.config.num_pages
    page = plain._runner.bytes_per_page
    del plain
    gc.collect()
    engine = make_engine(**settings, speculative=f"draft={tmp_path}")
    assert pages is not None
    assert engine.config.num_pages is not None
    assert engine._runner.bytes_per_page == 2 * page
    assert engine.config.num_pages / pages == pytest.approx(0.5, rel=0.01)
    assert len(engine.generate([[1, 2, 3]], GREEDY)[0].token_ids) == 24
