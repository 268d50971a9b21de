"""The cache of embeddings, and an engine that serves images beside other requests."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from image_cases import GREEDY, Case, answer

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.images.encoder import ImageEncoder
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.runner.cuda_graphs import StepGraphs
from fa_serve.engine.runner.padded_steps import Shape
from fa_serve.engine.scheduler.prompt_share import PromptShare
from fa_serve.hf.images import ImageReader
from fa_serve.spec import ParameterError


@pytest.fixture(scope="module")
def llava() -> Case:
    return Case("llava")


@pytest.fixture(scope="module")
def gemma3() -> Case:
    return Case("gemma3")


def test_embeddings_are_kept_within_their_budget(llava: Case) -> None:
    reader = ImageReader(llava.model)
    size = reader.encode(llava.inputs[0]).num_bytes
    encoder = ImageEncoder(reader, max_bytes=size)
    first, second = llava.images
    for image in (first, first, second, second, first):
        encoder.features([image])
        encoder.check_integrity()
    assert encoder.num_encoded == 3
    nothing = ImageEncoder(reader, max_bytes=size - 1)
    nothing.features([first])
    nothing.features([first])
    nothing.check_integrity()
    assert (nothing.num_encoded, nothing.num_bytes) == (2, 0)


def test_a_prefix_is_shared_with_the_same_image_alone(llava: Case) -> None:
    engine = llava.engine()
    first, second = llava.images
    ids = llava.prompt(0, text=7)
    assert answer(engine, ids, first) == llava.generate(ids, 0)
    completion = engine.generate([ids], GREEDY, images=[[first]])[0]
    assert list(completion.token_ids) == llava.generate(ids, 0)
    assert engine.stats().num_cached_tokens == 8
    assert answer(engine, ids, second) == llava.generate(ids, 1)
    assert engine.stats().num_cached_tokens == 8 + 4, "one page is before the image"


def test_evicted_embeddings_are_computed_again(llava: Case) -> None:
    engine = llava.engine(image_cache_bytes=0, max_num_batched_tokens=4, max_num_seqs=2)
    ids = llava.prompt(0, 1)
    assert answer(engine, ids, *llava.images) == llava.generate(ids, 0, 1)


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl"])
def test_preempted_requests_with_images(name: str) -> None:
    """Pictures, blocks that attend both ways, and positions on several axes: the tokens are those of `generate`."""
    case = Case(name)
    pages = -(-(3 + case.count + 1 + 6) // 4) + 6
    engine = case.engine(num_pages=pages, max_model_len=4 * pages, prefix_caching=False)
    given = [(case.prompt(0, text=3), [0]), (case.prompt(1, text=4), [1]), (list(range(30, 36)), [])]
    images = [[case.images[n] for n in numbers] for _, numbers in given]
    together = engine.generate([ids for ids, _ in given], GREEDY, images=images)
    assert engine.stats().num_preemptions > 0
    for (ids, numbers), output in zip(given, together, strict=True):
        assert list(output.token_ids) == case.generate(ids, *numbers)
    engine.check_integrity()


def test_images_of_several_requests_are_encoded_together(llava: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llava.engine()
    reader = engine._runner.images.reader
    answer(engine, llava.prompt(0), llava.images[0])
    engine._runner.images.forget()
    sizes: list[int] = []
    own = reader.encode_all
    monkeypatch.setattr(reader, "encode_all", lambda images: sizes.append(len(images)) or own(images))
    given = [(llava.prompt(0), [0]), (llava.prompt(1), [1]), (llava.prompt(1, 0), [1, 0])]
    outputs = engine.generate([x for x, _ in given], GREEDY, images=[[llava.images[n] for n in own] for _, own in given])
    assert sizes == [2], "two pictures of three requests"
    for (ids, numbers), output in zip(given, outputs, strict=True):
        assert list(output.token_ids) == llava.generate(ids, *numbers)


def test_an_image_that_fails_ends_its_own_request(llava: Case, caplog: pytest.LogCaptureFixture) -> None:
    engine = llava.engine()
    first = llava.prompt(0)
    answer(engine, first, llava.images[0])
    wrong = ImageInput.of({**llava.inputs[1], "pixel_values": torch.zeros(1, 3, 30, 28)})
    given = [(llava.prompt(1), wrong), (first, llava.images[0]), (llava.prompt(1, text=8), llava.images[1])]
    engine._runner.images.forget()
    outputs = engine.generate([ids for ids, _ in given], GREEDY, images=[[image] for _, image in given])
    assert [output.finish_reason for output in outputs] == ["error", "length", "length"]
    assert outputs[0].error is not None
    assert outputs[0].error.code == "image_failed"
    assert "image 1 of 1" in outputs[0].error.message
    assert "an image could not be encoded; its request ends with an error: ValueError" in caplog.text
    assert list(outputs[1].token_ids) == llava.generate(first, 0)
    assert list(outputs[2].token_ids) == llava.generate(given[2][0], 1)
    engine.check_integrity()


def fail_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The towers have no memory when they are asked next. Returns what they do, call by call."""
    reader = engine._runner.images.reader
    own = reader.encode_all
    calls: list[str] = []

    def encode_all(images: Any) -> Any:
        calls.append("encoded" if calls else "failed")
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no memory")
        return own(images)

    monkeypatch.setattr(reader, "encode_all", encode_all)
    return calls


