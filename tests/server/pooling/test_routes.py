"""The routes of encoders, over tiny encoders: their replies are what `Encoder` gives, in the form of each API."""

import base64

import httpx
import numpy as np
import pytest
from encoder_folders import LENGTH, TEXTS, save_encoder
from fa_serve.server.app import create_app
from fa_serve.server.settings import Settings

from fa_serve.engine import AsyncEngine, Encoder, EngineConfig, PoolingParams
from fa_serve.info_tables import ENCODER_ROUTES

pytestmark = pytest.mark.anyio
MODEL = {"model": "tiny"}
QUERY = "why is it so?"


async def post(client, path: str, body: dict, status: int = 200):
    reply = await client.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


async def test_embeddings_are_those_of_the_encoder_in_each_format(encoding, encoder_of) -> None:
    wanted = encoder_of("embed").encode(TEXTS)
    async with encoding("embed") as client:
        reply = await post(client, "/v1/embeddings", MODEL | {"input": list(TEXTS)})
        packed = await post(client, "/v1/embeddings", MODEL | {"input": list(TEXTS), "encoding_format": "base64"})
        half = await post(client, "/v1/embeddings", MODEL | {"input": TEXTS[1], "encoding_format": "float16"})
        signs = await post(client, "/v1/embeddings", MODEL | {"input": TEXTS[1], "encoding_format": "ubinary"})
        one = await post(client, "/v1/embeddings", MODEL | {"input": TEXTS[2], "dimensions": 5})
        ids = [each.ids.tolist() for each in encoder_of("embed").reader.read(TEXTS)]
        by_ids = await post(client, "/v1/embeddings", MODEL | {"input": ids})
        first = await post(client, "/v1/embeddings", MODEL | {"input": ids[0]})
    assert [each["index"] for each in reply["data"]] == list(range(len(TEXTS)))
    found = np.array([each["embedding"] for each in reply["data"]])
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    numbers = [np.frombuffer(base64.b64decode(each["embedding"]), dtype="<f4") for each in packed["data"]]
    np.testing.assert_allclose(np.stack(numbers), wanted, atol=1e-6)
    short = np.frombuffer(base64.b64decode(half["data"][0]["embedding"]), dtype="<f2")
    np.testing.assert_allclose(short, wanted[1], rtol=1e-3)
    assert signs["data"][0]["embedding"] == np.packbits(wanted[1] > 0).tolist()
    shorter = np.array(one["data"][0]["embedding"])
    np.testing.assert_allclose(shorter, wanted[2, :5] / np.linalg.norm(wanted[2, :5]), atol=1e-6)
    np.testing.assert_allclose([each["embedding"] for each in by_ids["data"]], wanted, atol=1e-6)
    np.testing.assert_allclose(first["data"][0]["embedding"], wanted[0], atol=1e-6)
    count = sum(map(len, ids))
    assert reply["usage"] == {"prompt_tokens": count, "total_tokens": count}


async def test_prompts_and_lengths_of_vectors_are_on_demand(encoding, encoder_of) -> None:
    encoder = encoder_of("embed")
    wanted = encoder.encode(["a cat"], prompt_name="query", params=PoolingParams(normalize=False))
    async with encoding("embed") as client:
        body = MODEL | {"input": "a cat", "prompt_name": "query", "normalize": False}
        reply = await post(client, "/v1/embeddings", body)
        error = await post(client, "/v1/embeddings", body | {"prompt_name": "other"}, 400)
    np.testing.assert_allclose(reply["data"][0]["embedding"], wanted[0], atol=1e-6)
    assert error["error"]["param"] == "prompt_name"


