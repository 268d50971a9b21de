"""What the processes of the engine's benchmark write for their peers."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, Qwen3_5Config

from benchmarks.engine.engine_runs import whole_folder
from benchmarks.engine.engine_workloads import SHAPES


def test_vllm_gets_a_whole_model_with_the_same_text(tmp_path: Path) -> None:
    text = AutoConfig.for_model(**SHAPES["qwen35-9b"])
    text.save_pretrained(tmp_path)
    whole = AutoConfig.from_pretrained(whole_folder(tmp_path))
    assert isinstance(whole, Qwen3_5Config)
    assert whole.architectures == ["Qwen3_5ForConditionalGeneration"]
    assert whole.text_config.layer_types == text.layer_types
    assert whole.text_config.to_diff_dict() == text.to_diff_dict()
    assert whole.vision_config.out_hidden_size == text.hidden_size
    assert not whole.tie_word_embeddings
