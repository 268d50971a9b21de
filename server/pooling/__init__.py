"""Routes of encoders: embeddings, reranking, scores and classes, in the forms of OpenAI, Cohere and Jina, vLLM and TEI.

    requests   the bodies, as strict pydantic models
    replies    the replies, as typed dictionaries
    answer     one request: its inputs as token ids, what the engine gives for them, errors
    vectors    vectors as JSON
    routes     the endpoints

They pass the same middleware, turns, bounds and queue as generation. Left out: the encoder itself (fa_serve.engine.pooling).
"""
