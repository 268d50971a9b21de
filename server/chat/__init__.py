"""What is special about chats: conversations become prompts, and texts become messages.

conversation.py   the request: messages, tools, response_format
templates.py      the chat template, which writes the prompt
template_process.py   the process that applies the chat template of a request
answer.py    the answer to a chat
messages.py       generated text as the fields of a message, with the help of the two readers below
reasoning.py      reader of thoughts: <think>...</think>
tools.py          reader of tool calls; tool_call.py parses a single call
grammar.py        grammars for answers that may have thoughts or tool calls besides what the request asks for
tool_schemas.py   JSON schemas of tool calls
"""
