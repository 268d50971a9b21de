"""The clients of OpenAI, Cohere and LangChain, unchanged, over tiny encoders. Those that are not installed are skipped."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import openai
import pytest
from encoder_folders import TEXTS
from fa_serve.server.app import create_app
from fa_serve.server.process import Server
from fa_serve.server.settings import Settings

from fa_serve.engine import AsyncEngine

QUERY = "why is it so?"


@contextmanager
def serving(encoder) -> Iterator[str]:
    """The address of a server of this process."""
    urls: list[str] = []
    ready = threading.Event()

    def announce(url: str) -> None:
        urls.append(url)
        ready.set()

    settings = Settings(served_model_name="tiny", log_level="error", api_keys=["secret"])
    server = Server(create_app(AsyncEngine(encoder), settings), "127.0.0.1", 0, 1.0, announce)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(20)
        yield urls[0]
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def embedder(encoder_of) -> Iterator[str]:
    with serving(encoder_of("embed")) as url:
        yield url


def test_openais_client_gets_vectors(embedder, encoder_of) -> None:
    wanted = encoder_of("embed").encode(TEXTS)
    with openai.OpenAI(base_url=f"{embedder}/v1", api_key="secret") as client:
        reply = client.embeddings.create(model="tiny", input=list(TEXTS))  # it asks for base64
        np.testing.assert_allclose([each.embedding for each in reply.data], wanted, atol=1e-6)
        plain = client.embeddings.create(model="tiny", input=list(TEXTS), encoding_format="float", dimensions=5)
        assert [len(each.embedding) for each in plain.data] == [5] * len(TEXTS)
        assert reply.usage.prompt_tokens == plain.usage.total_tokens > 0
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="tiny", input="a " * 100)
        assert caught.value.code == "context_length_exceeded"
    with openai.OpenAI(base_url=f"{embedder}/v1", api_key="other") as client, pytest.raises(openai.AuthenticationError):
        client.embeddings.create(model="tiny", input="a")


@pytest.mark.slow
def test_coheres_client_reranks(encoder_of) -> None:
    cohere = pytest.importorskip("cohere", reason="cohere is not installed")
    scores = encoder_of("score").score(QUERY, TEXTS)
    order = np.argsort(-scores).tolist()
    with serving(encoder_of("score")) as url:
        for kind in (cohere.ClientV2, cohere.Client):
            with kind(api_key="secret", base_url=url) as client:
                reply = client.rerank(model="tiny", query=QUERY, documents=list(TEXTS), top_n=3)
            assert [each.index for each in reply.results] == order[:3]
            np.testing.assert_allclose([each.relevance_score for each in reply.results], scores[order[:3]], atol=1e-6)


@pytest.mark.slow
def test_langchain_embeds_documents_and_queries(embedder, encoder_of) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    client = langchain.OpenAIEmbeddings(
        model="tiny", base_url=f"{embedder}/v1", api_key="secret", check_embedding_ctx_length=False
    )
    wanted = encoder_of("embed").encode(TEXTS)
    np.testing.assert_allclose(client.embed_documents(list(TEXTS)), wanted, atol=1e-6)
    np.testing.assert_allclose(client.embed_query(TEXTS[1]), wanted[1], atol=1e-6)
    client.client._client.close()