def test_a_first_image_that_fails_does_not_tell_how_tokens_attend(gemma3: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = gemma3.engine()
    calls = fail_once(engine, monkeypatch)
    with pytest.raises(ParameterError, match="images must be images that the model's vision tower can encode"):
        answer(engine, gemma3.prompt(0), gemma3.images[0])
    ids = gemma3.prompt(1)
    assert answer(engine, ids, gemma3.images[1]) == gemma3.generate(ids, 1)
    assert calls[:2] == ["failed", "encoded"]
    assert engine._runner.images._two_way == "images"


def test_an_image_that_fails_once_is_encoded_for_the_next_request(llava: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llava.engine()
    ids = llava.prompt(0)
    answer(engine, ids, llava.images[0])
    encoder = engine._runner.images
    encoder.forget()
    engine._scheduler.forget_cache()
    calls = fail_once(engine, monkeypatch)
    completion = engine.generate([ids], GREEDY, images=[[llava.images[0]]])[0]
    assert completion.finish_reason == "error"
    encoder.check_integrity()
    assert answer(engine, ids, llava.images[0]) == llava.generate(ids, 0)
    assert calls == ["failed", "encoded"]
    encoder.check_integrity()


def test_a_request_does_not_share_the_failure_of_one_before(llava: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one ends in the step whose towers fail, which computes none of its image's tokens."""
    engine = llava.engine(max_num_batched_tokens=4, max_num_seqs=2, prefix_caching=False)
    ids = llava.prompt(0)
    answer(engine, ids, llava.images[0])
    encoder = engine._runner.images
    encoder.forget()
    calls = fail_once(engine, monkeypatch)
    engine.add_request("first", ids, GREEDY, images=[llava.images[0]])
    [output] = engine.step()
    assert output.error is not None
    assert (output.request_id, output.error.code) == ("first", "image_failed")
    assert calls == ["failed"]
    encoder.check_integrity()
    engine.add_request("second", ids, GREEDY, images=[llava.images[0]])
    tokens: dict[str, list[int]] = {"second": []}
    reasons: dict[str, str | None] = {}
    while engine.has_unfinished():
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            reasons[output.request_id] = output.finish_reason
        engine.check_integrity()
        encoder.check_integrity()
    assert reasons == {"second": "length"}
    assert tokens == {"second": llava.generate(ids, 0)}
    assert calls == ["failed", "encoded"]


@pytest.mark.parametrize("limit", [None, 1], ids=["at-once", "in-parts"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyError("broken")])
def test_towers_that_raise_end_no_text_in_their_step(
    llava: Case,
    error: Exception,
    limit: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One text decodes in the step, the prompt of another one begins in it."""
    monkeypatch.setattr(PromptShare, "image_limit", lambda *_, **__: limit)
    engine = llava.engine(target_itl=15.0)
    ids = llava.prompt(0)
    answer(engine, ids, llava.images[0])
    encoder = engine._runner.images
    encoder.forget()
    most = engine._scheduler.max_num_batched_tokens
    texts = {"decodes": [5, 6, 7], "begins": list(range(30, 36))}
    expected = {name: answer(engine, text) for name, text in texts.items()}
    engine.add_request("decodes", texts["decodes"], GREEDY)
    tokens = {name: [] for name in texts}
    tokens["decodes"] += [token for output in engine.step() for token in output.token_ids]
    engine.add_request("begins", texts["begins"], GREEDY)
    engine.add_request("image", llava.prompt(1), GREEDY, images=[llava.images[1]])
    batches = []
    own = engine._runner.launch
    monkeypatch.setattr(engine._runner, "launch", lambda batch: batches.append(batch) or own(batch))

    def encode(images: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(encoder, "_encode", encode)
        outputs = engine.step()
    assert batches[0].towers is not None
    assert batches[0].towers.limit == limit
    assert {chunk.sequence.request.request_id for chunk in batches[0].chunks} >= {*texts}
    assert "1 images could not be encoded; their requests end with an error" in caplog.text
    reasons: dict[str, str | None] = {}
    while outputs or engine.has_unfinished():
        for output in outputs:
            reasons[output.request_id] = output.finish_reason
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        outputs = engine.step() if engine.has_unfinished() else []
    assert reasons == {"decodes": "length", "begins": "length", "image": "error"}
    assert tokens == expected | {"image": []}
    assert engine._scheduler.max_num_batched_tokens == most, "the towers failed, not the step"
    engine.check_integrity()
    encoder.check_integrity()
    ids = llava.prompt(1)
    assert answer(engine, ids, llava.images[1]) == llava.generate(ids, 1)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("pausing", [False, True])
def test_no_more_of_a_prompt_is_computed_once_an_image_has_failed(
    llava: Case, depth: int, pausing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says which image it was. A text that decodes meanwhile goes on."""
    if pausing:
        monkeypatch.setattr(PromptShare, "image_limit", lambda *_, **__: 1)
    engine = llava.engine(max_num_batched_tokens=8, max_num_seqs=2, target_itl=15.0)
    engine._steps.depth = depth
    encoder = engine._runner.images
    text = [5, 6, 7]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    expected = answer(engine, text, params=params)
    answer(engine, llava.prompt(0), llava.images[0])
    wrong = ImageInput.of({**llava.inputs[1], "pixel_values": torch.zeros(1, 3, 30, 28)})
    ids = llava.prompt(0, 1) + list(range(30, 90))
    engine.add_request("text", text, params)
    engine.step()
    engine.add_request("image", ids, GREEDY, images=[llava.images[0], wrong])
    sequence = engine._scheduler.sequences["image"]
    computed = 0
    tokens: list[int] = []
    while engine.has_unfinished():
        computed = max(computed, sequence.num_computed)
        for output in engine.step():
            if output.request_id == "text":
                tokens += output.token_ids
            else:
                assert output.error is not None
                assert output.error.code == "image_failed"
                assert "image 2 of 2" in output.error.message
        engine.check_integrity()
        encoder.check_integrity()
    assert sequence.finish_reason == "error"
    assert computed < 30 < len(ids), "the text behind the image is not computed"
    assert tokens == expected[-len(tokens) :]
    assert len(tokens) >= 29
    fine = llava.prompt(0, 1)
    assert answer(engine, fine, *llava.images) == llava.generate(fine, 0, 1)


def test_a_failed_image_takes_one_row(llava: Case) -> None:
    """A device without room for an image has room for what stands for it."""
    encoder = llava.engine()._runner.images
    failed = encoder.reader.failed(llava.inputs[0])
    assert failed.embeds.shape == (4, encoder.reader.hidden)
    assert bool(failed.embeds.isnan().all())
    assert failed.num_bytes == encoder.reader.hidden * failed.embeds.element_size()


def test_a_failed_image_is_kept_for_those_that_hold_it(llava: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llava.engine()
    encoder = engine._runner.images
    calls = fail_once(engine, monkeypatch)
    image = llava.images[0]
    encoder.hold(image.key)
    for _ in range(2):
        assert encoder.features([image])[image.key].failed
        assert encoder.is_encoded(image.key)
        encoder.check_integrity()
    encoder.release(image.key)
    assert (encoder.is_encoded(image.key), encoder.num_bytes) == (False, 0)
    encoder.check_integrity()
    assert not encoder.features([image])[image.key].failed
    assert calls == ["failed", "encoded"]


def test_a_failed_image_is_made_when_the_memory_of_its_forward_is_free(llava: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error holds the frames that it came through, and these hold tensors."""
    engine = llava.engine()
    reader = engine._runner.images.reader
    own = reader.failed
    handled: list[object] = []

    def refuse(images: Any) -> Any:
        handled.append(sys.exc_info()[1])
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(reader, "encode_all", refuse)
    monkeypatch.setattr(reader, "failed", lambda inputs: handled.append(sys.exc_info()[1]) or own(inputs))
    found = engine._runner.images.features(llava.images)
    assert [each.failed for each in found.values()] == [True, True]
    assert handled == [None] * 5, "both together, each alone, and what stands for each"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyError("broken")])
def test_a_failed_step_of_towers_alone_ends_the_requests_that_need_its_images(
    llava: Case, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = llava.engine(max_num_seqs=1)
    engine._steps.depth = 1
    most = engine._scheduler.max_num_batched_tokens
    engine.add_request("text", [5, 6, 7], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    engine.step()
    for name, number in (("encoded", 0), ("first", 1), ("same", 1)):  # the first image of an engine is encoded when it comes
        engine.add_request(name, llava.prompt(number), GREEDY, images=[llava.images[number]])

    def advance(work: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner.images, "advance", advance)
        outputs = {output.request_id: output for output in engine.step()}
    ended = {name: output.finish_reason for name, output in outputs.items()}
    assert ended == {"text": "length", "first": "error", "same": "error"}
    assert outputs["first"].error is not None
    assert outputs["first"].error.code == "step_failed"
    assert "2 requests end with an error" in caplog.text
    assert engine._scheduler.max_num_batched_tokens == most, "the step had no tokens"
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert tokens == {"encoded": llava.generate(llava.prompt(0), 0)}
    ids = llava.prompt(1)
    assert answer(engine, ids, llava.images[1]) == llava.generate(ids, 1)
    engine.check_integrity()


def test_a_block_that_no_step_can_compute_is_refused(gemma3: Case) -> None:
    engine = gemma3.engine(max_num_batched_tokens=5, max_num_seqs=2)
    with pytest.raises(ParameterError, match=r"at most 3 tokens that attend to each other both ways .*, got 4"):
        answer(engine, gemma3.prompt(0), gemma3.images[0])


@pytest.mark.parametrize("times", [1, 2])
def test_a_block_is_computed_once_more_if_the_memory_does_not_suffice(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of PaliGemma's prompt is a block, so smaller steps cannot compute it. Text beside it goes on."""
    case = Case("paligemma")
    engine = case.engine(max_num_seqs=2)
    text = [5, 6, 7]
    ids = case.prompt(0)
    expected = {"text": answer(engine, text), "image": case.generate(ids, 0) if times == 1 else []}
    own = engine._runner._forward
    left = [times]

    def forward(inputs: Any) -> Any:
        if inputs.images is not None and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("no memory")
        return own(inputs)

    monkeypatch.setattr(engine._runner, "_forward", forward)
    tokens: dict[str, list[int]] = {"text": [], "image": []}
    engine.add_request("text", text, GREEDY)
    engine.add_request("image", ids, GREEDY, images=[case.images[0]])
    for _ in range(30):
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    assert tokens == expected
    assert not engine.has_unfinished()
    assert engine._scheduler.max_num_batched_tokens == (len(text) + len(ids)) // 2
    engine.check_integrity()


def test_blocks_attend_both_ways(gemma3: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of the comparison in tests/hf/test_every_type.py: causal attention gives other tokens."""
    ids = gemma3.prompt(0, 1)
    assert answer(gemma3.engine(), ids, *gemma3.images) == gemma3.generate(ids, 0, 1)
    monkeypatch.setattr("fa_serve.engine.images.encoder.runs_of", lambda placed: ())
    engine = gemma3.engine()
    monkeypatch.setattr(engine._processor, "_max_block", 0)
    with pytest.raises(ValueError, match="max"):
        answer(engine, ids, *gemma3.images)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_images": 0}, "the engine is configured to take no images"),
        ({"deterministic": True}, "attend both ways are not supported in deterministic mode yet"),
        ({"kv_cache_dtype": "fp8"}, "attend both ways are not supported with a float8 cache yet"),
    ],
)
def test_what_is_not_built_says_so(gemma3: Case, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ParameterError, match=reason):
        answer(gemma3.engine(**settings), gemma3.prompt(0), gemma3.images[0])


def test_prompts_that_do_not_fit_their_images(llava: Case) -> None:
    engine = llava.engine(max_images=1)
    ids = llava.prompt(0)
    with pytest.raises(ParameterError, match="images must hold at most 1 images per prompt"):
        answer(engine, ids, *llava.images)
    with pytest.raises(ParameterError, match="prompt must have an image token"):
        answer(engine, ids[:-2], llava.images[0])
    with pytest.raises(ParameterError, match="prompt_logprobs must be None for a prompt with images"):
        answer(engine, ids, llava.images[0], params=SamplingParams(max_tokens=1, prompt_logprobs=0))
    with pytest.raises(ParameterError, match="images must have an entry for each of the 1 prompts"):
        engine.generate([ids], GREEDY, images=[])
    text = Engine(EngineConfig(device="cpu", num_pages=8, max_model_len=64))
    with pytest.raises(ParameterError, match="images must be empty, because images of LlamaForCausalLM"):
        answer(text, [1, 2], llava.images[0])


@pytest.mark.slow
def test_steps_with_images_have_graphs_after_the_first_image(replays: list[int]) -> None:
    """Where graphs are captured in idle moments alone, as a server does, the first image tells which ones it needs."""
    case = Case("qwen2_5_vl")
    engine = case.engine(prefix_caching=False)
    runner = engine._runner
    assert runner.make_graphs()
    while engine.prepare_one():
        pass
    assert not any(shape.axes for shape in runner._graphs._replays), "as long as nobody sends an image"
    ids = case.prompt(0)
    for _ in range(2):  # the second one comes before there was an idle moment
        assert answer(engine, ids, case.images[0]) == case.generate(ids, 0)
    asked = runner._graphs._missing
    assert asked is not None
    assert len({*asked}) == len(asked) > 0, "a shape is to be captured once"
    while engine.prepare_one():
        pass
    with_images = [shape for shape in runner._graphs._replays if shape.axes]
    of_text = [shape for shape in runner._graphs._replays if shape.kind == "prompts" and not shape.axes]
    assert sorted(with_images) == sorted(shape._replace(axes=3) for shape in of_text)
    captured = engine.preparations()
    ids = case.prompt(1, 1)
    assert answer(engine, ids, case.images[1], case.images[1]) == case.generate(ids, 1, 1)
    assert engine.preparations() == captured
    assert len(replays) >= 1, "another length than that of the first one"


@pytest.mark.parametrize(("name", "axes"), [("llava", 1), ("qwen2_5_vl", 3)])
def test_steps_with_images_replay_graphs(name: str, axes: int, replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings and positions come to fixed addresses. Another image in the same shape is another answer."""
    case = Case(name)
    engine = case.engine(prefix_caching=False)
    runner = engine._runner
    assert runner.make_graphs()
    shapes: list[Shape] = []
    run = StepGraphs.run
    monkeypatch.setattr(StepGraphs, "run", lambda self, shape: shapes.append(shape) or run(self, shape))
    for number in (0, 1, 0, 1):
        ids = case.prompt(number)
        assert answer(engine, ids, case.images[number]) == case.generate(ids, number)
    assert [shape.axes for shape in shapes if shape.axes] == [axes] * 3, "the first one of a shape is not captured"
    assert replays
    # beside a sequence that decodes, and in a step of text alone
    ids = case.prompt(0, 1)
    given = [(list(range(30, 36)), []), (ids, [0, 1])]
    outputs = engine.generate([x for x, _ in given], GREEDY, images=[[case.images[n] for n in own] for _, own in given])
    for (prompt, numbers), output in zip(given, outputs, strict=True):
        assert list(output.token_ids) == case.generate(prompt, *numbers)
