"""Each distinct traceback is told once, and stays where it was met."""

from pathlib import Path

from perennial.common.utils.tracebacks import Tracebacks


def fail(message: str, otherwise: bool = False) -> Exception:
    try:
        if otherwise:
            raise ValueError(message)
        raise ValueError(message)
    except ValueError as error:
        return error


def test_the_same_lines_of_code_are_one_whatever_the_message(tmp_path: Path) -> None:
    seen = Tracebacks(tmp_path / "state" / "traceback.txt")
    first = seen.first(fail("of client 1"))
    assert first.startswith("Traceback (most recent call last)")
    assert "test_tracebacks.py" in first
    assert first.endswith("ValueError: of client 1\n")
    assert seen.first(fail("of client 2")) == ""
    assert seen.first(fail("elsewhere", otherwise=True)).endswith("elsewhere\n")
    assert Tracebacks(seen.file).first(fail("of another process")) != ""
    assert seen.file
    assert seen.file.read_text().count("Traceback (most recent call last)") == 2
    assert seen.file.stat().st_mode & 0o077 == 0


def test_a_file_that_cannot_be_written_does_not_hide_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "here" in Tracebacks(tmp_path / "file" / "traceback.txt").first(fail("here"))


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("as it was")
    (tmp_path / "traceback.txt").symlink_to(other)
    assert "here" in Tracebacks(tmp_path / "traceback.txt").first(fail("here"))
    assert other.read_text() == "as it was"
