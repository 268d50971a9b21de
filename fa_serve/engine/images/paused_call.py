"""A call that runs a part at a time: in another thread, while the caller stands still.

    call = PausedCall(lambda pause: encode(images, pause))       # calls `pause()` wherever it may be cut
    while not call.run(3):                   # returns at the third pause from here on, or when the call has ended
        ...
    call.result()

So code that knows nothing of parts can be cut, if hooks call `pause` in its midst: it keeps its stack. Nothing runs at the same
time, so the two need no locks for what they share. The one exception is a caller that is interrupted while it stands still, as
by Ctrl-C: the function runs on to its next pause and ends there. Left out: what is computed, and on which stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Abandoned(BaseException):
    """Nobody will go on with the call. It is no Exception, so that no handler of the function swallows it."""


class PausedCall(Generic[T]):
    """Begins at the first `run`. function: gets what it is to call wherever it may be cut"""

    def __init__(self, function: Callable[[Callable[[], None]], T]) -> None:
        self._function = function
        self._turn = threading.Semaphore(0)
        self._callers_turn = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._left: int | None = None  # pauses that are passed before the next one; None passes all of them
        self._is_abandoned = False
        self._value: list[T] = []
        self._error: BaseException | None = None
        self.num_pauses = 0
        """Pauses up to now, those that were passed included."""
        self.has_ended = False

    def run(self, pauses: int | None) -> bool:
        """Go on up to this pause from here on, at least the first; None goes on to the end. Returns whether it has ended.

        Raises what the function raises. Interrupted, the call has ended without a result.
        """
        if self.has_ended:
            return True
        self._left = None if pauses is None else max(pauses, 1)
        self._hand_over()
        error = self._error
        self._error = None
        try:
            if error is not None:
                raise error
        finally:
            # An error has the frames that it came through, and these have the call: with the error in the call or in a frame
            # they would keep each other, and the tensors of the function, until the garbage is collected.
            del error
        return self.has_ended

    def result(self) -> T:
        """What the function has returned."""
        return self._value[0]

    def close(self) -> None:
        """Give up a call that has not ended: its function is left at the pause where it is."""
        if self._thread is not None and not self.has_ended:
            self._is_abandoned = True
            self._hand_over()
        self.has_ended = True

    def _hand_over(self) -> None:
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="fa_serve-towers", daemon=True)
                thread.start()
                self._thread = thread
            self._turn.release()
            self._callers_turn.acquire()
        except Exception:  # without memory no thread starts, and there is nobody to wait for
            raise
        except BaseException:  # the caller is interrupted, and nobody knows whether the function has its turn
            self._is_abandoned = True
            self.has_ended = True
            self._turn.release()  # one that stands at a pause ends; the others see it at their next one
            raise

    def _work(self) -> None:
        try:
            self._take_turn()
            self._value.append(self._function(self._pause))
        except _Abandoned:
            pass
        except BaseException as error:
            if not self._is_abandoned:  # the caller raises it
                self._error = error
        self.has_ended = True
        self._callers_turn.release()

    def _pause(self) -> None:
        if self._is_abandoned:
            raise _Abandoned
        self.num_pauses += 1
        if self._left is None:
            return
        self._left -= 1
        if self._left > 0:
            return
        self._callers_turn.release()
        self._take_turn()

    def _take_turn(self) -> None:
        self._turn.acquire()
        if self._is_abandoned:
            raise _Abandoned