async def test_long_inputs_are_refused_or_cut_on_demand(encoding, encoder_of) -> None:
    text = "a " * (LENGTH + 1)
    async with encoding("embed") as client:
        for path, field, more in (("/v1/embeddings", "input", MODEL), ("/embed", "inputs", {})):
            error = await post(client, path, more | {field: [TEXTS[0], text]}, 400)
            assert error["error"]["code"] == "context_length_exceeded"
            assert error["error"]["param"] == f"{field}[1]"
            assert error["error"]["message"].startswith(f"{field}[1] must have at most {LENGTH} tokens")
            alone = await post(client, path, more | {field: text}, 400)
            assert alone["error"]["message"].startswith(f"{field} must have at most {LENGTH} tokens")
            await post(client, path, more | {field: text, "truncate": True})
        await post(client, "/v1/embeddings", MODEL | {"input": text, "truncate_prompt_tokens": -1})
        empty = await post(client, "/v1/embeddings", MODEL | {"input": []}, 400)
        assert empty["error"]["param"] == "input"


async def test_reranking_sorts_documents_by_the_scores_of_pairs(encoding, encoder_of) -> None:
    scores = encoder_of("score").score(QUERY, TEXTS)
    order = np.argsort(-scores).tolist()
    async with encoding("score") as client:
        for path in ("/v1/rerank", "/v2/rerank"):
            body = MODEL | {"query": QUERY, "documents": list(TEXTS)}
            reply = await post(client, path, body)
            assert [each["index"] for each in reply["results"]] == order
            # Jina's default is to add the texts, Cohere's is not to
            assert {"document" in each for each in reply["results"]} == {path == "/v1/rerank"}
            without = await post(client, path, body | {"return_documents": False})
            assert not any("document" in each for each in without["results"])
            found = [each["relevance_score"] for each in reply["results"]]
            np.testing.assert_allclose(found, scores[order], atol=1e-6)
            best = await post(client, path, body | {"top_n": 2, "return_documents": True})
            assert [each["document"]["text"] for each in best["results"]] == [TEXTS[index] for index in order[:2]]
        documents = [{"text": text} for text in TEXTS]
        same = await post(client, "/v1/rerank", MODEL | {"query": QUERY, "documents": documents})
        assert [each["document"]["text"] for each in same["results"]] == [TEXTS[index] for index in order]
        tei = await post(client, "/rerank", {"query": QUERY, "texts": list(TEXTS), "return_text": True})
        assert [(each["index"], each["text"]) for each in tei] == [(index, TEXTS[index]) for index in order]
        raw = await post(client, "/rerank", {"query": QUERY, "texts": list(TEXTS), "raw_scores": True})
        logits = np.array([each["score"] for each in raw])
        np.testing.assert_allclose(1 / (1 + np.exp(-logits)), scores[order], atol=1e-6)


async def test_scores_of_one_text_with_each_and_of_pairs(encoding, encoder_of) -> None:
    wanted = encoder_of("score").score(QUERY, TEXTS)
    async with encoding("score") as client:
        reply = await post(client, "/score", {"text_1": QUERY, "text_2": list(TEXTS)})
        pairs = await post(client, "/v1/score", {"text_1": [QUERY] * 2, "text_2": list(TEXTS[:2])})
        error = await post(client, "/score", {"text_1": [QUERY] * 2, "text_2": list(TEXTS)}, 400)
    np.testing.assert_allclose([each["score"] for each in reply["data"]], wanted, atol=1e-6)
    np.testing.assert_allclose([each["score"] for each in pairs["data"]], wanted[:2], atol=1e-6)
    assert error["error"]["param"] == "text_1"


async def test_an_embedder_scores_by_the_cosine_of_vectors(encoding, encoder_of) -> None:
    vectors = encoder_of("embed").encode(TEXTS)
    query = encoder_of("embed").encode(QUERY)
    async with encoding("embed") as client:
        reply = await post(client, "/score", {"text_1": QUERY, "text_2": list(TEXTS)})
    np.testing.assert_allclose([each["score"] for each in reply["data"]], vectors @ query, atol=1e-5)


