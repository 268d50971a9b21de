"""What is special about chats: conversations become prompts, and texts become messages.

conversation.py       the request: messages, tools, response_format
templates.py          the chat template, which writes the prompt
template_process.py   the process that applies the chat template of a request
content_forms.py      whether a template reads a message's content as a string or as a list of parts
special_tokens.py     keeps the names of special tokens in a client's texts plain text
answer.py             the answer to a chat
messages.py           generated text as the fields of a message, with the help of the two readers below
reasoning.py          reader of thoughts: <think>...</think>
tools.py              reader of tool calls; tool_call.py parses a single call
grammar.py            grammars for answers that may have thoughts or tool calls besides what the request asks for
tool_schemas.py       JSON schemas of tool calls
"""
