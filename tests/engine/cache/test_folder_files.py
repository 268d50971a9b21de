"""Files of pages: what is read is what was written, or it is said to be bad."""

from __future__ import annotations

import errno
import os
import stat
import time
from itertools import count
from pathlib import Path

import pytest

from fa_serve.engine.cache import folder_files
from fa_serve.engine.cache.folder_files import HEADER, BadFileError, FileName, FolderFiles

IDENTITY = bytes(range(16))
DATA = bytes(range(256)) * 8
FIRST = FileName("page", b"\x01" * 16)
SECOND = FileName("page", b"\x02" * 16, b"\x01" * 16)
STATE = FileName("state", b"\x02" * 16, b"\x01" * 16)


@pytest.fixture
def files(tmp_path: Path) -> FolderFiles:
    return FolderFiles(tmp_path / "kv", IDENTITY)


def write(files: FolderFiles, name: FileName, data: bytes = DATA) -> Path:
    files.write(name, memoryview(data))
    return files.path_of(name)


def read(files: FolderFiles, name: FileName, size: int = len(DATA)) -> bytes:
    into = bytearray(size)
    files.read(name, memoryview(into))
    return bytes(into)


def test_what_is_read_is_what_was_written(files: FolderFiles) -> None:
    for name, data in ((FIRST, DATA), (SECOND, DATA[::-1]), (STATE, b"state")):
        assert write(files, name, data).stat().st_size == files.size_of(len(data))
    assert read(files, FIRST) == DATA
    assert read(files, SECOND) == DATA[::-1]
    assert read(files, STATE, 5) == b"state"


@pytest.mark.parametrize("place", [0, 9, 30, 50, HEADER.size - 12, HEADER.size - 1, HEADER.size, HEADER.size + 1000, -1])
def test_one_altered_bit_is_found(files: FolderFiles, place: int) -> None:
    """In the mark, the identity, the hashes, the length, the checksum, and what follows."""
    path = write(files, SECOND)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadFileError, match="torn, truncated or altered"):
        read(files, SECOND)


@pytest.mark.parametrize("length", [0, 7, HEADER.size, HEADER.size + 1, -1])
def test_a_truncated_file_is_found(files: FolderFiles, length: int) -> None:
    path = write(files, FIRST)
    content = path.read_bytes()
    path.write_bytes(content[:length])
    with pytest.raises(BadFileError):
        read(files, FIRST)


def test_a_file_that_is_too_long_or_of_another_size_of_pages_is_found(files: FolderFiles) -> None:
    path = write(files, FIRST)
    for size in (len(DATA) - 8, len(DATA) + 8):
        with pytest.raises(BadFileError):
            read(files, FIRST, size)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(BadFileError):
        read(files, FIRST)


@pytest.mark.parametrize("other", [SECOND, STATE, FileName("page", b"\x01" * 16, b"\x03" * 16)])
def test_a_file_that_was_moved_to_another_name_is_found(files: FolderFiles, other: FileName) -> None:
    path = write(files, FIRST)
    files.path_of(other).parent.mkdir(exist_ok=True)
    path.rename(files.path_of(other))
    with pytest.raises(BadFileError):
        read(files, other)


def test_a_file_of_another_identity_is_not_read(files: FolderFiles) -> None:
    other = FolderFiles(files.folder, bytes(16))
    path = write(files, FIRST)
    with pytest.raises(FileNotFoundError):
        read(other, FIRST)
    other.path_of(FIRST).parent.mkdir()
    path.rename(other.path_of(FIRST))
    with pytest.raises(BadFileError):
        read(other, FIRST)


def test_processes_of_one_identity_have_one_secret_and_others_another(files: FolderFiles) -> None:
    assert FolderFiles(files.folder, IDENTITY).secret == files.secret
    assert FolderFiles(files.folder, bytes(16)).secret != files.secret


@pytest.mark.parametrize("torn", [b"", b"short"])
def test_a_secret_that_a_loss_of_power_has_torn_is_replaced(files: FolderFiles, torn: bytes) -> None:
    (files.folder / IDENTITY.hex() / "secret").write_bytes(torn)
    later = FolderFiles(files.folder, IDENTITY)
    assert len(later.secret) == 16
    assert FolderFiles(files.folder, IDENTITY).secret == later.secret != files.secret


def test_the_secret_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch) -> None:
    events = []
    sync = os.fsync
    link = os.link

    def note_sync(descriptor: int) -> None:
        sync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(("sync", path.suffix, path.stat().st_size if path.is_file() else -1))

    def note_link(source: Path, target: Path) -> None:
        link(source, target)
        events.append(("link", target.name, 0))

    monkeypatch.setattr(folder_files.os, "fsync", note_sync)
    monkeypatch.setattr(folder_files.os, "link", note_link)
    FolderFiles(tmp_path, IDENTITY)
    assert events[:3] == [("sync", ".tmp", 16), ("link", "secret", 0), ("sync", "", -1)]


def test_a_start_that_meets_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "planted")

    monkeypatch.setattr(folder_files.os, "fsync", fail)
    with pytest.raises(OSError, match="planted"):
        FolderFiles(tmp_path, IDENTITY)
    monkeypatch.undo()
    assert [*(tmp_path / IDENTITY.hex()).iterdir()] == []
    assert len(FolderFiles(tmp_path, IDENTITY).secret) == 16


