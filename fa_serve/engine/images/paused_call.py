"""A call that runs part by part: in another thread, while the caller waits.

    call = PausedCall(lambda pause: encode(images, pause))       # calls `pause()` wherever it may be cut
    while not call.run(3):                   # returns at the third pause from here on, or when the call has ended
        ...
    call.result()

The other thread keeps the function's stack, so code that was not written to run in parts can be cut by hooks that call `pause`
inside it. Only one of the two threads runs at a time, so they need no locks for what they share. The one exception is a caller
that is interrupted while it waits, for example by Ctrl-C: the function then runs on to its next pause and ends there. Left out:
what is computed, and on which stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Abandoned(BaseException):
    """Nobody will continue the call. Not a subclass of Exception, so that no handler in the function swallows it."""


class PausedCall(Generic[T]):
    """Begins at the first `run`. function: its argument is `pause`, which it calls wherever it may be cut"""

    def __init__(self, function: Callable[[Callable[[], None]], T]) -> None:
        self._function = function
        self._turn = threading.Semaphore(0)
        self._callers_turn = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._left: int | None = None  # pauses until the function stops; None: it does not stop
        self._is_abandoned = False
        self._value: list[T] = []
        self._error: BaseException | None = None
        self.num_pauses = 0
        """Pauses so far, including those at which the function did not stop."""
        self.has_ended = False

    def run(self, pauses: int | None) -> bool:
        """Continue for this many pauses, at least one, or to the end with None. Returns whether the call has ended.

        Raises what the function raises. If the caller is interrupted, the call ends without a result.
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
            # An error refers to the frames that it passed through, and these refer to the call. If the call or a frame still
            # referred to the error, this cycle would keep the function's tensors alive until the garbage is collected.
            del error
        return self.has_ended

    def result(self) -> T:
        """What the function has returned."""
        return self._value[0]

    def close(self) -> None:
        """Give up a call that has not ended: its function ends at the pause where it stands."""
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
        except Exception:  # the thread could not start, for lack of memory: there is nobody to wait for
            raise
        except BaseException:  # the caller is interrupted, and may or may not have given the function its turn
            self._is_abandoned = True
            self.has_ended = True
            self._turn.release()  # a function that stands at a pause ends now; one that runs ends at its next pause
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