async def test_an_embedder_ranks_with_its_prompts(encoding, encoder_of) -> None:
    """As `encode_query` and `encode_document` of sentence-transformers do. Scores of two texts have no prompts."""
    encoder = encoder_of("embed")
    query = encoder.encode(QUERY, prompt_name="query")
    vectors = encoder.encode(TEXTS, prompt_name="document")
    scores = vectors @ query
    assert np.abs(scores - vectors @ encoder.encode(QUERY)).max() > 1e-3, "the prompt does not matter"
    async with encoding("embed") as client:
        reply = await post(client, "/v1/rerank", MODEL | {"query": QUERY, "documents": [*TEXTS, TEXTS[0]]})
        tei = await post(client, "/rerank", {"query": QUERY, "texts": [*TEXTS, QUERY]})
    found = {each["index"]: each["relevance_score"] for each in reply["results"]}
    np.testing.assert_allclose([found[index] for index in range(len(TEXTS))], scores, atol=1e-5)
    assert found[len(TEXTS)] == pytest.approx(found[0], abs=1e-6)
    inputs = [encoder.reader.read([QUERY], prompt=encoder.reader.prompt("query")), encoder.reader.read(TEXTS)]
    assert reply["usage"]["prompt_tokens"] == sum(len(each.ids) for each in inputs)
    found = {each["index"]: each["score"] for each in tei}
    np.testing.assert_allclose([found[index] for index in range(len(TEXTS))], scores, atol=1e-5)
    assert found[len(TEXTS)] == pytest.approx(encoder.encode(QUERY, prompt_name="document") @ query, abs=1e-5)


async def test_a_cross_encoder_says_which_text_of_a_pair_is_too_long(encoding) -> None:
    """A pair whose texts are too long together has the name of its second one."""
    long = "a " * (LENGTH + 1)
    half = "a " * (LENGTH - 10)
    bodies = [
        ("query", "/v1/rerank", {"query": long, "documents": ["a", "b"]}),
        ("query", "/rerank", {"query": long, "texts": ["a"]}),
        ("documents[2]", "/v2/rerank", {"query": "a", "documents": ["a", "a", long]}),
        ("documents[1]", "/v2/rerank", {"query": half, "documents": ["a", half]}),
        ("texts[1]", "/rerank", {"query": "a", "texts": ["b", long]}),
        ("text_1", "/score", {"text_1": long, "text_2": ["a", "b"]}),
        ("text_1[1]", "/v1/score", {"text_1": ["a", long], "text_2": ["a", "b"]}),
        ("text_2[1]", "/score", {"text_1": "a", "text_2": ["a", long]}),
        ("text_2", "/score", {"text_1": half, "text_2": half}),
    ]
    async with encoding("score") as client:
        for place, route, body in bodies:
            error = (await post(client, route, body, 400))["error"]
            assert (error["param"], error["code"]) == (place, "context_length_exceeded")
            beside = " with the other text of its pair" if half in str(body) and long not in str(body) else ""
            assert error["message"].startswith(f"{place} must have at most {LENGTH} tokens{beside}, this model's limit")
            await post(client, route, body | {"truncate": True})
    async with encoding("classify") as client:
        for place, inputs in (("inputs[1]", ["a", long]), ("inputs[1][0]", [["a"], [long, "a"]])):
            assert (await post(client, "/predict", {"inputs": inputs}, 400))["error"]["param"] == place