def test_processes_of_two_containers_have_other_temporary_names(files: FolderFiles, monkeypatch) -> None:
    """Their process ids may be the same. What the other one is writing stays, and its names are known when they are old."""
    other = FolderFiles(files.folder, IDENTITY)
    files._serial = count()
    other._serial = count()
    seen = []
    replace = os.replace

    def meanwhile(source: Path, target: Path) -> None:
        seen.append(source)
        if len(seen) == 1:
            write(other, FIRST)
        replace(source, target)

    monkeypatch.setattr(folder_files.os, "replace", meanwhile)
    path = write(files, FIRST)
    assert len({*seen}) == 2
    assert all(folder_files._TEMPORARY.fullmatch(each.name) for each in seen)
    assert read(files, FIRST) == DATA
    assert [*path.parent.iterdir()] == [path]


def test_a_file_that_another_one_has_made_is_not_removed(files: FolderFiles) -> None:
    path = write(files, FIRST)
    taken = path.parent / f".{files._tag}-{next(files._serial) + 1}.tmp"
    taken.write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        write(files, FIRST)
    assert taken.read_bytes() == b"theirs"


def test_only_the_owner_may_read_what_is_written(files: FolderFiles) -> None:
    path = write(files, FIRST)
    folders = [files.folder / IDENTITY.hex(), path.parent]
    assert [stat.S_IMODE(each.stat().st_mode) for each in folders] == [0o700, 0o700]
    for each in (path, path.parent.parent / "secret"):
        assert stat.S_IMODE(each.stat().st_mode) == 0o600


def test_a_scan_tells_what_has_come_and_gone(files: FolderFiles) -> None:
    """The least recently used file comes first, and the files of other identities are known by their path."""
    write(files, FIRST)
    write(files, SECOND)
    os.utime(files.path_of(SECOND), (1, 1))
    foreign = FolderFiles(files.folder, bytes(16))
    path = write(foreign, FIRST, b"foreign")
    os.utime(path, (2, 2))
    (files.path_of(FIRST).parent / "not ours").write_text("x")
    added, removed = files.scan()
    name = FileName(str(path.relative_to(files.folder)), b"")
    assert [(each.name, each.num_bytes) for each in added] == [
        (SECOND, files.size_of(len(DATA))),
        (name, files.size_of(7)),
        (FIRST, files.size_of(len(DATA))),
    ]
    assert removed == []
    files.remove(name)
    files.remove(SECOND)
    files.remove(SECOND)
    write(files, STATE)
    added, removed = files.scan()
    assert [each.name for each in added] == [STATE]
    assert {*removed} == {name, SECOND}
    assert not path.exists()
    assert (files.path_of(FIRST).parent / "not ours").exists()


def test_reading_makes_a_file_the_newest(files: FolderFiles) -> None:
    for name in (FIRST, SECOND):
        os.utime(write(files, name), (1, 1))
    read(files, FIRST)
    assert [each.name for each in files.scan()[0]] == [SECOND, FIRST]


def test_links_are_not_followed(files: FolderFiles, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = files.path_of(FIRST)
    (elsewhere / path.name).write_bytes(b"x")
    path.parent.symlink_to(elsewhere)
    files.path_of(SECOND).parent.mkdir()
    files.path_of(SECOND).symlink_to(elsewhere / path.name)
    assert files.scan() == ([], [])


def test_what_a_killed_process_has_left_is_removed_when_it_is_old(files: FolderFiles) -> None:
    path = write(files, FIRST)
    old = path.parent / ".0123456789abcdef-0.tmp"
    new = path.parent / ".0123456789abcdef-1.tmp"
    for each in (old, new):
        each.write_bytes(b"part")
    past = time.time() - folder_files.STALE_SECONDS - 1
    os.utime(old, (past, past))
    assert [each.name for each in files.scan()[0]] == [FIRST]
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize("fails_at", ["write", "replace"])
def test_a_write_that_fails_leaves_nothing(files: FolderFiles, fails_at: str, monkeypatch) -> None:
    """The disk is full after some bytes, or the file cannot be renamed. What was there before stays."""
    write(files, FIRST, b"before")

    def fail(*args: object) -> int:
        raise OSError(errno.ENOSPC, "planted")

    def write_some(descriptor: int, data: memoryview) -> int:
        monkeypatch.setattr(folder_files.os, "write", fail)
        return some(descriptor, data[:5])

    some = os.write
    monkeypatch.setattr(folder_files.os, fails_at, write_some if fails_at == "write" else fail)
    with pytest.raises(OSError, match="planted"):
        write(files, FIRST)
    monkeypatch.undo()
    assert read(files, FIRST, 6) == b"before"
    assert [each.name for each in files.path_of(FIRST).parent.iterdir()] == [files.path_of(FIRST).name]


def test_a_write_that_takes_several_calls_is_complete(files: FolderFiles, monkeypatch) -> None:
    some = os.write
    monkeypatch.setattr(folder_files.os, "write", lambda descriptor, data: some(descriptor, data[:100]))
    write(files, FIRST)
    assert read(files, FIRST) == DATA
