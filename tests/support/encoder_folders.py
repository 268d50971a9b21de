"""Folders of tiny encoders with random weights, in the format of sentence-transformers, without that package."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from fa_serve.hf.encoders.load import encoder_class

LETTERS = [chr(97 + i) for i in range(26)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, *LETTERS, *("##" + letter for letter in LETTERS), *".,:?!", *"0123456789"]
LENGTH = 48
TEXTS = (
    "a cat sat on the mat",
    "x",
    "stock markets fell, again.",
    "the quick brown fox",
    "a dog",
    "why is the sky blue?",
    "no",
)
"""Of different lengths, in no order."""
MANY_TEXTS = (*(" ".join(["cat", "mat", "the"] * count) for count in (40, 56, 3, 33, 1, 6)), *["a cat sat on the mat"] * 26)
"""32 texts, of which some have hundreds of tokens, with up to 512 in each: more than 1,024 tokens together."""
PAIRS = [("why is it so?", text) for text in TEXTS]
SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}
_DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 2, "eos_token_id": 3}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", SIZES),
    "roberta": ("roberta", SIZES | {"type_vocab_size": 1, "pad_token_id": 0, "max_position_embeddings": LENGTH + 1}),
    "xlm-roberta": ("xlm-roberta", SIZES | {"type_vocab_size": 1, "pad_token_id": 0, "max_position_embeddings": LENGTH + 1}),
    "mpnet": ("mpnet", SIZES | {"pad_token_id": 1, "max_position_embeddings": LENGTH + 2}),
    "modernbert": ("modernbert", SIZES | _ALTERNATING | {"local_attention": 8, "cls_token_id": 2, "sep_token_id": 3}),
    "nomic": ("nomic_bert", SIZES),
    "qwen3": ("qwen3", _DECODER),
    "gemma3": ("gemma3_text", _DECODER | _ALTERNATING | {"sliding_window": 8, "use_bidirectional_attention": True}),
    "t5": ("t5", SIZES | {"d_ff": 48, "d_kv": 16, "num_decoder_layers": 1, "relative_attention_max_distance": 16}),
    "gemma3-causal": ("gemma3_text", _DECODER | _ALTERNATING | {"sliding_window": 8}),
}
"""By name: the type of the model, and what its config has besides. gte models are bert, modernbert and qwen."""
PADDED = ("mpnet", "t5")
"""Families whose batches are padded. MPNet has its own attention, and T5's bias is that of the distance in the batch."""
PLACES = {
    "SpladePooling": "sparse_encoder.modules.splade_pooling",
    "MultiVectorMask": "multi_vector_encoder.modules.multi_vector_mask",
}
"""Where sentence-transformers has the classes that are not in its `models`."""


def word_pieces(pad: int = 0) -> PreTrainedTokenizerFast:
    """Words of letters, with [CLS] and [SEP] around a text and behind each text of a pair. pad: its id, 0 or 1"""
    words = [VOCABULARY[1], VOCABULARY[0], *VOCABULARY[2:]] if pad else VOCABULARY
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=LENGTH,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def make_encoder(family: str, head: str = "Model", **settings: Any) -> PreTrainedModel:
    """A float32 model with numbers that differ enough for a wrong mask or position to be seen. head: end of its class's name"""
    kind, own = FAMILIES[family]
    config = AutoConfig.for_model(kind, **own | settings)
    torch.manual_seed(0)
    without_decoder = "AutoModelForTextEncoding" if type(config).is_encoder_decoder else "AutoModel"
    auto = {"Model": without_decoder}.get(head, f"AutoModel{head}")
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.5 / math.sqrt(parameter.shape[-1]))
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


def load_eager(path: Path) -> PreTrainedModel:
    """The float32 transformer of a folder with its own attention, without the decoder that its type may have."""
    config, auto = encoder_class(AutoConfig.from_pretrained(path), "embed")
    model: PreTrainedModel = auto.from_pretrained(path, config=config, attn_implementation="eager").eval()
    return model


def save_encoder(
    folder: Path,
    family: str = "bert",
    modules: Sequence[tuple[str, dict[str, Any]]] | None = (("Pooling", {"pooling_mode_mean_tokens": True}), ("Normalize", {})),
    *,
    head: str = "Model",
    subfolder: str = "",
    transformer: dict[str, Any] | None = None,
    general: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Write a folder. modules: behind the transformer, by the names of their classes; None writes no modules.json

    transformer: the settings of sentence_bert_config.json; general: those of config_sentence_transformers.json
    """
    place = folder / subfolder if subfolder else folder
    make_encoder(family, head, **settings).save_pretrained(place)
    tokenizer = word_pieces(pad=1 if family == "mpnet" else 0)
    if family not in ("bert", "nomic"):
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(place)
    if general is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(general))
    if modules is None:
        return folder
    (place / "sentence_bert_config.json").write_text(
        json.dumps(transformer or {"max_seq_length": LENGTH, "do_lower_case": False})
    )
    listed = [{"idx": 0, "name": "0", "path": subfolder, "type": "sentence_transformers.models.Transformer"}]
    for number, (kind, config) in enumerate(modules, start=1):
        path = f"{number}_{kind}"
        listed.append(
            {
                "idx": number,
                "name": str(number),
                "path": path,
                "type": f"sentence_transformers.{PLACES.get(kind, 'models')}.{kind}",
            }
        )
        (folder / path).mkdir(exist_ok=True)
        if kind == "Pooling":
            config = {"word_embedding_dimension": SIZES["hidden_size"], "pooling_mode_mean_tokens": False, **config}
        if kind in ("Dense", "LayerNorm"):
            _save_weights(folder / path, kind, config)
        if kind != "Normalize" or config:
            (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def _save_weights(folder: Path, kind: str, config: dict[str, Any]) -> None:
    torch.manual_seed(1)
    if kind == "LayerNorm":
        size = config["dimension"]
        weights: dict[str, Tensor] = {"norm.weight": torch.rand(size), "norm.bias": torch.rand(size)}
    else:
        layer = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
        weights = {f"linear.{name}": value for name, value in layer.state_dict().items()}
    save_file(weights, folder / "model.safetensors")


def cosine_distance(first: Any, second: Any) -> float:
    """The largest of all rows."""
    both = torch.as_tensor(first).double(), torch.as_tensor(second).double()
    return float((1 - nn.functional.cosine_similarity(*both, dim=-1)).max())
