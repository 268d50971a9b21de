"""The HTTP service: OpenAI's API over an `fa_serve.engine.AsyncEngine`. Installed as `fa_serve.server`.

    app = create_app(AsyncEngine(config), Settings())        # from fa_serve.server.app and .settings

    app.py          the application: middleware, routes and lifespan put together
    routes.py       the endpoints, each a few lines
    schemas.py      requests as pydantic models; an unknown field is an error
    replies.py      replies as typed dictionaries
    generation.py   one request's sequences, and how OpenAI writes them down: whole or as chunks
    messages.py     a chat's answer as thoughts (reasoning.py), content and tool calls (tools.py, grammar.py)
    templates.py    chat templates
    sampling.py     a request's fields as the engine's parameters
    logprobs.py     log-probabilities in OpenAI's two shapes
    service.py      what the handlers share: readiness, admission, the tokenizer
    streaming.py    server-sent events, clients that leave, time limits
    guard.py        plain ASGI middleware: request ids, API keys, body size
    errors.py       every error in OpenAI's shape; no other file knows a status code's wording
    metrics.py      Prometheus
    traces.py       OpenTelemetry spans, an extra
    settings.py     one table of settings: flags, environment, TOML or YAML file
    process.py      uvicorn, and what signals mean
    logs.py         the start-up report and the log
    chat.py, bench.py   clients: a conversation in the terminal, a load with percentiles
    page.html       the playground at /

Left out: everything about tensors and scheduling, which the engine owns.
"""
