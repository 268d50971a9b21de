"""Check that every causal language model of transformers, shrunk and with random weights, is right with fa_serve or refused.

    python tests/upstream/sweep.py [--out tests/upstream/sweep.json]

No model is treated specially: small sizes are set in the fields of a config that have these names. Logits of a batch without
padding, with padding on the left and with padding on the right are compared with those of eager attention. The exit status is 1
if a model is wrong. Models that cannot be made from such a config are listed; nothing is known of them.
tests/support/hf_families.py has the models that are tested closely.
"""

from __future__ import annotations

import argparse
import copy
import json
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import fa_serve
from fa_serve.spec import UnsupportedModelError

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from hf_families import VOCAB, WINDOW, padding_mask, tokens

ALLOWED = 1e-5  # error relative to the largest logit
SECONDS = 20  # for one model
PARAMETERS = 30_000_000  # of one model at most
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "d_model": 64,
    "d_ff": 96,
    "ffn_dim": 96,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "ffn_hidden_size": 96,
    "attention_chunk_size": 7,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}


def shrunk(config_class: Any) -> Any:
    published = config_class()
    sizes = {name: value for name, value in SIZES.items() if getattr(published, name, None) is not None}
    if getattr(published, "layer_types", None):
        sizes["layer_types"] = (list(dict.fromkeys(published.layer_types)) * 2)[:2]
    config = config_class(**sizes)
    config._attn_implementation = config._experts_implementation = "eager"
    return config


@torch.no_grad()
def judge(config_class: Any, model_class: Any) -> str:
    """ "right", "wrong: ...", "refused: ...", or "not made: ..."."""
    try:
        torch.manual_seed(0)
        eager = model_class(shrunk(config_class)).eval()
        if sum(p.numel() for p in eager.parameters()) > PARAMETERS:
            return "not made: its config names its sizes differently"
        for parameter in eager.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.2 * parameter.shape[-1] ** -0.5)
        expected = {kind: eager(tokens(3, 24), attention_mask=padding_mask(kind)).logits for kind in ("none", "left", "right")}
    except Exception as error:  # sizes that do not fit together: the model may raise anything
        return f"not made: {type(error).__name__}"
    try:
        ours = fa_serve.patch(copy.deepcopy(eager))
        for kind, logits in expected.items():
            mask = padding_mask(kind)
            actual, logits = (x[mask.bool()] for x in (ours(tokens(3, 24), attention_mask=mask).logits, logits))
            error = ((actual - logits).abs().max() / logits.abs().max()).item()
            if not error <= ALLOWED:
                return f"wrong: {kind} by {error:.1e}"
    except UnsupportedModelError as error:
        return "refused: " + str(error).partition(", so fa_serve")[0]
    return "right"


def _too_long(*_: object) -> NoReturn:
    raise TimeoutError


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    out = parser.parse_args().out
    signal.signal(signal.SIGALRM, _too_long)
    verdicts: dict[str, str] = {}
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        model_class = found[0] if isinstance(found, tuple) else found
        if getattr(model_class, "is_dummy", False):
            continue
        signal.alarm(SECONDS)
        try:
            verdicts[config_class.model_type] = judge(config_class, model_class)
        finally:
            signal.alarm(0)
        print(f"{config_class.model_type:24} {verdicts[config_class.model_type]}", flush=True)
    words = [verdict.partition(":")[0] for verdict in verdicts.values()]
    print(", ".join(f"{words.count(word)} {word}" for word in ("right", "wrong", "refused", "not made")))
    if out:
        out.write_text(json.dumps(verdicts, indent=1) + "\n")
    sys.exit("wrong" in words)


if __name__ == "__main__":
    main()