@pytest.mark.parametrize("prompts", [{}, {"prompts": {"query": "find this: "}}], ids=["no prompts", "prompts"])
async def test_an_embedder_says_which_text_of_a_pair_is_too_long(tmp_path, prompts) -> None:
    """Both texts of a pair go to the encoder together, and each text only once."""
    path = save_encoder(tmp_path, "bert", general=prompts)
    app = create_app(
        AsyncEngine(Encoder(EngineConfig(model=path, device="cpu", dtype="float32", task="embed"))),
        Settings(served_model_name="tiny"),
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    opened = httpx.AsyncClient(transport=transport, base_url="http://localhost")
    long = "a " * (LENGTH + 1)
    bodies = {
        "query": ("/v1/rerank", {"query": long, "documents": ["a", "b"]}),
        "documents[2]": ("/v2/rerank", {"query": "a", "documents": ["a", "a", long]}),
        "texts[1]": ("/rerank", {"query": "a", "texts": ["b", long]}),
        "text_1": ("/score", {"text_1": long, "text_2": ["a", "b"]}),
        "text_1[1]": ("/v1/score", {"text_1": ["a", long], "text_2": ["a", "b"]}),
        "text_2[1]": ("/score", {"text_1": "a", "text_2": ["a", long]}),
        "text_2": ("/score", {"text_1": "a", "text_2": long}),
    }
    async with app.router.lifespan_context(app), opened as client:
        await app.state.service.loaded()
        for place, (route, body) in bodies.items():
            error = (await post(client, route, body, 400))["error"]
            assert (error["param"], error["code"]) == (place, "context_length_exceeded")
            assert error["message"].startswith(f"{place} must have at most {LENGTH} tokens, this model's limit")


@pytest.mark.parametrize(
    "prompts",
    [
        {"query": "find this: ", "document": "read this: "},
        {"query": "find this: ", "passage": "here is: ", "corpus": "read this: "},
        {"search": "find this: "},
        {"passage": "here is: "},
    ],
    ids=lambda prompts: "-".join(prompts),
)
async def test_the_prompts_of_a_folder_are_found_as_sentence_transformers_does(tmp_path, prompts) -> None:
    package = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    general = {"prompts": prompts, "default_prompt_name": next(iter(prompts))}
    path = save_encoder(tmp_path, "bert", general=general)
    model = package.SentenceTransformer(str(path), device="cpu")
    wanted = model.encode_document(list(TEXTS)) @ model.encode_query(QUERY)
    encoder = Encoder(EngineConfig(model=path, device="cpu", dtype="float32", task="embed"))
    app = create_app(AsyncEngine(encoder), Settings(served_model_name="tiny"))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    opened = httpx.AsyncClient(transport=transport, base_url="http://localhost")
    async with app.router.lifespan_context(app), opened as client:
        await app.state.service.loaded()
        reply = await post(client, "/v2/rerank", MODEL | {"query": QUERY, "documents": list(TEXTS)})
    found = {each["index"]: each["relevance_score"] for each in reply["results"]}
    np.testing.assert_allclose([found[index] for index in range(len(TEXTS))], wanted, atol=1e-5)


async def test_a_bad_token_id_says_which_input_has_it(encoding) -> None:
    for field, path in (("input", "/v1/embeddings"), ("inputs", "/embed")):
        for bad in (100_000, 1 << 40):
            async with encoding("embed") as client:
                error = await post(client, path, MODEL | {field: [[5, 6], [7], [5, bad, 8]]}, 400)
            assert error["error"]["param"] == f"{field}[2]"
            assert error["error"]["message"].startswith(f"{field}[2] must hold token ids from 0 to")


async def test_classes_have_labels_and_probabilities(encoding, encoder_of) -> None:
    wanted = encoder_of("classify").classify(TEXTS)
    async with encoding("classify") as client:
        reply = await post(client, "/classify", {"input": list(TEXTS)})
        batch = await post(client, "/predict", {"inputs": [[text] for text in TEXTS]})
        one = await post(client, "/predict", {"inputs": TEXTS[0]})
        pair = await post(client, "/predict", {"inputs": [QUERY, TEXTS[0]]})
    for row, each, tei in zip(wanted, reply["data"], batch, strict=True):
        np.testing.assert_allclose(each["probs"], row, atol=1e-6)
        assert each["label"] == ("bad", "good")[row.argmax()] == tei[0]["label"]
        assert tei[0]["score"] == pytest.approx(row.max(), abs=1e-6)
    assert [each["label"] for each in one] == [each["label"] for each in batch[0]]
    assert [each["score"] for each in one] == pytest.approx([each["score"] for each in batch[0]], abs=1e-6)
    joint = encoder_of("classify").classify([(QUERY, TEXTS[0])])[0]
    assert pair[0]["score"] == pytest.approx(joint.max(), abs=1e-6)


async def test_teis_vectors_of_texts_and_tokens(encoding, encoder_of) -> None:
    encoder = encoder_of("embed")
    async with encoding("embed") as client:
        whole = await post(client, "/embed", {"inputs": list(TEXTS)})
        plain = await post(client, "/embed", {"inputs": TEXTS[0], "normalize": False})
        tokens = await post(client, "/embed_all", {"inputs": list(TEXTS)})
    np.testing.assert_allclose(whole, encoder.encode(TEXTS), atol=1e-6)
    np.testing.assert_allclose(plain[0], encoder.encode(TEXTS[0], params=PoolingParams(normalize=False)), atol=1e-6)
    for found, wanted in zip(tokens, encoder.pooled(TEXTS, params=PoolingParams(tokens=True)), strict=True):
        np.testing.assert_allclose(found, wanted.values, atol=1e-6)


async def test_sparse_vectors_have_words_and_weights(encoding, encoder_of) -> None:
    async with encoding("sparse") as client:
        reply = await post(client, "/embed_sparse", {"inputs": list(TEXTS)})
    for found, wanted in zip(reply, encoder_of("sparse").pooled(TEXTS), strict=True):
        assert [each["index"] for each in found] == wanted.indices.tolist()
        np.testing.assert_allclose([each["value"] for each in found], wanted.values, atol=1e-6)


@pytest.mark.parametrize(
    ("task", "path", "body"),
    [
        ("embed", "/v1/chat/completions", MODEL | {"messages": [{"role": "user", "content": "a"}]}),
        ("embed", "/v1/completions", MODEL | {"prompt": "a"}),
        ("embed", "/v1/messages", MODEL | {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("embed", "/classify", {"input": "a"}),
        ("embed", "/embed_sparse", {"inputs": "a"}),
        ("score", "/v1/embeddings", MODEL | {"input": "a"}),
        ("score", "/embed", {"inputs": "a"}),
        ("classify", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
async def test_a_route_for_another_task_is_refused_with_a_sentence(encoding, task, path, body) -> None:
    async with encoding(task) as client:
        error = await post(client, path, body, 400)
    text = error["error"]["message"]
    assert "This route needs a model for" in text


async def test_a_model_that_generates_refuses_the_routes_of_encoders(serving) -> None:
    bodies = {
        "/v1/embeddings": {"model": "fake", "input": "a"},
        "/v1/rerank": {"query": "a", "documents": ["b"]},
        "/score": {"text_1": "a", "text_2": "b"},
        "/v1/score": {"text_1": "a", "text_2": "b"},
        "/classify": {"input": "a"},
        "/embed": {"inputs": "a"},
        "/embed_all": {"inputs": "a"},
        "/embed_sparse": {"inputs": "a"},
        "/rerank": {"query": "a", "texts": ["b"]},
        "/predict": {"inputs": "a"},
    }
    async with serving() as client:
        for path, body in bodies.items():
            error = await post(client, path, body, 400)
            assert error["error"]["code"] == "unsupported_task", path


async def test_tokenize_counts_the_tokens_of_an_encoder(encoding, encoder_of) -> None:
    async with encoding("embed") as client:
        reply = await post(client, "/tokenize", {"prompt": TEXTS[0]})
    assert reply["tokens"] == encoder_of("embed").reader.read([TEXTS[0]])[0].ids.tolist()
    assert reply["max_model_len"] == LENGTH


@pytest.mark.parametrize("task", ["embed", "score", "classify", "sparse"])
async def test_fa_serve_info_names_the_routes_of_a_task(encoding, task: str) -> None:
    texts = {"input": "a", "inputs": "a", "query": "a", "documents": ["a"], "texts": ["a"], "text_1": "a", "text_2": "a"}
    fields = {
        "/v1/embeddings": "input",
        **dict.fromkeys(["/embed", "/embed_all", "/embed_sparse", "/predict"], "inputs"),
        **dict.fromkeys(["/v1/rerank", "/v2/rerank"], "query documents"),
        "/rerank": "query texts",
        **dict.fromkeys(["/score", "/v1/score"], "text_1 text_2"),
        "/classify": "input",
    }
    named = {word.strip(",") for word in ENCODER_ROUTES[task].replace(";", "").split() if word.startswith("/")}
    async with encoding(task) as client:
        replies = {
            path: await client.post(path, json=MODEL | {name: texts[name] for name in names.split()})
            for path, names in fields.items()
        }
    assert {path for path, reply in replies.items() if reply.status_code == 200} == named
    assert {reply.json()["error"]["code"] for reply in replies.values() if reply.status_code != 200} == {"unsupported_task"}
