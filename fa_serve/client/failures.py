"""What a client says when a server cannot be reached, refuses, or does not answer as OpenAI's API does.

except httpx.HTTPError as error:
    raise ChatError(connection_failed(url, error))
if reason := refusal(response): ...
name = first_model(response)             # a ValueError says what is wrong
"""

from __future__ import annotations

import httpx

NO_SERVER = "start a server with fa-serve serve, or give the address of one with --url"
NO_KEY = "pass a key with --key, or in the environment variable FA_SERVE_API_KEY"


def connection_failed(url: object, error: httpx.HTTPError) -> str:
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"no server answers at {url} ({reason}): {NO_SERVER}"
    return f"the connection to {url} was lost ({reason}): check the server's log, and try again"


def refusal(response: httpx.Response) -> str | None:
    """Why a server refuses, in its words, or None if it does not."""
    if not response.is_error:
        return None
    try:
        reason = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.url} answers with status {response.status_code}: give the address of a server that has OpenAI's API"
    # the server's message names headers, but the user of a command gives a key
    return f"{reason} ({NO_KEY})" if response.status_code == httpx.codes.UNAUTHORIZED else reason


def first_model(response: httpx.Response) -> str:
    """The first model of the answer to /v1/models. Raises ValueError if there is none."""
    if reason := refusal(response):
        raise ValueError(reason)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, TypeError, IndexError):
        raise ValueError(f"{response.url} lists no model: give one with --model, or another server with --url") from None
