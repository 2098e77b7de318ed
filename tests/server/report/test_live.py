"""`perennial report --serve`: the page of a run that goes on."""

import socket
import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from typer.testing import CliRunner

from perennial.common.utils.errors import UserError
from perennial.server.cli.main import app
from perennial.server.local import LocalRuntime
from perennial.server.report.live import serving
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import toy_config


def test_the_page_of_a_run_is_renewed_as_it_goes(tmp_path: Path) -> None:
    config = toy_config("fedavg", rounds=4)
    with serving([tmp_path], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}/"
        with urlopen(place) as answer:
            assert "holds no run folder" in answer.read().decode()
            assert answer.headers["Refresh"] == "10"
        folder = RunFolder.create(tmp_path / "one", config)
        with folder.held():
            with urlopen(place) as answer:
                assert "nothing has been evaluated yet" in answer.read().decode()
            LocalRuntime(config).run(folder)
        with urlopen(place) as answer:
            page = answer.read().decode()
        assert "<h1>Perennial report</h1>" in page
        assert "1 run, 1 scenario" in page
        for wrong in (f"{place}other", Request(place, headers={"Host": "example.org:80"})):
            with pytest.raises(HTTPError):
                urlopen(wrong)
        with pytest.raises(UserError, match=r"--port \d+: .*; take another, or 0"):
            serving([tmp_path], server.server_port)
        server.shutdown()


def test_a_connection_that_says_nothing_keeps_nobody_waiting(tmp_path: Path) -> None:
    """As a browser opens one beforehand."""
    with serving([tmp_path], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with (
            socket.create_connection(("127.0.0.1", server.server_port)),
            urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=10) as answer,
        ):
            assert answer.status == 200
        server.shutdown()


def test_what_does_not_go_with_it_is_one_sentence(tmp_path: Path) -> None:
    for words, said in (
        (["--out", "x.html"], "leave out --out and --format"),
        ([], "is not a folder"),
    ):
        wrong = CliRunner().invoke(app, ["report", str(tmp_path / "none"), "--serve", *words])
        assert (wrong.exit_code, said in wrong.stderr) == (2, True), wrong.output
