"""The example of packed documents runs as it is; it checks its result against one call for each document."""

import document_mask
import pytest


def test_document_mask(capsys: pytest.CaptureFixture[str]) -> None:
    document_mask.main()
    assert "5 documents, 1700 tokens: 32 partial and 14 full of 196 blocks" in capsys.readouterr().out
