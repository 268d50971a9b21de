"""The shapes of models and the workloads that the benchmarks of the engine and of the service share."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import random
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

KEPT_MODELS = "FA_SERVE_BENCH_MODELS"
"""The variable that names a folder in which models are kept for other benchmarks."""
LIMIT = 4096  # max_model_len of every engine
SHARED = 2048
TOP_P = {"temperature": 0.7, "top_p": 0.9}
SHAPES: dict[str, dict[str, Any]] = {
    "llama8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "llama70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "qwen06": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "qwen30a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "gptoss20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "deepseek-lite": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
        "tie_word_embeddings": False,
    },
    "qwen35-9b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
    "qwen3next": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
}
# The same sizes with quantised weights, in a format of examples/quantise.py.
QUANTISED = {
    "llama8b-fp8": ("llama8b", "fp8"),
    "llama8b-w4": ("llama8b", "awq"),
    "qwen30a3b-fp8": ("qwen30a3b", "fp8-block"),
    "qwen30a3b-w4": ("qwen30a3b", "awq"),
    "tiny-w4": ("tiny", "awq"),
}
SPARSE = ("llama70b",)
"""Shapes whose files have holes (`make_sparse_folder`), because 141 GB of random numbers take minutes to write."""
SHAPES |= {name: SHAPES[base] for name, (base, _) in QUANTISED.items()}
# Other families at about the size of qwen06, which differ from it only in what is theirs.
MIXTURE = {"moe_intermediate_size": 384, "num_experts": 32, "num_experts_per_tok": 8, "norm_topk_prob": True}
WINDOWS = {"sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256}
SHAPES |= {
    "llama06": SHAPES["qwen06"] | {"model_type": "llama"},
    "qwenmoe06": SHAPES["qwen06"] | {"model_type": "qwen3_moe"} | MIXTURE,
    "gemma06": SHAPES["qwen06"]
    | {"model_type": "gemma3_text", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}
    | WINDOWS,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "full_attention_interval": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
}
"""The sizes that a shape has with --tiny, of which each shape takes those that it has."""


def tiny_sizes(shape: str) -> dict[str, int]:
    """The sizes of TINY that a shape has."""
    return {name: value for name, value in TINY.items() if name in SHAPES[shape]}


def cut_layers(count: int) -> None:
    """Give every shape that has more layers so many."""
    for shape, sizes in SHAPES.items():
        SHAPES[shape] = sizes | {"num_hidden_layers": min(count, sizes["num_hidden_layers"])}


def make_tiny() -> None:
    """Give every shape the sizes of TINY."""
    for shape in SHAPES:
        SHAPES[shape] = SHAPES[shape] | tiny_sizes(shape)


def uneven(count: int) -> list[tuple[int, int]]:
    draw = random.Random(0)
    return [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(count)]


@dataclass(frozen=True)
class Workload:
    """Requests as (tokens in, tokens out).

    all_tokens: whether the rate counts the tokens of prompts as well
    prefix:     tokens at the beginning of every prompt that are the same
    accepted:   drafts that are right in each step of a sequence (synthetic_drafts.py); None without speculation
    unmatched:  prompt lookup is on. It finds nothing in random prompts and in answers that are sampled from random weights
    """

    lengths: list[tuple[int, int]]
    all_tokens: bool = False
    prefix: int = 0
    sampled: bool = False
    accepted: int | None = None
    unmatched: bool = False

    def prompts(self, name: str, vocab: int) -> list[list[int]]:
        """Random token ids, different for each name. The first `prefix` of each prompt are the same."""
        draw = random.Random(name)
        shared = draw.choices(range(5, vocab), k=self.prefix)
        return [shared + draw.choices(range(5, vocab), k=tokens_in - self.prefix) for tokens_in, _ in self.lengths]

    def cut(self, requests: int) -> Workload:
        return replace(self, lengths=self.lengths[:requests])

    def halved(self) -> Workload:
        """The same prompts with answers half as long."""
        return replace(self, lengths=[(tokens_in, -(-tokens_out // 2)) for tokens_in, tokens_out in self.lengths])

    @property
    def tokens(self) -> int:
        return sum(tokens_out + tokens_in * self.all_tokens for tokens_in, tokens_out in self.lengths)


WORKLOADS = {
    "A": Workload([(512, 256)] * 256),
    "B": Workload(uneven(256)),
    "sampled": Workload(uneven(256), sampled=True),
    "C": Workload([(128, 256)]),
    "C16": Workload([(128, 256)] * 16),
    "C64": Workload([(128, 256)] * 64),
    "C256": Workload([(128, 256)] * 256),
    "D": Workload([(3072, 1)] * 64, all_tokens=True),
    "edit": Workload([(1024, 512)] * 16, accepted=5),
    "edit_plain": Workload([(1024, 512)] * 16),
    "edit1": Workload([(1024, 512)], accepted=5),
    "edit1_plain": Workload([(1024, 512)]),
    "eagle3": Workload([(1024, 512)], accepted=3),
    "eagle3_plain": Workload([(1024, 512)]),
    "unmatched1": Workload([(128, 256)], sampled=True, unmatched=True),
    "unmatched1_plain": Workload([(128, 256)], sampled=True),
    "unmatched16": Workload([(128, 256)] * 16, sampled=True, unmatched=True),
    "unmatched16_plain": Workload([(128, 256)] * 16, sampled=True),
    "unmatched256": Workload([(128, 256)] * 256, sampled=True, unmatched=True),
    "unmatched256_plain": Workload([(128, 256)] * 256, sampled=True),
    "shared": Workload([(SHARED + 64, 64)] * 128, prefix=SHARED),
}
HEADS = ("eagle3", "eagle3_plain")
LOOKUPS = tuple(name for name in WORKLOADS if name.startswith(("edit", "unmatched")))
SPECULATING = (*LOOKUPS, *HEADS)


def make_model(shape: str, device: str, *, dtype: Any, **changes: Any) -> Any:
    """A model of that shape with random weights, made on its device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.for_model(**SHAPES[shape] | changes)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = GenerationConfig()
    return model.eval()


