"""`describe` and the command `fa-serve info MODEL`: what a model asks of attention, from its config alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_folders import save_encoder
from every_type import tiny_config
from hf_families import BY_NAME, FAMILIES, WINDOW, distinct
from hybrids import BY_NAME as HYBRIDS
from transformers import AttentionInterface, AutoConfig
from typer.testing import CliRunner

from fa_serve.__main__ import app
from fa_serve.backends import explain
from fa_serve.hf.info import RankShare, decoding, describe
from fa_serve.info_tables import chosen
from fa_serve.spec import UnsupportedModelError

WIDE = {"COLUMNS": "220", "NO_COLOR": "1", "TERM": "dumb"}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["info", *arguments], env=WIDE)


@pytest.mark.parametrize("family", distinct(FAMILIES), ids=lambda f: f.name)
def test_every_family_is_described(family: Any) -> None:
    """All layers are found, and the engine takes or refuses the model as the table of families says."""
    config = family.make_config()
    described = describe(config, "cuda", 90)
    assert [(part.refused, part.untried) for part in described.parts] == [(None, None)]
    layers = described.parts[0].layers
    assert len(layers) == (6 if family.kind == "seq2seq" else config.num_hidden_layers), "two stacks, and cross-attention"
    assert all(any(reason is None for reason in explain(layer.spec).values()) for layer in layers)
    if family.kind == "decoder":
        assert (described.engine is None) == (family.paged is True)
        if family.paged is not True:
            assert str(family.paged) in str(described.engine)


def test_states_are_told_with_their_bytes(tmp_path: Any) -> None:
    """Of the convolution, 3 columns of 128 channels, and of the delta rule, 4 matrices of 16 x 16."""
    config = HYBRIDS["qwen3.5"].make_config()
    assert [(spec.kind, spec.bytes_per_state) for spec in describe(config).states] == [("conv", 1536), ("delta", 4096)]
    assert describe(BY_NAME["llama"].make_config()).states == []
    config.save_pretrained(tmp_path)
    told = run(str(tmp_path)).output
    assert "engine: runs it\nstates: 0.005371 MiB per sequence; prompts with a cached prefix start from them" in told
    assert "  1 x delta (4, 16, 16) float32" in told


@pytest.mark.parametrize("name", ["qwen3-next", "falcon-h1", "mamba2"])
def test_what_a_rank_holds_of_a_model_with_states(name: str) -> None:
    """Layers with and without attention, a buffer that is divided, and no attention at all."""
    share = describe(HYBRIDS[name].make_config(), tensor_parallel=2).share
    assert isinstance(share, RankShare)
    assert share.divided > 10 * share.whole
    assert 0.5 <= (share.divided + share.whole) / share.total < 0.55
    assert [(layer.num_heads, layer.num_kv_heads) for layer in share.layers] == [(2, 1)] * len(share.layers)
    assert bool(share.layers) == (name != "mamba2")


def test_an_encoder_is_told_by_its_task(tmp_path: Any) -> None:
    modules = [("Pooling", {"pooling_mode": "cls"}), ("Normalize", {})]
    embedder = str(save_encoder(tmp_path / "embed", "bert", modules, general={"prompts": {"query": "q: "}}))
    done = run(embedder, "--arch", "90")
    assert done.exit_code == 0
    assert "engine:" not in done.output
    for line in (
        "    varlen, cuda sm90, float32, heads 4/4, head_dim 8\n    prefill: triton\n",
        "encoder: runs it (fa-serve serve, Encoder), for the task embed\n",
        "  gives: 32 numbers in a vector, of length 1\n",
        "  pooling: cls\n",
        "  batches: packed (tested on a layer with random weights)\n",
        "  tokens per input: at most 48 (from the model's folder)\n",
        "  prompts: query\n",
        "  routes: /v1/embeddings, ",
    ):
        assert line in done.output
    assert describe(str(tmp_path / "embed" / "config.json")).encoder == describe(embedder).encoder
    decoder = run(str(save_encoder(tmp_path / "qwen3", "qwen3")))
    assert "for the task embed" in decoder.output
    assert "decoding" not in decoder.output
    own = {"modules": None, "head": "ForSequenceClassification"}
    classes = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    general = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
    told = run(str(save_encoder(tmp_path / "classify", "bert", **own, **classes, general=general))).output
    assert "  gives: 2 labels: bad, good\n  activation: torch.nn.modules.activation.Sigmoid\n" in told
    assert "  gives: 1 label\n" in run(str(save_encoder(tmp_path / "score", "bert", **own, num_labels=1))).output


def test_an_encoder_that_is_padded_runs_and_one_that_is_refused_does_not(tmp_path: Any) -> None:
    padded = run(str(save_encoder(tmp_path / "mpnet", "mpnet")))
    assert padded.exit_code == 0, "its attention is its own"
    assert "  batches: padded or one by one, " in padded.output
    refused = run(str(save_encoder(tmp_path / "bad", "bert", [("Pooling", {}), ("LSTM", {})])))
    assert refused.exit_code == 1
    assert "encoder: refused: model must have only these modules after a Transformer: Pooling, " in refused.output
    divided = run(str(tmp_path / "mpnet"), "--tensor-parallel", "2")
    assert (divided.exit_code, "tensor parallel: an encoder runs on one rank" in divided.output) == (1, True)


@pytest.mark.parametrize(
    ("model_type", "architecture", "part", "why"),
    [
        ("clip", "CLIPModel", "text_config: CLIPTextModel", "it returns CLIPOutput, which has no last_hidden_state"),
        (
            "siglip",
            "SiglipModel",
            "vision_config: SiglipVisionModel",
            "it returns SiglipOutput, which has no last_hidden_state",
        ),
        ("convnext", "ConvNextModel", "not tried: its forward calls no attention", "its main input is pixel_values"),
        ("dinov3_convnext", "DINOv3ConvNextModel", "model: DINOv3ConvNextModel", "its main input is pixel_values"),
        ("wav2vec2", "Wav2Vec2Model", "model: Wav2Vec2Model", "its main input is input_values"),
        ("aimv2_vision_model", "Aimv2VisionModel", "  layers 0-23: Aimv2Attention", "its main input is pixel_values"),
        ("blt", "BltModel", "model: BltModel", "its config has no hidden_size"),
    ],
)
def test_a_model_that_is_no_encoder_of_text_is_described_and_refused(
    tmp_path: Path, model_type: str, architecture: str, part: str, why: str
) -> None:
    AutoConfig.for_model(model_type, architectures=[architecture]).save_pretrained(tmp_path)
    done = run(str(tmp_path))
    assert done.exit_code == 1
    assert part in done.output
    told = f"encoder: refused: {architecture} does not compute hidden states of text alone, because {why}: "
    assert told in " ".join(done.output.split())


def test_an_encoder_whose_number_of_layers_is_fixed_is_described(tmp_path: Path) -> None:
    """No layer of it can be tried alone: Funnel has blocks of them."""
    AutoConfig.for_model("funnel", architectures=["FunnelModel"]).save_pretrained(tmp_path)
    done = run(str(tmp_path))
    assert done.exit_code == 0
    assert "encoder: runs it (fa-serve serve, Encoder), for the task embed\n  gives: 768 numbers in a vector\n" in done.output
    assert "  batches: packed if its code supports packed sequences, which is tested at the start\n" in done.output


def test_a_config_of_which_no_model_can_be_made_is_refused_with_the_reason(tmp_path: Path) -> None:
    AutoConfig.for_model("esm", architectures=["EsmModel"]).save_pretrained(tmp_path)
    done = run(str(tmp_path))
    assert done.exit_code == 2
    assert "transformers cannot make a model from this EsmConfig: TypeError: empty()" in done.output


def test_what_transformers_says_of_a_config_is_passed_on() -> None:
    """Such as a library that is missing, or a setting: what it says to do would be cut off."""
    with pytest.raises(ValueError, match=r"^The `prediction_length` config needs to be specified") as caught:
        describe(AutoConfig.for_model("autoformer"))
    assert not isinstance(caught.value, UnsupportedModelError)


def test_whether_a_generator_takes_images(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_config("llava").save_pretrained(tmp_path)
    assert "engine: runs it\nimages: accepted\n" in run(str(tmp_path)).output
    monkeypatch.setattr("fa_serve.hf.images.PROVEN", frozenset())
    assert "images: not accepted, because images of Llava" in run(str(tmp_path)).output
    tiny_config("llama").save_pretrained(tmp_path)
    assert "images: not accepted, because it has no towers\n" in run(str(tmp_path)).output


def test_windows_sinks_softcap_masks_and_dims_by_layer() -> None:
    def kinds(name: str) -> list[tuple[Any, ...]]:
        layers = describe(BY_NAME[name].make_config(), "cuda", 90).parts[0].layers
        return [(s.window_size, s.sinks, s.softcap, s.mask, s.head_dim, s.head_dim_v) for s in (x.spec for x in layers)]

    full = (-1, 0)
    left = (WINDOW - 1, 0)
    assert kinds("gpt-oss") == [(left, True, False, None, 32, 32), (full, True, False, None, 32, 32)]
    assert kinds("gemma2") == [(left, False, True, None, 32, 32), (full, False, True, None, 32, 32)]
    assert kinds("llama4") == [(full, False, False, None, 16, 16)] * 2
    chunked, full_layer = describe(BY_NAME["llama4"].make_config(), "cuda", 90).parts[0].layers
    assert (chunked.spec.attention_chunk, full_layer.spec.attention_chunk) == (True, False)
    assert kinds("deepseek-v3") == [(full, False, False, None, 24, 16)] * 2
    assert kinds("t5")[0] == ((-1, -1), False, False, "float", 16, 16)
    assert kinds("modernbert") == [((WINDOW, WINDOW), False, False, None, 16, 16), ((-1, -1), False, False, None, 16, 16)]


def test_weights_are_not_made_and_nothing_stays_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = AttentionInterface._global_mapping["fa_serve"]
    before = torch.nn.Linear.__init__
    devices = set()

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        devices.add(self.weight.device.type)

    monkeypatch.setattr(torch.nn.Linear, "__init__", noting)
    sizes = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 4}
    config = AutoConfig.for_model("llama", **sizes)
    (part,) = describe(config, "cuda", 90).parts
    assert devices == {"meta"}
    assert [where for _, where in part.kinds()] == ["0-3"]
    assert AttentionInterface._global_mapping["fa_serve"] is registered
    assert config._attn_implementation != "fa_serve"


def test_parts_of_a_composite_model() -> None:
    text = {"num_hidden_layers": 8}
    described = describe(AutoConfig.for_model("gemma3", text_config=text, vision_config={"num_hidden_layers": 2}), "cuda", 90)
    assert [(part.name, part.model, len(part.layers)) for part in described.parts] == [
        ("model", "Gemma3Model", 0),
        ("vision_config", "SiglipVisionModel", 2),
        ("text_config", "Gemma3TextModel", 8),
    ]
    assert [where for _, where in described.parts[2].kinds()] == ["0-4, 6-7", "5"]
    few = {"vision_config": {"depth": 2}, "text_config": {"num_hidden_layers": 1}}
    tower = describe(AutoConfig.for_model("qwen2_5_vl", **few), "cuda", 90).parts[1]
    assert tower.layers == []
    assert "grid_thw" in str(tower.untried)


def test_a_model_whose_code_reads_values_by_item() -> None:
    """PyTorch refuses that on the meta device with a RuntimeError, where other reads raise NotImplementedError."""
    [part] = describe(HYBRIDS["qwen3-next"].make_config(), "cuda", 90).parts
    assert (part.refused, part.untried) == (None, None)
    assert {layer.module for layer in part.layers} == {"Qwen3NextAttention"}


@pytest.mark.parametrize(("name", "limit"), [("minimax_m3_vl", 256), ("glm5_next", 192), ("llama", None)])
def test_the_length_up_to_which_queries_choose_all_keys(name: str, limit: int | None) -> None:
    described = describe(tiny_config(name))
    assert described.engine is None
    assert described.limit == limit


@pytest.mark.parametrize("name", ["aria_text", "jetmoe", "longcat_flash"])
def test_mixtures_that_read_the_choice_of_their_router(name: str) -> None:
    """Their code cannot run on the meta device; zeros take the place of weights."""
    described = describe(tiny_config(name), "cuda", 90, tensor_parallel=2)
    assert [(part.refused, part.untried) for part in described.parts] == [(None, None)]
    assert described.parts[0].layers
    assert described.engine is None
    assert described.share is not None


def test_heads_too_large_for_a_kernel() -> None:
    """Gemma 4 has heads of 512 in its full layers: Hopper's kernel says why it does not take them, the portable one does."""
    few = {"text_config": {"num_hidden_layers": 6}, "vision_config": {"num_hidden_layers": 1}}
    text = describe(AutoConfig.for_model("gemma4", **few), "cuda", 90).parts[-1]
    window, full = (layer.spec for layer, _ in text.kinds())
    last = text.layers[-1]
    assert last.latent is None
    assert (window.head_dim, full.head_dim) == (256, 512)
    assert explain(window)["hopper"] is None
    assert explain(full)["hopper"] == "supports head sizes that are multiples of 8 up to 256, got 512"
    assert explain(full)["triton"] is None
    assert explain(decoding(last))["triton"] is None
    wider = replace(full, head_dim=520)
    assert explain(wider)["triton"] == "has kernels for a head_dim up to 512, got 520"
    trained = replace(full, layout="dense", needs_grad=True)
    assert explain(trained)["triton"] == "computes gradients for a head_dim up to 256, got 512"
    assert explain(wider)["sdpa"] is None


