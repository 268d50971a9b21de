"""How many prompt tokens a step may compute while sequences decode: one decision about first tokens and gaps. Plain Python.

    share = PromptShare(target_itl=0.025, target_ttft=0.2)        # in seconds; None derives a target
    share.record(StepSize(rows=64, keys=64 * 900), 0.0064)
    share.limit(StepSize(rows=64, keys=64 * 900))                 # 576, once steps with prompts were recorded too
    share.limit(StepSize(rows=64, keys=64 * 900), expected=0.4)   # 1216: a first token is expected 0.4 s after its request

A step that computes prompts and decodes takes longer than one that only decodes. The decoding sequences wait for all of it, so
prompts get the time that decoding leaves of the target ITL (the time from one token to the next). `StepCost` has learned how
many tokens that is. The target is relaxed when prompts are late, in this order:

1. All first tokens are expected within the target TTFT (the time from a request to its first token): steps keep the target ITL.
2. A first token is expected later than the target TTFT: the target ITL grows in proportion to how much later, so that prompts
   get a larger share of the time. The expected time is what the prompt has waited already plus what computing the rest of it
   takes, so steps grow at once for a long prompt, and for a short one when it has waited for long. The derived target TTFT is
   TARGET_TTFT.
3. All of the step's token budget is used. Beyond that the GPU is overcommitted, and first tokens are late.

A target ITL that the operator sets is relaxed only if the operator sets a target TTFT as well.

If no target ITL is set, a step may compute a third more prompt tokens than its share if that completes a prompt. Otherwise the
rest of the prompt would make another step late. Prompts never starve: a step may compute MIN_PROMPT_TOKENS of them whatever the
target is. Steps have four sizes for each power of two, because a step of a new size may need another CUDA graph. The first rows
of a step cost less than later ones, so small steps say little about large ones: a share is at most one size larger than the
largest recent one.

Decisions depend only on the arguments and the order of calls, so processes that are given the same times decide the same. Left
out: the clock (engine.py), and which prompts get the share (prompt_order.py). Source: the token budget of Sarathi-Serve
(Agrawal et al. 2024), which is set by hand there.
"""

from __future__ import annotations

from fa_serve.engine.scheduler.step_cost import ImageSeconds, StepCost, StepSize

TARGET_STEPS = 4
"""If no target ITL is set, a step with prompts may take as long as this many steps that only decode: prompts get three quarters
of it. A step that completes a prompt may take as long as one more."""
TARGET_SECONDS = 0.02
"""If no target ITL is set, a step with prompts may always take this long: 50 tokens per second, several times as fast as people
read."""
COMPLETING = 3
"""If no target ITL is set, a step may compute limit + limit // COMPLETING prompt tokens if that completes a prompt."""
MIN_PROMPT_TOKENS = 64
"""Prompt tokens that every step may compute. CUDA graphs of steps with prompts have a multiple of this number of tokens."""
MAX_IMAGE_TOKENS = 4096
"""The most image embeddings that go through the towers together, unless one image has more."""
MIN_IMAGE_TOKENS = 16
"""Image embeddings that every step may encode. The towers compute at least one of their layers in any case."""
TARGET_TTFT = 0.2
"""The target TTFT if none is set: seconds from the arrival of a request to its first token."""
STRETCH = 1.0
"""A prompt is served as if it had arrived later by this factor times what the rest of it takes, so shorter ones go first."""


class PromptShare:
    """Owner of the learned cost of steps. Derives from it how much of a step prompts and images get.

    target_itl:  seconds that a step should take while sequences decode; None derives it
    target_ttft: seconds from the arrival of a request to its first token; None derives it, and never relaxes a target_itl
    """

    def __init__(self, target_itl: float | None = None, target_ttft: float | None = None) -> None:
        self._target_itl = target_itl
        self._target_ttft = target_ttft
        self.cost = StepCost()

    def renewed(self) -> PromptShare:
        """A `PromptShare` with the same targets and without measurements."""
        return PromptShare(self._target_itl, self._target_ttft)

    def record(self, size: StepSize, seconds: float, images: ImageSeconds | None = None) -> None:
        """A step of this size has taken `seconds`. images: how much of that was for images"""
        self.cost.record(size, seconds, images)

    def delay(self, left: int, before: int) -> float:
        """Seconds by which a prompt is served later than one that arrived at the same time and takes no time to compute.

        left: tokens that are still to be computed; before: tokens that are computed, or cached
        """
        return STRETCH * self.cost.prompt_seconds(left, before)

    def expected(self, waited: float, left: int, before: int) -> float:
        """Seconds from the arrival of a request to its first token, if only its prompt is computed from now on.

        waited: seconds since its arrival; left, before: as in `delay`
        """
        return waited + self.cost.prompt_seconds(left, before)

    def target(self, decoding: StepSize, expected: float = 0.0) -> float:
        """Seconds that a step with prompts and this much decoding should take. expected: the largest `expected` of a prompt"""
        if self._target_itl is not None and self._target_ttft is None:
            return self._target_itl
        target = self._target_itl or max(TARGET_STEPS * self.cost.seconds(decoding), TARGET_SECONDS)
        return target * max(expected / (self._target_ttft or TARGET_TTFT), 1.0)

    def limit(self, decoding: StepSize, before: int = 0, expected: float = 0.0) -> int:
        """How many prompt tokens a step may compute in addition to the decoding and the images of `decoding`.

        before: keys before the first of these tokens; expected: as in `target`
        """
        room = self.target(decoding._replace(image_tokens=0), expected) - self.cost.seconds(decoding)
        size = _rounded(decoding.rows + self.cost.largest)
        size += _unit(size)
        while size - decoding.rows > MIN_PROMPT_TOKENS:
            tokens = size - decoding.rows
            if self.cost.knows_prompts and self.cost.prompt_seconds(tokens, before) <= room:
                return tokens
            size = _rounded(size - 1)
        return MIN_PROMPT_TOKENS

    def image_limit(self, decoding: StepSize, expected: float = 0.0, *, beside_prompts: bool = False) -> int:
        """How many image embeddings a step may encode in addition to the decoding of `decoding`.

        expected: as in `target`; beside_prompts: prompts wait as well, and get half of the time
        """
        room = (self.target(decoding, expected) - self.cost.seconds(decoding)) / (2 if beside_prompts else 1)
        count = MAX_IMAGE_TOKENS
        while count > MIN_IMAGE_TOKENS:
            if self.cost.knows_images and self.cost.image_seconds(count) <= room:
                return count
            count -= max(count // 4, 1)
        return MIN_IMAGE_TOKENS

    def limits(self, decoding: StepSize, room: int, before: int = 0, expected: float = 0.0) -> tuple[int, int]:
        """`limit`, and how many prompt tokens the step may compute if the last of them complete a prompt; at most `room`."""
        limit = self.limit(decoding, before, expected)
        completing = limit if self._target_itl is not None else limit + limit // COMPLETING
        return min(limit, room), min(completing, room)


def _unit(size: int) -> int:
    """How far apart the sizes of steps are: four for each power of two, in multiples of MIN_PROMPT_TOKENS."""
    return max(1 << max(size.bit_length() - 3, 0), MIN_PROMPT_TOKENS)


def _rounded(size: int) -> int:
    """The largest size of a step up to this one."""
    return size // _unit(size) * _unit(size)