def make_folder(shape: str, folder: Path, device: str) -> None:
    """Write weights and config, and a tokenizer with one word for each id.

    With KEPT_MODELS the files are written into its folder once, and `folder` links to them.
    """
    kept = os.environ.get(KEPT_MODELS)
    if kept is None:
        write_folder(shape, folder, device)
        return
    source = Path(kept) / shape
    source.mkdir(parents=True, exist_ok=True)
    made = Path(kept) / f"{shape}.made"
    with (Path(kept) / f"{shape}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another benchmark may be writing it
        if not made.exists():
            write_folder(shape, source, device)
            made.touch()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)


def write_folder(shape: str, folder: Path, device: str) -> None:
    import torch

    if shape in SPARSE:
        make_sparse_folder(shape, folder)
        return
    model = make_model(shape, device, dtype=torch.bfloat16)
    if shape in QUANTISED:
        _, name = QUANTISED[shape]
        _example("quantise").write(model, name, folder, 128 if SHAPES[shape]["hidden_size"] % 128 == 0 else 32)
    else:
        save_by_layers(model, folder)
    save_tokenizer(folder, SHAPES[shape]["vocab_size"])


def save_by_layers(model: Any, folder: Path) -> None:
    """Write the checkpoint that `save_pretrained` writes, with a file for each layer.

    `save_pretrained` converts the experts of all layers at once, for which the device must hold the model twice.
    """
    import torch
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, weight in model.state_dict().items():
        if name not in model.all_tied_weights_keys:
            layer = re.match(r"model\.layers\.\d+\.", name)
            parts.setdefault(layer[0] if layer else "", {})[name] = weight
    places: dict[str, str] = {}
    for number, part in enumerate(parts.values()):
        file = f"model-{number:05}.safetensors"
        converted = {name: weight.contiguous() for name, weight in revert_weight_conversion(model, part).items()}
        save_file(converted, folder / file, {"format": "pt"})
        places |= dict.fromkeys(converted, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.dtype
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def make_sparse_folder(shape: str, folder: Path) -> None:
    """Write config, tokenizer and a file of weights in which only the first layer and a few embeddings are not 0.

    These are what the engine observes when it proves that layers can be fused. Decoding is limited by memory, so its time
    hardly depends on the values of the rest. Products of zeros draw less power and run at a higher clock: the rates of prompts
    mean nothing. The system fills its cache with the zeros of a mapped file at about 1 GB/s for each rank.
    """
    import torch

    model = make_model(shape, "meta", dtype=torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in model.state_dict().items():
        begin = end
        end += weight.nbytes
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, described in header.items():
            if name.startswith("model.layers.0.") or "embed_tokens" in name:
                *rows, width = described["shape"]
                values = torch.randn(*(min(count, 64) if "embed" in name else count for count in rows), width).mul_(0.02)
                file.seek(8 + len(text) + described["data_offsets"][0])
                file.write(values.bfloat16().view(torch.uint8).numpy().tobytes())
        file.truncate(8 + len(text) + end)
    save_tokenizer(folder, SHAPES[shape]["vocab_size"])


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with one word for each id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def make_head(shape: str, folder: Path) -> None:
    """Write an EAGLE-3 head with random weights, as such heads are published, with at most 32,000 tokens."""
    import torch
    from safetensors.torch import save_file

    sizes = SHAPES[shape]
    hidden = sizes["hidden_size"]
    wide = sizes["intermediate_size"]
    keys = sizes["num_key_value_heads"] * sizes["head_dim"]
    queries = sizes["num_attention_heads"] * sizes["head_dim"]
    vocab = min(sizes["vocab_size"], 32_000)
    layers = sizes["num_hidden_layers"]
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (wide, hidden),
        "midlayer.mlp.up_proj": (wide, hidden),
        "midlayer.mlp.down_proj": (hidden, wide),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,),
        "norm": (hidden,),
        "lm_head": (vocab, hidden),
    }
    tensors = {f"{name}.weight": torch.randn(shape).mul_(0.02).bfloat16() for name, shape in shapes.items()}
    config = {name: sizes[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config |= {"hidden_size": hidden, "intermediate_size": wide, "draft_vocab_size": vocab}
    config["eagle_aux_hidden_state_layer_ids"] = [min(2, layers), layers // 2, max(layers - 3, 0)]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | {"d2t": torch.zeros(vocab, dtype=torch.int64)}, folder / "model.safetensors")


def _example(name: str) -> Any:
    """A script of examples/ as a module."""
    examples = str(Path(__file__).parents[2] / "examples")
    if examples not in sys.path:
        sys.path.append(examples)
    return importlib.import_module(name)


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a step reads: all but those of an embedding that is not the head too."""
    embedding = model.get_input_embeddings().weight
    total = sum(x.nbytes for x in model.parameters()) - (0 if model.config.tie_word_embeddings else embedding.nbytes)
    return total + sum(stored_bytes(weight) for weight in quantised_weights(model))


def quantised_weights(model: Any) -> list[Any]:
    """The quantised weights of the linear layers and of the experts of a model."""
    linear = [module.weight for module in model.modules() if hasattr(module, "scheme") and hasattr(module, "weight")]
    experts = [module.weights for module in model.modules() if hasattr(module, "scheme") and hasattr(module, "weights")]
    return linear + [weight for each in experts for weight in (each.gate_up, each.down)]


def stored_bytes(weight: Any) -> int:
    """Bytes of a quantised weight."""
    return sum(x.nbytes for x in (weight.data, weight.scales, weight.zeros) if x is not None)


def say(text: str) -> None:
    print(text, flush=True)
