"""The example of packed and paged attention runs as it is."""

import packed_attention
import pytest


def test_packed_attention(capsys: pytest.CaptureFixture[str]) -> None:
    packed_attention.main()
    assert "packed [37, 5, 90]: out (132, 8, 64)" in capsys.readouterr().out
