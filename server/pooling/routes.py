"""The endpoints of encoders. Each declares its body and its reply; `PoolingWork` does the work."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import to_json

from fa_serve.engine import PoolingParams

from ..answers.size import SMALL
from ..answers.streaming import WholeReply
from ..replies import ErrorReply
from ..service import Service
from .answer import PoolingWork
from .replies import (
    ClassificationList,
    EmbeddingList,
    RerankReply,
    ScoreList,
    TeiPrediction,
    TeiRank,
    TeiWeight,
)
from .requests import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TeiEmbedRequest,
    TeiInputs,
    TeiPredictRequest,
    TeiRerankRequest,
)
from .vectors import FLOAT_BYTES, FORMAT_BYTES, embedding_list, joined, numbers, plain_list

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": ErrorReply,
        "description": "The request is wrong, the model has another task, or the queue is full (429).",
    },
    "5XX": {"model": ErrorReply, "description": "The server failed, or it is not ready (503)."},
}
RERANK_VERSION = "2"

pooling_router = APIRouter(responses=ERRORS)


class _Call:
    """The first steps of every endpoint. field: the field of the body that holds the inputs"""

    def __init__(self, body: PoolingRequest, request: Request, field: str) -> None:
        request.scope["state"]["user"] = body.user
        self.service: Service = request.app.state.service
        self.service.require_model(getattr(body, "model", None))
        self.work = PoolingWork(self.service, request, field, body.KNOWN, body.priority)

    def reply(self, work: Any) -> Response:
        settings = self.service.settings
        return WholeReply(work, self.service.hold_bytes, settings.request_timeout, settings.send_timeout)


@pooling_router.post("/v1/embeddings", response_model=EmbeddingList, tags=["OpenAI"])
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Embed texts: one vector for each."""
    call = _Call(body, request, "input")
    service = call.service
    form = body.encoding_format or "float"

    async def work() -> bytes:
        service.require_task("embed")
        params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize)
        size = service.vector_size(body.dimensions) * FORMAT_BYTES[form]
        prompt = call.work.prompt(body.prompt_name)
        async with call.work.computed(body.inputs(), params, prompt=prompt, cuts=body.cuts, size=size) as found:
            tail = {"model": service.model_name, "usage": found.usage()}

            def write() -> bytes:
                return joined(embedding_list(found.values, form, tail))

            return write() if size * len(found.values) <= SMALL else await service.write(write, call.work.key)

    return call.reply(work)


