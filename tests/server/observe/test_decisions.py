"""The lines that say what a server has decided, and by which setting."""

from types import SimpleNamespace

import pytest
from fa_serve.server.observe.decisions import decisions
from fa_serve.server.settings import Settings

from fa_serve.engine import EngineConfig
from fa_serve.engine.pooling.params import EncoderCard
from fa_serve.engine.summary import EngineSummary

GPU = EngineSummary("NVIDIA H100", {"prompts": ("hopper", "triton"), "decoding": ("triton",)}, 3 << 30, True, True, None)
CPU = EngineSummary("2 threads", {"prompts": ("sdpa",), "decoding": ("sdpa",)}, 3 << 20, False, True, "it has no tower")


def decided(settings=None, summary=CPU, card=None, adapters=(), **config):
    settings = settings or Settings()
    resolved = {"device": "cpu", "dtype": "bfloat16", "num_pages": 100, "max_model_len": 512, **config}
    engine = SimpleNamespace(config=EngineConfig(**resolved), summary=summary, card=card, adapters=list(adapters))
    return dict(decisions(settings, engine))


def test_a_cpu():
    found = decided()
    assert list(found) == ["device", "dtype", "attention", "kv cache", "batch", "graphs", "parallel", "model", "access"]
    assert found["device"] == "cpu (2 threads): --device auto takes a GPU if there is one"
    assert found["dtype"] == "bfloat16, the checkpoint's"
    assert found["attention"] == "prompts: sdpa, decoding: sdpa (fa-serve info says why)"
    assert found["kv cache"].startswith("1,600 tokens, 3.0 MiB: as much as --max-num-seqs can use")
    assert found["graphs"] == "none on a CPU, fused layers"
    assert found["model"] == "generate; no images; adapters: none (--lora)"
    no_keys = "no API key (FA_SERVE_API_KEYS), no administrator's key (FA_SERVE_ADMIN_KEY)"
    assert found["access"] == f"{no_keys}, this machine only (--host)"


def test_a_gpu():
    found = decided(summary=GPU, adapters=("one", "two"), device="cuda:0", tensor_parallel=2, speculative="ngram")
    assert found["device"].startswith("cuda:0 (NVIDIA H100)")
    assert found["attention"].startswith("prompts: hopper and triton, decoding: triton")
    assert found["kv cache"] == "1,600 tokens, 3.0 GiB: what is left of 90% of the memory (--gpu-memory-utilization)"
    assert found["graphs"] == "CUDA graphs, fused layers (--eager turns off both)"
    assert found["parallel"] == "each layer is divided between 2 devices (--tensor-parallel); draft tokens from ngram"
    assert found["model"] == "generate; at most 16 images; adapters: one, two"


@pytest.mark.parametrize(
    ("given", "subject", "said"),
    [
        ({"device": "cpu"}, "device", "cpu (2 threads), by --device"),
        ({"dtype": "float32"}, "dtype", "bfloat16, by --dtype"),
        ({"quantization": "fp8", "kv_cache_dtype": "fp8"}, "dtype", "the KV cache has fp8 (--kv-cache-dtype)"),
        ({"num_pages": 100}, "kv cache", "by --num-pages"),
        ({"host": "0.0.0.0"}, "access", "key (FA_SERVE_ADMIN_KEY), every machine that can reach 0.0.0.0 (--host)"),
        ({"lora_folder": "/adapters"}, "model", "adapters: from --lora-folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_was_given_is_named(given, subject, said):
    assert said in decided(Settings(**given))[subject]


def test_eager_and_captures_that_failed():
    assert decided(eager=True)["graphs"] == "none, and no fused layers: --eager"
    assert decided(device="cuda:0")["graphs"] == "none, fused layers"


def test_keys_are_counted_and_not_shown():
    found = decided(Settings(api_keys="secret-one,secret-two"))
    assert found["access"] == "2 API keys, no administrator's key (FA_SERVE_ADMIN_KEY), this machine only"
    assert "secret" not in str(found)
    found = decided(Settings(admin_key="secret-three-of-24-bytes-at-least"))
    with_administrator = "no API key (FA_SERVE_API_KEYS), an administrator's key (FA_SERVE_ADMIN_KEY)"
    assert found["access"] == f"{with_administrator}, this machine only (--host)"
    assert "secret" not in str(found)


def test_an_encoder():
    found = decided(card=EncoderCard("embed", 384, 256))
    assert list(found) == ["device", "dtype", "batch", "model", "access"]
    assert found["batch"] == "8192 tokens a step; inputs of 256 tokens"
    assert found["model"] == "embed, by its files (--task)"
