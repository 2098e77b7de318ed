"""The page of runs that go on, made anew as they go: `perennial report --serve`."""

from collections.abc import Callable, Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from perennial.common.utils.errors import UserError
from perennial.server.report.load import find_runs
from perennial.server.report.page import framed, report

RENEWED = 10
"""Seconds after which a browser asks again."""
SILENT = 30
"""Seconds after which a connection is closed that says nothing, as those which a browser opens beforehand."""
HERE = ("127.0.0.1", "localhost")


class Pages:
    """The page of the runs at or below the folders, made again only where one of them has grown."""

    def __init__(self, folders: Sequence[Path], oracle: bool) -> None:
        self._folders, self._oracle = folders, oracle
        self._seen, self._page, self._lock = object(), b"", Lock()

    def page(self) -> bytes:
        """As it is now; where there is nothing to report yet, that."""
        with self._lock:
            return self._made()

    def _made(self) -> bytes:
        try:
            runs = find_runs(self._folders)
            files = (run / name for run in runs for name in ("metrics.jsonl", "summary.json"))
            seen = [(file, file.stat().st_mtime_ns) for file in files if file.exists()]
            if seen != self._seen:
                self._page = report(self._folders, oracle=self._oracle)[0].encode()
                self._seen = seen
            return self._page
        except UserError as error:
            return framed("Perennial report", f"<p>{escape(str(error))}</p>").encode()


def serving(folders: Sequence[Path], port: int, oracle: bool = False) -> HTTPServer:
    """A server of the page, for this machine alone. Raises `UserError` where the port is taken."""
    pages = Pages(folders, oracle)

    class Handler(BaseHTTPRequestHandler):
        timeout = SILENT

        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0]
            if self.path != "/" or host not in HERE:  # a name of another site's that leads here reads nothing
                self.send_error(404)
                return
            body = pages.page()
            self.send_response(200)
            facts = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(body))}
            for name, value in {**facts, "Refresh": str(RENEWED), "Cache-Control": "no-store"}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nobody reads it."""

    try:
        return ThreadingHTTPServer((HERE[0], port), Handler)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}; take another, or 0 for any that is free") from None


def serve(folders: Sequence[Path], port: int, oracle: bool, say: Callable[[str], object]) -> None:
    """Serve the page until Ctrl-C. Raises `UserError` where a folder is none, or the port is taken."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder")
    with serving(folders, port, oracle) as server:
        say(f"http://{HERE[0]}:{server.server_port}/ shows it, renewed every {RENEWED} seconds; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
