"""APIs other than chat completions, which use the same conversation, prompt and answer.

dialect.py            what they share: a request that becomes a ChatRequest, an answer that is a ChatAnswer, its parts
anthropic_request.py  the request of Anthropic's Messages API, /v1/messages
anthropic_answer.py   its answer, as a message or as events
anthropic_replies.py  types of what it returns
responses_request.py  the request of OpenAI's Responses API, /v1/responses
responses_answer.py   its answer, as a response or as events
responses_replies.py  types of what it returns

The modules translate the form on the wire. Templates, tools, thoughts, limits and the engine are those of chat completions.
Neither API keeps state here: fields that refer to stored conversations, responses, images or files are refused by name.
"""
