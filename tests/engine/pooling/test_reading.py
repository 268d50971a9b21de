"""Pieces are tokenized ahead in their order, no further than allowed, and no thread remains behind."""

import signal
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from fa_serve.engine.pooling import inputs, reading
from fa_serve.engine.pooling.inputs import EncoderInput, EncoderInputs
from fa_serve.engine.pooling.reading import read_ahead
from fa_serve.spec import ParameterError

SECONDS = 30
"""How long a thread waits for another one before a test fails."""
MAIN = threading.main_thread()


class Reader:
    """Reads each text as one token for each of its characters. firsts, threads: of the pieces that it has read"""

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.threads: list[threading.Thread] = []

    def __call__(self, piece, *, first: int) -> EncoderInputs:
        self.firsts.append(first)
        self.threads.append(threading.current_thread())
        if "wrong" in piece:
            raise ParameterError(f"input[{first}]", "be right", "wrong")
        return EncoderInputs.of([EncoderInput(np.full(len(text), ord(text[0]), dtype=np.int32)) for text in piece])


class AtOnce:
    """Takes the place of the thread, and does at once what it is given."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, function, *arguments) -> Future:
        done: Future = Future()
        try:
            done.set_result(function(*arguments))
        except ParameterError as error:
            done.set_exception(error)
        return done

    def shutdown(self, *, cancel_futures: bool) -> None:
        assert cancel_futures


@pytest.fixture
def single(monkeypatch) -> None:
    """Pieces have one input each."""
    monkeypatch.setattr(reading, "READ_CHARACTERS", 1)
    monkeypatch.setattr(reading, "READ_INPUTS", 1)


def tokenizer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tokenizer")]


@pytest.mark.usefixtures("single")
def test_pieces_come_in_order_from_another_thread_that_ends() -> None:
    read = Reader()
    texts = [chr(ord("a") + index) * (index + 1) for index in range(20)]
    found = [piece.ids.tolist() for piece in read_ahead(texts, read)]
    assert found == [[ord(letter) for letter in text] for text in texts]
    assert read.firsts == list(range(20))
    assert len({thread.ident for thread in read.threads[1:]}) == 1
    assert MAIN not in read.threads[1:]
    assert not tokenizer_threads()


@pytest.mark.parametrize("texts", [[], ["a"], ["a", "b", "c"]], ids=len)
def test_a_call_of_one_piece_starts_no_thread(monkeypatch, texts: list[str]) -> None:
    monkeypatch.setattr(reading, "ThreadPoolExecutor", None)
    read = Reader()
    assert [len(piece) for piece in read_ahead(texts, read)] == [len(texts)] * bool(texts)
    assert set(read.threads) <= {MAIN}


@pytest.mark.usefixtures("single")
def test_no_more_pieces_than_allowed_are_ahead(monkeypatch) -> None:
    monkeypatch.setattr(reading, "PIECES_AHEAD", 3)
    monkeypatch.setattr(reading, "ThreadPoolExecutor", AtOnce)
    read = Reader()
    ahead = [len(read.firsts) - taken for taken, _ in enumerate(read_ahead(["a"] * 10, read), 1)]
    assert ahead == [3] * 7 + [2, 1, 0]


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("place", [0, 1, 4])
def test_an_error_is_raised_at_its_turn_and_nothing_behind_it_is_read(place: int) -> None:
    """Also that of something that is no text, which has no length."""
    for wrong, message in (("wrong", rf"input\[{place}\] must be right"), (None, rf"\(item {place} is not\)")):
        read = Reader()
        texts = ["a"] * 8
        texts[place] = wrong
        found = []
        with pytest.raises(ParameterError, match=message):
            found.extend(read_ahead(texts, read))
        assert len(found) == place
        assert read.firsts == list(range(place + (wrong is not None)))
        assert not tokenizer_threads()


@pytest.mark.usefixtures("single")
def test_a_caller_that_stops_early_waits_for_the_piece_that_is_tokenized() -> None:
    begun = threading.Event()
    closing = threading.Event()

    class Slow(Reader):
        def __call__(self, piece, *, first: int) -> EncoderInputs:
            if first:
                begun.set()
                assert closing.wait(SECONDS)
            return super().__call__(piece, first=first)

    read = Slow()
    pieces = read_ahead(["a"] * 20, read)
    next(pieces)
    assert begun.wait(SECONDS)
    [thread] = tokenizer_threads()
    threading.Thread(target=closing.set).start()
    pieces.close()
    assert not thread.is_alive()
    assert read.firsts[:2] == [0, 1]
    assert len(read.firsts) <= 1 + reading.PIECES_AHEAD


@pytest.mark.usefixtures("single")
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system cannot interrupt a thread")
def test_an_interrupt_ends_a_call_that_waits_for_a_piece() -> None:
    waiting = threading.Event()

    def read(piece, *, first: int) -> EncoderInputs:
        if first == 1:
            assert waiting.wait(SECONDS)
            signal.pthread_kill(MAIN.ident, signal.SIGINT)
        return Reader()(piece, first=first)

    def wait() -> None:
        waiting.set()
        next(pieces)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    pieces = read_ahead(["a"] * 20, read)
    try:
        next(pieces)
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signal.signal(signal.SIGINT, before)
    pieces.close()  # in case the signal came before the generator went on
    assert not tokenizer_threads()


def test_a_piece_has_enough_inputs_for_several_processors(monkeypatch) -> None:
    """But no more characters than are tokenized at once."""
    monkeypatch.setattr(reading, "READ_CHARACTERS", 100)
    monkeypatch.setattr(inputs, "PIECE", 1000)

    def sizes(length: int) -> list[int]:
        return [len(piece) for piece in read_ahead(["a" * length] * 40, Reader())]

    assert sizes(1) == [40]
    assert sizes(10) == [reading.READ_INPUTS, reading.READ_INPUTS, 40 - 2 * reading.READ_INPUTS]
    assert sizes(200) == [5] * 8