def test_latent_attention_is_told(tmp_path: Path) -> None:
    """DeepSeek V2 in its sizes, one layer of it: the cache, the kernel that reads it, and what does not read it."""
    config = AutoConfig.for_model("deepseek_v2", num_hidden_layers=1, first_k_dense_replace=1, dtype="bfloat16")
    described = describe(config, "cuda", 90, tensor_parallel=2)
    [layer] = described.parts[0].layers
    assert layer.latent == (512, 64, 128, 128)
    decode = decoding(layer)
    assert (decode.head_dim, decode.head_dim_v, decode.num_kv_heads, decode.cached_bytes) == (576, 512, 1, 1152)
    assert described.share.cache_bytes == 1152, "every rank holds all latent keys"
    assert (described.share.layers[0].num_heads, layer.spec.num_heads) == (16, 32)
    assert chosen(explain(decode)) == chosen(explain(replace(decode, kv_dtype=torch.float8_e4m3fn))) == "triton"
    assert explain(replace(decode, values_in_keys=False))["triton"] == "has kernels for a head_dim up to 512, got 576"
    for change, reason in (
        ({"window_size": (99, 0)}, "got a window"),
        ({"softcap": True, "sinks": True}, "got softcap, sinks"),
        ({"head_dim_v": 400}, "supports values of up to 512 numbers in keys with up to 128 more, got 400 and 176"),
    ):
        assert reason in str(explain(replace(decode, **change))["triton"])
    config.save_pretrained(tmp_path)
    done = run(str(tmp_path), "--arch", "90")
    assert "latent: the engine caches 512 + 64 numbers per token, or 10240 if it cannot prove the layer" in done.output
    assert "prefill: hopper, decoding: triton" in done.output


