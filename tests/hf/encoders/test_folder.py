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


OFF = {"do_query_expansion": False, "skiplist_words": []}


@pytest.mark.parametrize(
    ("general", "name"),
    [
        ({"do_query_expansion": True}, "do_query_expansion"),
        ({"query_expansion": {"length": 32}, "do_query_expansion": False}, "do_query_expansion"),
        ({"skiplist_words": []}, "do_query_expansion"),  # the default of PyLate
        ({"model_type": "ColBERT", "do_query_expansion": False}, "skiplist_words"),  # another one
        (OFF | {"skiplist_words": ["."]}, "skiplist_words"),
        (OFF | {"query_prefix": "[Q] "}, "query_prefix and document_prefix"),
        (OFF | {"document_prefix": "[D] "}, "query_prefix and document_prefix"),
    ],
)
def test_what_late_interaction_does_to_tokens_is_refused(tmp_path, general, name: str) -> None:
    write(tmp_path, "modules.json", modules("Transformer", "Dense"))
    write(tmp_path, "config_sentence_transformers.json", general)
    with pytest.raises(ParameterError, match=f"model must set {name} to .* in config_sentence_transformers.json"):
        read_folder(str(tmp_path), "token_embed")
    write(tmp_path, "config_sentence_transformers.json", OFF | {"query_prefix": ""})
    read_folder(str(tmp_path), "token_embed")


def test_query_expansion_of_a_transformer_is_refused(tmp_path) -> None:
    write(tmp_path, "modules.json", modules("Transformer", "Dense"))
    write(tmp_path, "sentence_bert_config.json", {"query_expansion": {"strategy": "fixed", "length": 32}})
    with pytest.raises(ParameterError, match="set do_query_expansion to false"):
        read_folder(str(tmp_path), "token_embed")


TOKENS = {"module_input_name": "token_embeddings"}
TEXT = {"module_input_name": "sentence_embedding"}


@pytest.mark.parametrize(
    ("kinds", "configs", "task", "message"),
    [
        (("Pooling", "MultiVectorMask"), {}, "embed", "not MultiVectorMask, which would be left out"),
        (("Dense", "Pooling"), {}, "embed", "here token_embeddings, but 1_Dense reads sentence_embedding"),
        (("Normalize", "Pooling"), {}, "embed", "token_embeddings, but 1_Normalize reads"),
        (("Pooling", "Dense"), {"2_Dense": TOKENS}, "embed", "sentence_embedding, but 2_Dense reads token_embeddings"),
        (("Pooling", "Dense"), {"2_Dense": TEXT | {"module_output_name": "scores"}}, "embed", "writes scores"),
        (("Pooling", "Pooling"), {}, "embed", "sentence_embedding, but 2_Pooling reads"),
        (("Pooling", "Dense"), {}, "token_embed", "for the task token_embed, and not Pooling"),
        (("LayerNorm",), {}, "token_embed", "not LayerNorm"),
        (
            ("Dense",),
            {"1_Dense": TOKENS | {"module_output_name": "more"}},
            "token_embed",
            "reads token_embeddings and writes more",
        ),
        (("Dense",), {"1_Dense": {"module_input_name": "other"}}, "token_embed", "but 1_Dense reads other"),
        (("MultiVectorMask",), {"1_MultiVectorMask": {"skiplist_words": ["."]}}, "token_embed", "no skiplist_words in its"),
        (("MultiVectorMask",), {"1_MultiVectorMask": {"keep_only_token_ids": [3]}}, "token_embed", "no keep_only_token_ids"),
        (("SpladePooling", "Normalize"), {}, "sparse", "only SpladePooling after .* not Normalize"),
        (("Pooling",), {}, "sparse", "for the task sparse, and not Pooling"),
        (("Dense",), {}, "classify", "no modules after its Transformer for the task classify, and not Dense"),
        (("Pooling",), {}, "score", "not Pooling"),
    ],
)
def test_a_module_that_would_be_left_out_is_refused_by_name(tmp_path, kinds, configs, task, message: str) -> None:
    write(tmp_path, "modules.json", modules("Transformer", *kinds))
    for place, config in configs.items():
        write(tmp_path, f"{place}/config.json", config)
    with pytest.raises(ParameterError, match=message):
        read_folder(str(tmp_path), task)


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("ColBERT", {}),
        ("MultiVectorEncoder", {}),
        ("MultiVectorEncoder", TOKENS),
        ("SentenceTransformer", {}),
        ("SentenceTransformer", TEXT),
        ("ColBERT", TEXT),
        ("MultiVectorEncoder", TEXT),
    ],
)
def test_what_a_dense_layer_of_late_interaction_reads(tmp_path, model_type: str, names) -> None:
    """A layer behind a pooling, which is one of texts, is read as one of tokens from a folder of vectors of texts alone."""
    write(tmp_path, "modules.json", modules("Transformer", "Dense"))
    write(tmp_path, "config_sentence_transformers.json", {"model_type": model_type} | OFF)
    write(tmp_path, "1_Dense/config.json", names)
    if names is TEXT and model_type != "SentenceTransformer":
        with pytest.raises(ParameterError, match="read and write token_embeddings, but 1_Dense reads sentence"):
            read_folder(str(tmp_path), "token_embed")
        return
    kinds = [module.kind for module in read_folder(str(tmp_path), "token_embed").modules]
    assert kinds == (["Dense"] if model_type == "MultiVectorEncoder" else ["Dense", "Normalize"])


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


@pytest.mark.parametrize("listed", ["[1]", '"a"', "7", '{"a": 1}'])
def test_modules_that_are_no_list_of_objects_are_refused(tmp_path, listed: str) -> None:
    path = save_encoder(tmp_path)
    (path / "modules.json").write_text(listed)
    with pytest.raises(ParameterError, match=r"whose modules\.json is a list of objects"):
        read_folder(str(path), "embed")


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        (
            "sentence_bert_config.json",
            '{"max_seq_length": "48"}',
            ParameterError,
            "integer or null as max_seq_length .*, got '48'",
        ),
        ("sentence_bert_config.json", '{"max_seq_length": -1}', ParameterError, "integer or null as max_seq_length .*, got -1"),
        ("sentence_bert_config.json", "[1]", OSError, "must hold a JSON object, got list"),
        ("config_sentence_transformers.json", "[1]", OSError, "must hold a JSON object, got list"),
        ("1_Pooling/config.json", "[1]", OSError, "must hold a JSON object, got list"),
        ("config_sentence_transformers.json", '{"prompts": ["a"]}', ParameterError, "an object of texts as prompts"),
        ("config_sentence_transformers.json", '{"prompts": {"a": 3}}', ParameterError, "an object of texts as prompts"),
        (
            "config_sentence_transformers.json",
            '{"prompts": {"query": "a"}, "default_prompt_name": "b"}',
            ParameterError,
            r"one of its prompts \(query\) as default_prompt_name .*, got 'b'",
        ),
    ],
)
def test_settings_of_a_folder_that_cannot_be_used_are_refused(tmp_path, name: str, text: str, error, message: str) -> None:
    path = save_encoder(tmp_path)
    (path / name).write_text(text)
    with pytest.raises(error, match=message):
        read_folder(str(path), "embed")


def test_a_prompt_that_is_null_is_no_prompt(tmp_path) -> None:
    path = save_encoder(tmp_path, general={"prompts": {"query": "a", "document": None}, "default_prompt_name": "document"})
    folder = read_folder(str(path), "embed")
    assert (folder.prompts, folder.default_prompt) == ({"query": "a", "document": ""}, "document")
