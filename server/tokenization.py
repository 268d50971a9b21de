"""Prompts and conversations as token ids, and token ids as text.

    tokenization = Tokenization(engine, settings, costs)
    [tokens] = await tokenization.encode(["Once upon a time"], client)
    template = tokenization.template(body, tools)
    found = await tokenization.encode_chat(template, body, tools, {}, client)         # tokens, text and images

Threads run the tokenizer and the operator's chat template, so that a long prompt never holds up the event loop. Inputs of an
encoder are tokenized together with those of other requests (pooling/reading.py), or on the event loop if they are short and no
other request waits for its turn there. Long texts have a thread to themselves, because the tokenizer needs seconds for many
megabytes, and short texts should not wait for them. In each thread, clients take turns. A template that does not end is
interrupted after `template_timeout` seconds. Chat templates of requests are untrusted programs: they run one at a time in
another process, which is killed if it exceeds its limits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic_core import to_jsonable_python

from fa_serve.engine.images.processor import PromptMaker
from fa_serve.engine.pooling.inputs import EncoderInputs, Place, named_in_request
from fa_serve.engine.request.detokenizer import TextStream
from fa_serve.engine.request.params import schema_length
from fa_serve.sandbox.trials import Cancelled, Trial, TrialError, TrialLimits, TrialProcessError, Trials
from fa_serve.spec import ParameterError

from .answers.logprobs import TokenTexts
from .bounds.costs import BILL, Costs
from .bounds.deadline_thread import DeadlineThread
from .chat import template_process
from .chat.content_forms import PROBE, Conversation, shows_probe
from .chat.conversation import ChatRequest, TokenizeRequest, Tool
from .chat.special_tokens import Prompt, SpecialTokens
from .chat.templates import EncodedChat, Template
from .errors import RETRY_SECONDS, ApiError, BadRequest, Unavailable, parameter_refused, trials_failed
from .images.addresses import RequestImage
from .images.loader import ImageLoader
from .pooling.reading import SharedReading
from .setting_files import read_file
from .settings import Settings

if TYPE_CHECKING:
    from fa_serve.engine import AsyncEngine

# a chat template must accept at least one of these conversations, and write the text of its last message
SAMPLES: tuple[Conversation, ...] = (
    [{"role": "user", "content": PROBE}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROBE}],
    [{"role": "user", "content": [{"type": "text", "text": PROBE}]}],
)
T = TypeVar("T")
log = logging.getLogger("fa_serve.server")
MAX_TEMPLATES = 16  # parsed chat templates of requests to keep
LONG_TEXT = 1 << 16  # characters, which take the tokenizer some tens of milliseconds
SHORT_INPUTS = 1 << 12  # characters, which take the tokenizer less than half a millisecond
MAX_TEMPLATE_LENGTH = 1 << 16  # characters of a request's chat template; the longest of known models has about 20,000


class Tokenization:
    """May be used once the engine is loaded, because it uses the engine's tokenizer.

    chat_end: the special token with which the chat template ends a message of the assistant, if it is not one of the engine's
              end tokens; `find_chat_end` sets it
    """

    def __init__(self, engine: AsyncEngine, settings: Settings, costs: Costs):
        self._engine = engine
        self._costs = costs
        self._short = DeadlineThread("tokenizer")
        self._long = DeadlineThread("tokenizer of long texts")
        self._reading = SharedReading(self._short)
        self._request_templates = DeadlineThread("template")
        self._processing = DeadlineThread("processor of images")
        self._loader = ImageLoader(settings, lambda: engine.config)
        self._template_timeout = settings.template_timeout
        self._template_limits = TrialLimits("end", settings.template_timeout, settings.template_memory, "template")
        self._template_file = settings.chat_template
        self._operators_template = read_file("chat_template", settings.chat_template) if settings.chat_template else None
        self._allow_request_template = settings.allow_request_chat_template
        self._faults: dict[str, str] = {}  # by the text of one of the model's own templates
        self._special_tokens_in_content = settings.special_tokens_in_content
        self._own: dict[str, Template] = {}  # by text: the operator's and the model's, kept forever
        self._parsed = lru_cache(MAX_TEMPLATES)(self._parse)
        self.chat_end: int | None = None

    async def check_template(self) -> None:
        """Try the chat templates. Raises ValueError if the operator's template accepts no conversation, or does not end.

        A broken template of the model itself only causes a warning, because a server for completions can do without it. Chats
        that it cannot write are refused, and the error names its fault.
        """
        if self._operators_template is not None:
            text = self._engine.tokenizer.get_chat_template(self._operators_template, None)
            fault = await self._fault(self._own_template(text))
            if fault is not None:
                raise ValueError(f"chat_template {fault}, got {self._template_file}")
            return
        own = self._engine.tokenizer.chat_template
        for text in own.values() if isinstance(own, dict) else filter(None, [own]):
            template = self._own_template(text)
            template.fault = await self._fault(template)
            if (fault := template.fault) is not None:
                self._faults[text] = fault
                log.warning("the model's chat template %s: chats are refused until --chat-template replaces it", fault)

    async def _fault(self, template: Template) -> str | None:
        """What a template must do and does not do, in words that follow "chat_template"; None if it works."""

        def work() -> str | None:
            reason = None
            for messages in SAMPLES:
                try:
                    text = template.render(messages, None, {})
                except ApiError as error:
                    reason = reason or error.message.rstrip(".")
                else:
                    if shows_probe(text):
                        template.learn()
                        return None
                    done = "leaves out the text of" if text.strip() else "writes nothing for"
                    reason = reason or f"it {done} a message that says {PROBE}"
            return reason

        try:
            reason = await self._short.run(work, timeout=self._template_timeout)
        except asyncio.TimeoutError:
            return f"must end within {self._template_timeout:g} s (--template-timeout), and runs longer"
        return None if reason is None else f"must accept a user message ({reason})"

    @property
    def writes_chats(self) -> bool:
        """Whether there is a chat template that is not known to be broken."""
        return bool(self._operators_template or self._engine.tokenizer.chat_template) and not self._faults

    @property
    def writes_images(self) -> bool:
        """Whether the operator's chat template, or one of the model's, has places for images."""
        return any(template.writes_images for template in self._own.values())

    async def find_chat_end(self) -> None:
        """Look for the end token of the operator's chat template, or of the model's.

        The token is a property of the model, which was trained to end its messages with it. So it also applies to requests with
        their own template.
        """
        tokenizer = self._engine.tokenizer
        reader = self._engine.reader
        if tokenizer is None or reader is None:
            return
        try:
            template = self._own_template(tokenizer.get_chat_template(self._operators_template, None))
            closing = await self._short.run(template.closing, timeout=self._template_timeout)
        except (ValueError, asyncio.TimeoutError):  # there is no template, or it does not end
            return
        found = [name for name in self.special_tokens if closing.lstrip().startswith(name)]
        if not found:
            return
        end = self.special_tokens[max(found, key=len)]
        if end not in self._engine.eos_ids and end < reader.vocab_size:
            self.chat_end = end

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens, by name."""
        tokens = self._engine.tokenizer.added_tokens_decoder
        return {token.content: token_id for token_id, token in tokens.items() if token.special}

    @cached_property
    def _names(self) -> SpecialTokens:
        return SpecialTokens(self.special_tokens)

    @cached_property
    def _trials(self) -> Trials:
        """The process that applies the chat templates of requests."""
        assert self._engine.reader is not None
        return Trials(template_process.__file__, {"max_chars": self._engine.reader.max_chars}, self._template_limits)

    @cached_property
    def prompt_maker(self) -> PromptMaker:
        """Turns images into inputs of the model. It is loaded when the first image arrives. Raises ParameterError if it cannot
        be loaded."""
        reader = self._engine.reader
        assert reader is not None
        return PromptMaker.of_model(self._engine.config, reader)

    def expect_images(self) -> None:
        """Start the process that decodes images in the background, because the model takes images. Otherwise the first image
        would wait for seconds."""
        self._loader.start()
        if self.writes_chats and not self.writes_images:
            log.warning("the chat template has no place for images, which the model takes: --chat-template may replace it")

    def close(self) -> None:
        """End the processes that decode images and apply chat templates."""
        self._loader.close()
        if "_trials" in vars(self):
            self._trials.close()

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self._engine.tokenizer)

    def _thread_for(self, length: int) -> DeadlineThread:
        """The thread for a text of this many characters, or for this many tokens."""
        return self._short if length <= LONG_TEXT else self._long

    async def encode(self, prompts: Sequence[str | list[int]], client: str | None, special: bool = True) -> list[list[int]]:
        """Prompts as token ids.

        client:  whose prompts they are
        special: whether texts get the special tokens that the tokenizer adds to plain text
        """
        given = [prompt for prompt in prompts if not isinstance(prompt, str)]
        if len(given) == len(prompts):
            return given

        def work() -> list[list[int]]:
            found = []
            count = 0
            for prompt in prompts:
                found.append(self._ids(prompt, special, "prompt") if isinstance(prompt, str) else prompt)
                count += len(found[-1])
                self._require_few_ids(count)
            return found

        length = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return await self._thread_for(length).run(work, client)

    async def read_inputs(
        self,
        inputs: Sequence[str | tuple[str, str] | list[int]],
        client: str | None,
        field: str,
        *,
        places: Sequence[Place] | None = None,
        prompt: str = "",
        cuts: bool = False,
    ) -> EncoderInputs:
        """Texts and token ids as inputs of an encoder. Raises BadRequest.

        field:  the request's field that holds the inputs, for errors
        places: where each input is in the request, for errors; by default they are a list in `field`, or one input alone
        prompt: as in `InputReader.read`
        cuts:   whether inputs that are too long are cut: `truncate` of `InputReader.read`
        """
        reader = self._engine.inputs
        assert reader is not None

        length = sum(len(each) if isinstance(each, str | list) else sum(map(len, each)) for each in inputs)
        length += len(prompt) * len(inputs)
        bill = BILL.get()
        try:
            if length <= SHORT_INPUTS and bill is not None and not self._costs.is_busy:
                with self._costs.work(bill):
                    return reader.read(inputs, prompt=prompt, truncate=cuts)
            if length <= LONG_TEXT:
                return await self._reading.read(reader, inputs, length, client, prompt=prompt, cuts=cuts)
            return await self._long.run(lambda: reader.read(inputs, prompt=prompt, truncate=cuts), client)
        except ParameterError as error:
            raise parameter_refused(*named_in_request(error, field, len(inputs), places)) from None

    def template(self, body: ChatRequest | TokenizeRequest, tools: Sequence[Tool]) -> Template:
        """The chat template for a request: its own, else the operator's, else the model's. Raises BadRequest if there is none,
        and for a template of the request that the server does not allow or that is too long.
        """
        if body.chat_template is not None and not self._allow_request_template:
            raise BadRequest(
                "chat_template must be null: this server does not allow chat templates in requests.", param="chat_template"
            )
        if body.chat_template is not None and len(body.chat_template) > MAX_TEMPLATE_LENGTH:
            message = f"chat_template must have at most {MAX_TEMPLATE_LENGTH} characters, got {len(body.chat_template)}."
            raise BadRequest(message, param="chat_template", code="invalid_value")
        given = body.chat_template or self._operators_template
        try:
            # a model may have a second template, which is for requests with tools
            text = self._engine.tokenizer.get_chat_template(given, [{}] if tools else None)
        except ValueError:
            if isinstance(body, TokenizeRequest):  # the model may be an encoder, without completions
                raise BadRequest("This model has no chat template. Give a prompt instead.", param="messages") from None
            raise BadRequest("This model has no chat template. Use /v1/completions instead.", param="messages") from None
        return self._own_template(text) if body.chat_template is None else self._parsed(text)

    def _own_template(self, text: str) -> Template:
        if text not in self._own:
            self._own[text] = self._parse(text)
        return self._own[text]

    def _parse(self, text: str) -> Template:
        assert self._engine.reader is not None
        return Template(self._engine.tokenizer, text, self._engine.reader, self._faults.get(text))

    async def read_template(self, template: Template, body: ChatRequest | TokenizeRequest, client: str | None) -> None:
        """Analyse the template of a request in a thread, so that `template.reads` is quick afterwards. The operator's template
        and the model's need no thread, because they are analysed only once for all requests."""
        if body.chat_template is not None:
            await self._request_templates.run(lambda: template.names, client)

    async def encode_chat(
        self,
        template: Template,
        body: ChatRequest | TokenizeRequest,
        tools: Sequence[Tool],
        variables: dict[str, Any],
        client: str | None,
        salt: str | None = None,
    ) -> EncodedChat:
        """The prompt that the chat template makes from a conversation. Raises ApiError.

        salt: the result of `Isolation.cache_salt`, for the images
        """
        given_messages = body.messages or ()
        found = body.request_images(given_messages)
        trial = self._trials.trial() if body.chat_template is not None else None
        maker = None
        images: Sequence[Any] = ()
        if found:
            maker = await self._find_maker(found[0], client)
            await self._require_tool_images(template, maker, found, client, trial)
            images = await self._loader.load(found, client, salt)

        def render(trial: Trial | None) -> Prompt:
            forms = template.forms(trial)
            messages = [message.rendered(forms.in_parts(message.role_of_template)) for message in given_messages]
            given = (messages, [tool.rendered() for tool in tools] or None, variables)
            if self._special_tokens_in_content:
                return Prompt(template.render(*given, trial, body.prompt_end))
            return self._names.apply(partial(template.render, trial=trial, end=body.prompt_end), *given)

        def encode(prompt: Prompt) -> EncodedChat:
            return EncodedChat(self._ids(prompt.text, False, "messages", prompt.plain), prompt.text)

        def encode_with_images(prompt: Prompt) -> EncodedChat:
            assert maker is not None
            places = maker.num_places(prompt.text, prompt.plain)
            if places != len(images):
                message = (
                    f"The chat template must write a placeholder for each image, got {places} for {len(images)} images: leave "
                    "out the images, or ask the operator for another template (--chat-template)."
                )
                raise BadRequest(message, param="messages", code="invalid_value")
            try:
                made = maker.prompt(prompt.text, images, special_tokens=False, plain=prompt.plain)
            except ParameterError as error:
                raise parameter_refused(error, "messages") from None
            except MemoryError:  # when this process has to process pictures, because no other one can
                reason = "there is no memory for the images of this request"
                raise Unavailable(f"The server is not ready: {reason}.", retry_after=RETRY_SECONDS) from None
            return EncodedChat(list(made.tokens), prompt.text, made.images)

        length = sum(message.length() for message in given_messages)
        length += sum(tool.length(LONG_TEXT) for tool in tools) + schema_length(variables, LONG_TEXT)
        if trial is None and not found:
            return await self._apply_template(lambda _: encode(render(None)), client, None, length)
        prompt = await self._apply_template(render, client, trial and trial.following(), length)
        if found:
            return await self._processing.run(lambda: encode_with_images(prompt), client)
        return await self._thread_for(len(prompt.text)).run(lambda: encode(prompt), client)

    async def _apply_template(
        self, work: Callable[[Trial | None], T], client: str | None, trial: Trial | None, length: int
    ) -> T:
        """Run a function that applies a chat template, within its limits. Raises BadRequest, or Unavailable.

        trial:  the work in another process for the template of a request; None for the operator's template and the model's
        length: characters of the conversation
        """
        if trial is not None:
            try:
                return await self._request_templates.run(lambda: work(trial), client, trial=trial)
            except TrialError as error:
                text = f"chat_template must {error}."  # the error is "end within ..." (TrialLimits)
                raise BadRequest(text, param="chat_template", code="invalid_value") from None
            except (Cancelled, TrialProcessError) as error:
                raise trials_failed(error) from None
        try:
            return await self._thread_for(length).run(lambda: work(None), client, self._template_timeout)
        except asyncio.TimeoutError:  # in Python 3.10, this is not the built-in TimeoutError
            seconds = f"{self._template_timeout:g} seconds (--template-timeout)"
            text = f"The chat template must end within {seconds} for this conversation, got one that takes longer."
            raise BadRequest(text, param="messages", code="invalid_value") from None

    async def _find_maker(self, first: RequestImage, client: str | None) -> PromptMaker:
        """Return `prompt_maker`. Raises BadRequest, which names the first image of the request."""
        try:
            return await self._processing.run(lambda: self.prompt_maker, client)
        except ParameterError as error:
            message = f"{first.place} must be left out: the images of a request to this model must {error.rule}."
            raise BadRequest(message, param=first.place, code="invalid_value") from None

    async def _require_tool_images(
        self,
        template: Template,
        maker: PromptMaker,
        images: Sequence[RequestImage],
        client: str | None,
        trial: Trial | None,
    ) -> None:
        """Raise BadRequest, which names the first image in a tool result, if the chat template does not write such images."""
        first = next((image for image in images if image.is_of_tool), None)
        if first is None:
            return

        def work(trial: Trial | None) -> bool:
            return template.writes_tool_images(maker.image_text, trial)

        if not await self._apply_template(work, client, trial, 0):
            message = (
                f"{first.place} must not be in a tool result, because this model's chat template leaves out images there: put "
                "the image into a user message after the result."
            )
            raise BadRequest(message, param=first.place, code="invalid_value")

    async def token_strs(self, token_ids: list[int], client: str | None) -> list[str]:
        """The tokens as the vocabulary writes them."""

        def work() -> list[str]:
            return [str(name) for name in self._engine.tokenizer.convert_ids_to_tokens(token_ids)]

        return await self._thread_for(len(token_ids)).run(work, client)

    def info(self) -> dict[str, Any]:
        """The tokenizer's configuration and chat template, without the fields for files, paths, folders and objects. Other
        values that JSON cannot express become strings."""
        tokenizer = self._engine.tokenizer
        config = {
            name: value
            for name, value in to_jsonable_python(tokenizer.init_kwargs, fallback=str).items()
            if not name.endswith(("_file", "_path", "_object", "_dir"))
        }
        template = self._operators_template or tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return config | {"tokenizer_class": type(tokenizer).__name__, "chat_template": template}

    async def decode(self, token_ids: list[int], client: str | None) -> str:
        """The text of token ids. Raises BadRequest for more than this model's context can hold, or for unknown ids."""
        limit = self._engine.max_model_len
        if len(token_ids) > limit:
            raise BadRequest(f"tokens must have at most max_model_len = {limit} ids, got {len(token_ids)}.", param="tokens")
        text, largest, last = await self._decoded(token_ids, client)
        if text is None:
            message = f"tokens must hold token ids from 0 to {last}, got {largest}."
            raise BadRequest(message, param="tokens", code="invalid_value")
        return text

    async def echo(self, prompt: list[int], client: str | None) -> str:
        """The text of a prompt. Raises BadRequest for an id that the model knows and the tokenizer does not."""
        text, largest, last = await self._decoded(prompt, client)
        if text is None:
            message = (
                f"With echo, prompt must hold only token ids that have a text, from 0 to {last}, got {largest}. Leave out echo "
                "or the id."
            )
            raise BadRequest(message, param="prompt", code="invalid_value")
        return text

    async def continuation(self, prompt: list[int], token_ids: list[int], skip_special: bool, client: str | None) -> str:
        """The text that token ids add to a prompt, as the engine writes it."""

        def work() -> str:
            stream = TextStream(self._engine.tokenizer.backend_tokenizer, prompt, skip_special_tokens=skip_special)
            return "".join(map(stream.push, token_ids))

        return await self._thread_for(len(token_ids)).run(work, client)

    async def _decoded(self, token_ids: list[int], client: str | None) -> tuple[str | None, int, int]:
        """The text, the largest of these ids, and the largest id that has a text. The text is None if one of these has none."""
        tokenizer = self._engine.tokenizer

        def work() -> tuple[str | None, int, int]:
            largest = max(token_ids, default=0)
            last = len(tokenizer) - 1
            return (None if largest > last else str(tokenizer.decode(token_ids)), largest, last)

        return await self._thread_for(len(token_ids)).run(work, client)

    def _require_few_ids(self, count: int) -> None:
        assert self._engine.reader is not None
        limit = self._engine.reader.max_ids
        if count > limit:
            message = f"The prompts of a request must have at most {limit} tokens in total, got more."
            raise BadRequest(message, param="prompt", code="invalid_value")

    def _ids(self, text: str, special: bool, param: str, plain: Sequence[tuple[int, int]] = ()) -> list[int]:
        assert self._engine.reader is not None
        try:
            return self._engine.reader.encode(text, special, plain)
        except ParameterError as error:
            raise parameter_refused(error, param) from None