@pooling_router.post("/v1/rerank", response_model=RerankReply, tags=["Cohere and Jina"])
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Rank documents by how well they match a query, the best first. By default, the reply contains their texts."""
    return _ranked(body, request, body.return_documents is not False)


@pooling_router.post("/v2/rerank", response_model=RerankReply, tags=["Cohere and Jina"])
async def rerank_without_texts(body: RerankRequest, request: Request) -> Response:
    """Rank documents by how well they match a query, the best first. By default, the reply does not contain their texts."""
    return _ranked(body, request, bool(body.return_documents))


def _ranked(body: RerankRequest, request: Request, with_texts: bool) -> Response:
    call = _Call(body, request, "documents")

    async def work() -> bytes:
        texts = body.texts()
        scores, usage = await call.work.scores([(body.query, text) for text in texts], cuts=body.cuts, ranks=True)
        best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
        if with_texts:
            results = [each | {"document": {"text": texts[each["index"]]}} for each in results]
        meta = {"api_version": {"version": RERANK_VERSION}}
        head = {"id": call.work.name, "model": call.service.model_name}

        def write() -> bytes:
            return to_json(head | {"results": results, "usage": usage, "meta": meta})

        letters = sum(len(texts[index]) for index in best) if with_texts else 0
        return write() if letters <= SMALL else await call.service.write(write, call.work.key)

    return call.reply(work)


@pooling_router.post("/score", response_model=ScoreList, tags=["Pooling"])
@pooling_router.post("/v1/score", response_model=ScoreList, tags=["Pooling"])
async def score(body: ScoreRequest, request: Request) -> Response:
    """Score pairs of texts."""
    call = _Call(body, request, "text_2")

    async def work() -> bytes:
        scores, usage = await call.work.scores(body.pairs(), cuts=body.cuts)
        data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores)]
        return to_json(_head(call) | {"data": data, "usage": usage})

    return call.reply(work)


@pooling_router.post("/classify", response_model=ClassificationList, tags=["Pooling"])
async def classify(body: ClassifyRequest, request: Request) -> Response:
    """Classify texts: the most likely class of each, and the probabilities of all classes."""
    call = _Call(body, request, "input")

    async def work() -> bytes:
        labels = call.service.labels()
        async with call.work.computed(body.texts(), PoolingParams(), cuts=body.cuts, size=FLOAT_BYTES * len(labels)) as found:
            data = [
                {
                    "index": index,
                    "label": labels[int(values.argmax())],
                    "probs": numbers(values),
                    "num_classes": len(labels),
                }
                for index, values in enumerate(found.values)
            ]
            return to_json(_head(call) | {"data": data, "usage": found.usage()})

    return call.reply(work)


@pooling_router.post("/embed", response_model=list[list[float]], tags=["TEI"])
async def tei_embed(body: TeiEmbedRequest, request: Request) -> Response:
    """Embed texts: one vector for each, in the form of text-embeddings-inference."""
    params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize is not False)
    return await _tei_vectors(body, request, params, ("embed",))


@pooling_router.post("/embed_all", response_model=list[list[list[float]]], tags=["TEI"])
async def tei_embed_all(body: TeiInputs, request: Request) -> Response:
    """Embed texts: one vector for each token, in the form of text-embeddings-inference."""
    return await _tei_vectors(body, request, PoolingParams(tokens=True, normalize=None), ("embed", "token_embed"))


@pooling_router.post("/embed_sparse", response_model=list[list[TeiWeight]], tags=["TEI"])
async def tei_embed_sparse(body: TeiInputs, request: Request) -> Response:
    """Embed texts with a sparse encoder: weights of tokens of the vocabulary, in the form of text-embeddings-inference."""
    call = _Call(body, request, "inputs")

    async def work() -> bytes:
        call.service.require_task("sparse")
        prompt = call.work.prompt(body.prompt_name)
        async with call.work.computed(
            body.items(), PoolingParams(), prompt=prompt, cuts=body.truncate, size=SMALL // 16
        ) as found:

            def write() -> bytes:
                rows = []
                for each in found.pooled:
                    assert each.indices is not None
                    pairs = zip(each.indices.tolist(), numbers(each.values), strict=True)
                    rows.append([{"index": index, "value": value} for index, value in pairs])
                return to_json(rows)

            return await call.service.write(write, call.work.key)

    return call.reply(work)


@pooling_router.post("/rerank", response_model=list[TeiRank], tags=["TEI"])
async def tei_rerank(body: TeiRerankRequest, request: Request) -> Response:
    """Rank texts by how well they match a query, the best first, in the form of text-embeddings-inference."""
    call = _Call(body, request, "texts")

    async def work() -> bytes:
        pairs = [(body.query, text) for text in body.texts]
        scores, _ = await call.work.scores(pairs, cuts=body.truncate, raw=bool(body.raw_scores), ranks=True)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])
        more = [{"text": text} if body.return_text else {} for text in body.texts]
        return to_json([{"index": index, "score": scores[index]} | more[index] for index in best])

    return call.reply(work)


@pooling_router.post("/predict", response_model=list[TeiPrediction] | list[list[TeiPrediction]], tags=["TEI"])
async def tei_predict(body: TeiPredictRequest, request: Request) -> Response:
    """Classify texts: all classes of each, the most likely first, in the form of text-embeddings-inference."""
    call = _Call(body, request, "inputs")

    async def work() -> bytes:
        labels = call.service.labels()
        params = PoolingParams(activation="none" if body.raw_scores else "default")
        async with call.work.computed(body.items(), params, cuts=body.truncate, size=64 * len(labels)) as found:
            rows = []
            for values in found.values:
                pairs = sorted(zip(numbers(values), labels, strict=True), key=lambda pair: -pair[0])
                rows.append([{"label": label, "score": value} for value, label in pairs])
            return to_json(rows if body.is_batch else rows[0])

    return call.reply(work)


async def _tei_vectors(body: TeiInputs, request: Request, params: PoolingParams, tasks: tuple[str, ...]) -> Response:
    call = _Call(body, request, "inputs")
    service = call.service

    async def work() -> bytes:
        service.require_task(*tasks)
        size = service.vector_size(params.dimensions) * FLOAT_BYTES
        prompt = call.work.prompt(body.prompt_name)
        async with call.work.computed(body.items(), params, prompt=prompt, cuts=body.truncate, size=size) as found:

            def write() -> bytes:
                return joined(plain_list(found.values))

            total = sum(values.size for values in found.values) * FLOAT_BYTES
            service.require_size(total, "inputs", ["inputs"])
            return write() if total <= SMALL else await service.write(write, call.work.key)

    return call.reply(work)


def _head(call: _Call) -> dict[str, Any]:
    return {"id": call.work.name, "object": "list", "created": int(time.time()), "model": call.service.model_name}