def test_the_command(tmp_path: Path) -> None:
    BY_NAME["gpt-oss"].make_config(dtype="bfloat16", head_dim=64).save_pretrained(tmp_path)
    done = run(str(tmp_path), "--arch", "90")
    assert done.exit_code == 0, done.output
    assert "compute capability 9.0" in done.output
    assert "GptOssAttention" in done.output
    assert "heads 4/2, head_dim 64, window (4, 0), sinks" in done.output
    assert "hopper" in done.output
    assert "engine: runs it" in done.output
    assert not list(tmp_path.glob("*.safetensors"))


def test_the_config_alone_is_enough(tmp_path: Path) -> None:
    """The file itself, under whatever name, with the GPU in another spelling."""
    BY_NAME["gpt-oss"].make_config(dtype="bfloat16", head_dim=64).save_pretrained(tmp_path)
    file = (tmp_path / "config.json").rename(tmp_path / "downloaded.json")
    done = run(str(file), "--arch", "H100")
    assert done.exit_code == 0, done.output
    assert "compute capability 9.0" in done.output
    assert "engine: runs it" in done.output
    refused = run(str(file), "--arch", "0.9")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--arch must be a compute capability such as 9.0" in refused.stderr


def test_the_command_refuses_with_the_reason(tmp_path: Path) -> None:
    AutoConfig.for_model("bloom", n_layer=1, hidden_size=32, n_head=2, vocab_size=32).save_pretrained(tmp_path)
    done = run(str(tmp_path))
    assert done.exit_code == 1
    assert "refused: BloomModel computes its attention itself" in done.output
    done = run(str(tmp_path / "nothing"))
    assert done.exit_code == 2
    assert "nothing" in done.output


@pytest.mark.slow
def test_experts_have_a_backend_or_a_reason(tmp_path: Path) -> None:
    mixture = AutoConfig.for_model("gpt_oss", num_hidden_layers=2, num_local_experts=4)
    many = "grouped for 1 to 63 tokens, expert_matrices for more"
    assert describe(mixture, "cuda", 90).parts[0].experts == {"GptOssExperts": many}
    assert describe(mixture, "cuda", 80).parts[0].experts == {"GptOssExperts": "grouped"}, "its rows are not contiguous"
    assert describe(mixture).parts[0].experts == {"GptOssExperts": "torch"}
    plain = AutoConfig.for_model("nemotron_h", layers_block_type=["attention", "moe"])
    [reason] = describe(plain).parts[0].experts.values()
    assert reason == "refused: NemotronHExperts has experts without a gate, which fa_serve does not compute"
    assert describe(AutoConfig.for_model("llama", num_hidden_layers=1)).parts[0].experts == {}
    mixture.save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert "experts: GptOssExperts\n    torch\n" in done.stdout
