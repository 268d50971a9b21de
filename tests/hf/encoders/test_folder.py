"""What a folder is for is read from its small files; `task` overrides."""

import json

import pytest
from encoder_folders import save_encoder

from fa_serve.engine import EngineConfig
from fa_serve.hf.encoders.folder import EncoderModule, read_folder, recognise_task, transformer_subfolder
from fa_serve.spec import ParameterError


def write(folder, name: str, content) -> None:
    (folder / name).parent.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"architectures": ["BertModel"], "model_type": "bert"}, "embed"),
        ({"architectures": ["XLMRobertaForMaskedLM"], "model_type": "xlm-roberta"}, "embed"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "generate"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "generate"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}, "score"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "classify"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "generate"),
        ({}, "generate"),
    ],
)
def test_the_task_of_an_architecture(tmp_path, config, task: str) -> None:
    write(tmp_path, "config.json", config)
    assert recognise_task(str(tmp_path)) == task
    assert recognise_task(str(tmp_path), "sparse") == "sparse"
    assert EngineConfig(model=tmp_path).resolve_task() == task


def modules(*kinds: str) -> list[dict]:
    return [{"idx": n, "name": str(n), "path": f"{n}_{k}" if n else "", "type": f"x.{k}"} for n, k in enumerate(kinds)]


@pytest.mark.parametrize(
    ("kinds", "transformer", "task"),
    [
        (("Transformer", "Pooling"), {}, "embed"),
        (("Transformer", "Pooling", "Dense", "Normalize"), {"transformer_task": "feature-extraction"}, "embed"),
        (("MLMTransformer", "SpladePooling"), {}, "sparse"),
        (("Transformer",), {"transformer_task": "sequence-classification"}, "score"),
        (("Transformer", "Dense"), {}, "token_embed"),
    ],
)
def test_the_task_of_modules(tmp_path, kinds, transformer, task: str) -> None:
    """A decoder with modules of sentence-transformers is an embedder, as Qwen3-Embedding is."""
    write(tmp_path, "config.json", {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}})
    write(tmp_path, "modules.json", modules(*kinds))
    write(tmp_path, "sentence_bert_config.json", transformer)
    assert recognise_task(str(tmp_path)) == task


def test_folders_that_are_not_computed_are_refused_with_the_reason(tmp_path) -> None:
    write(tmp_path, "config.json", {"architectures": ["Qwen3ForCausalLM"]})
    write(tmp_path, "modules.json", modules("Transformer", "Pooling", "LSTM"))
    with pytest.raises(ParameterError, match="LSTM"):
        read_folder(str(tmp_path), "embed")
    write(tmp_path, "modules.json", modules("StaticEmbedding"))
    with pytest.raises(ParameterError, match="begins with a Transformer"):
        recognise_task(str(tmp_path))
    write(tmp_path, "modules.json", modules("Transformer", "LogitScore"))
    write(tmp_path, "sentence_bert_config.json", {"transformer_task": "text-generation"})
    with pytest.raises(ParameterError, match="text-generation"):
        recognise_task(str(tmp_path))
    with pytest.raises(ParameterError, match="be None or one of generate, embed"):
        recognise_task(str(tmp_path), "translate")
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(OSError, match=r"modules\.json cannot be read"):
        recognise_task(str(tmp_path))


@pytest.mark.parametrize(("name", "value"), [("do_query_expansion", True), ("skiplist_words", ["."])])
def test_what_late_interaction_does_to_tokens_is_refused(tmp_path, name: str, value) -> None:
    write(tmp_path, "modules.json", modules("Transformer", "Dense"))
    write(tmp_path, "config_sentence_transformers.json", {name: value})
    with pytest.raises(ParameterError, match=f"model must have no {name} in config_sentence_transformers.json"):
        read_folder(str(tmp_path), "token_embed")
    write(tmp_path, "config_sentence_transformers.json", {name: type(value)()})
    read_folder(str(tmp_path), "token_embed")


def test_settings_prompts_and_places_are_read(tmp_path) -> None:
    general = {"prompts": {"query": "q: "}, "default_prompt_name": "query"}
    transformer = {"max_seq_length": 17, "do_lower_case": True}
    path = save_encoder(tmp_path, subfolder="0_Transformer", transformer=transformer, general=general)
    write(tmp_path, "config.json", {})
    folder = read_folder(str(path), "embed")
    assert transformer_subfolder(str(path)) == folder.subfolder == "0_Transformer"
    assert (folder.max_tokens, folder.lower_case) == (17, True)
    assert (folder.prompts, folder.default_prompt) == ({"query": "q: "}, "query")
    assert [module.kind for module in folder.modules] == ["Pooling", "Normalize"]


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"model_type": "bert"}, "mean"),
        ({"model_type": "eurobert", "num_key_value_heads": 2}, "mean"),
        ({"model_type": "qwen3"}, "lasttoken"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "mean"),
        ({"model_type": "qwen2", "is_causal": False}, "mean"),
    ],
)
def test_the_pooling_of_a_folder_that_does_not_say_it(tmp_path, config, mode: str) -> None:
    write(tmp_path, "config.json", config)
    assert read_folder(str(tmp_path), "embed").modules == (EncoderModule("Pooling", "", {"pooling_mode": mode}),)
