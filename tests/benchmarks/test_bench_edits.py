"""The edits are what they claim to be, and the benchmark reports nothing if prompt lookup changes an answer."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.engine import bench_edits

SOURCE = "".join(f"def first_{i}(path):\n    value = open(path)\n    return value, path_of(value)\n\n\n" for i in range(12))


def test_an_edit_renames_whole_words() -> None:
    for edit in islice(bench_edits.edits([SOURCE], 300, 0), 40):
        request = edit.prompt.removeprefix("<|im_start|>user\nRename ").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        names, piece = request.split(":\n", 1)
        old, new = names.split(" to ")
        before, after = (bench_edits.NAME.findall(text) for text in (piece, edit.answer))
        assert before.count(old) > 1
        assert after == [new if name == old else name for name in before]
        assert bench_edits.NAME.sub("", piece) == bench_edits.NAME.sub("", edit.answer)
        assert piece in SOURCE


def test_it_runs_from_start_to_end(tmp_path: Path, monkeypatch, capsys) -> None:
    options = ["--size", "tiny", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["bench_edits.py", *options])
    bench_edits.main()
    printed = capsys.readouterr().out
    assert "step 2 of 3: loss" in printed
    assert [line.split(":")[0] for line in printed.splitlines() if "ratio" in line] == ["1 at once", "4 at once", "16 at once"]
    assert list(tmp_path.iterdir()) == []  # results are those of a GPU

    def answers(folder, prompts, tokens, device, drafts):
        done = [SimpleNamespace(token_ids=[1, 2 if drafts else 3], text="")]
        return dict.fromkeys(bench_edits.AT_ONCE, 1.0), done, None

    monkeypatch.setattr(bench_edits, "answers", answers)
    monkeypatch.setattr(bench_edits, "train", lambda *_: None)
    with pytest.raises(SystemExit, match="differ from those without: no figure is reported"):
        bench_edits.main()
