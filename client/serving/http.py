"""The Open Inference Protocol over HTTP and JSON, and a page on which a person can try the models."""

import asyncio
import re
import socket
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from perennial.client.serving import rest
from perennial.client.serving.access import Callers
from perennial.client.serving.inference import Inference
from perennial.client.serving.intake import Intake
from perennial.client.serving.messages import Refused, image_column, short, takes_pictures
from perennial.client.serving.models import NAME
from perennial.common.data.columns import CategoryColumn
from perennial.common.data.scenario import Scenario
from perennial.common.utils.addresses import Address
from perennial.common.utils.tracebacks import Tracebacks
from perennial.common.utils.version import __version__

STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    413: {"Connection": "close"},  # whatever else of it comes in is not read
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}
INVALID = grpc.StatusCode.INVALID_ARGUMENT
HEAD = 10.0
"""Seconds after which a connection is closed that does not go on with TLS, or sends no head of a request."""
BODY, MARGIN = 60.0, 30.0
"""Seconds within which the body of a request must have come in; more of them than for body and model has none."""
CONNECTIONS = 256
"""More requests at a time are answered 503; of twice as many connections the newest are closed."""
PAGE = Path(__file__).with_name("page.html")
Handler = Callable[[Request], Awaitable[Response]]


class Impatient(H11Protocol):
    """uvicorn's HTTP, which closes the connection of a caller who says nothing, or reads no answer."""

    def __init__(self, longest: float, server: uvicorn.Server) -> None:
        """`longest`: seconds of a request with its answer."""
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._longest = longest

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Uvicorn's, with a clock."""
        super().connection_made(transport)
        if len(self.connections) > 2 * CONNECTIONS:
            transport.abort()
        self._at: object = None
        self._since = self.loop.time()
        self._clock = self.loop.call_later(HEAD / 2, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Uvicorn's, without the clock."""
        self._clock.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        waits = self.cycle is None or self.cycle.response_complete
        if (at := (self.cycle, waits)) != self._at:
            self._at, self._since = at, self.loop.time()
        if self.loop.time() - self._since >= (HEAD / 2 if waits else self._longest):
            self.transport.abort()
        else:
            self._clock = self.loop.call_later(HEAD / 2, self._look)


class Listening(uvicorn.Server):
    """uvicorn's server on one listener, with bounds that uvicorn has no setting for."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, timeout: float) -> None:
        """`timeout`: seconds that a caller waits for the model."""
        super().__init__(config)
        self._listener, self._longest = listener, BODY + timeout + MARGIN

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's, and the listener, which it is not given."""
        await super().startup([])
        tls = self.config.ssl
        self.servers.append(
            await asyncio.get_running_loop().create_server(
                lambda: Impatient(self._longest, self),
                sock=self._listener,
                backlog=self.config.backlog,
                ssl=tls,
                ssl_handshake_timeout=HEAD if tls else None,
            )
        )


class ThisMachine:
    """Refuses a request for another host than this machine: a page may have a name that means it (DNS rebinding).

    Not Starlette's middleware for that, which takes the brackets of an IPv6 address for the start of a port.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The answer, or 400."""
        host = Headers(scope=scope).get("host", "")
        found = re.fullmatch(r"(?:\[([^]]+)\]|([^:]+))(?::\d*)?", host)
        if found and Address(found[1] or found[2], 0).loopback:
            await self._app(scope, receive, send)
        else:
            sentence = f"the header Host is {short(host)!r}; this machine alone is served, e.g. as localhost"
            await JSONResponse({"error": sentence}, 400)(scope, receive, send)


class Api:
    """The protocol's paths. Health is open to all; everything else takes a token where there are any."""

    def __init__(self, inference: Inference, callers: Callers, intake: Intake, loopback: bool) -> None:
        """`loopback`: listens for this machine alone, so that other names of it are refused (DNS rebinding)."""
        self.inference, self.callers, self.intake = inference, callers, intake
        self._tracebacks = Tracebacks()
        self._page, self._policy = page()
        model = "/v2/models/{model}"
        routes = [
            Route("/", self.show_page),
            Route("/served", self._guarded(self.describe)),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route("/v2", self._guarded(self.server)),
        ]
        for place in (model, f"{model}/versions/{{version}}"):
            routes += [
                Route(place, self._guarded(self.metadata)),
                Route(f"{place}/ready", self._guarded(self.model_ready)),
                Route(f"{place}/infer", self._guarded(self.infer, counted=True), methods=["POST"]),
            ]
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(ThisMachine)] if loopback else [],
            exception_handlers={HTTPException: _unknown_path},
        )

    async def live(self, request: Request) -> Response:
        """Whether there is a server."""
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        """Whether there is a model."""
        ready = self.inference.catalogue.ready
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def server(self, request: Request) -> Response:
        """Name and version of the program."""
        extensions = ["binary_tensor_data"]
        return JSONResponse({"name": "perennial", "version": __version__, "extensions": extensions})

    async def metadata(self, request: Request) -> Response:
        """Names, types and shapes of what goes in and comes out."""
        name, wanted = _model_and_version(request)
        served, _ = self.inference.find(name, wanted)
        document = rest.metadata(self.inference.metadata(name, wanted))
        parameters = served.task.metadata
        if columns := (*served.scenario.column_names, *image_column(served.scenario)):
            parameters = {"columns": list(columns), **_column_kinds(served.scenario), **parameters}
        if parameters:
            document["parameters"] = parameters
        return JSONResponse(document)

    async def model_ready(self, request: Request) -> Response:
        """Whether there is such a model."""
        name, wanted = _model_and_version(request)
        ready = self.inference.ready(name, wanted)
        return JSONResponse({"name": name, "ready": ready}, 200 if ready else 503)

    async def infer(self, request: Request) -> Response:
        """What the model's task answers to each sample."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refused(INVALID, "a compressed body is not supported; send it as it is", 415)
        name, wanted = _model_and_version(request)
        largest = max(self.inference.largest(), rest.LARGEST_JSON)
        try:
            async with asyncio.timeout(BODY):
                body = await self.intake.read(_whole(request, largest))
        except TimeoutError:
            raise Refused(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"the body has not come in within {BODY:g} seconds", 408
            ) from None
        except ClientDisconnect:  # nobody reads this
            raise Refused(grpc.StatusCode.CANCELLED, "the caller has left", 400) from None

        def work() -> tuple[bytes, int | None]:
            self.inference.find(name, wanted)
            asked, behind = rest.parsed(body, request.headers.get(rest.LENGTH))
            return rest.reply(asked, self.inference.answer(rest.message(asked, behind, name, wanted)))

        answer, length = await self.inference.queued(len(body), work)
        if length is None:
            return Response(answer, media_type="application/json")
        return Response(answer, media_type="application/octet-stream", headers={rest.LENGTH: str(length)})

    async def show_page(self, request: Request) -> Response:
        """The page, which asks for everything else with the token that a person gives it."""
        return HTMLResponse(
            self._page,
            headers={"Content-Security-Policy": self._policy, "Referrer-Policy": "no-referrer", **NO_SNIFF},
        )

    async def describe(self, request: Request) -> Response:
        """What the page shows: what is served, since when, of which data, how it did."""
        return JSONResponse(described(self.inference), headers=NO_SNIFF)

    def _guarded(self, handler: Handler, counted: bool = False) -> Handler:
        """A handler for callers with a token, whose refusals are answers."""

        async def checked(request: Request) -> Response:
            peer = request.client.host if request.client else "?"
            self.callers.name(request.headers.get("authorization"), peer)
            return await handler(request)

        async def answer(request: Request) -> Response:
            try:
                if not counted:
                    return await checked(request)
                with self.inference.counted("http"):
                    return await checked(request)
            except Refused as refused:
                status = refused.status or STATUS[refused.code]
                return JSONResponse({"error": str(refused)}, status, HEADERS.get(status))
            except Exception as error:
                if text := self._tracebacks.first(error):
                    print(text, flush=True)
                return JSONResponse({"error": f"this should not happen: {type(error).__name__}"}, 500)

        return answer


NO_SNIFF = {"X-Content-Type-Options": "nosniff"}


def described(inference: Inference) -> dict[str, Any]:
    """What is served, since when, of which data, and how each model did per environment at its site."""
    models = []
    for entry in inference.catalogue.entries:
        if not (served := entry.served):
            continue
        scenario, task, snapshot = served.scenario, served.task, served.snapshot
        headline, prediction = task.headline, task.prediction
        shape = scenario.input_shape
        rows = scenario.column_names and not image_column(scenario)  # which the page has no fields for together
        kind = "table" if rows else "picture" if takes_pictures(shape) else "numbers"
        for name, own in entry.names().items():
            found = snapshot.results.get(f"{own}/test", {})
            models.append(
                {
                    "name": name,
                    "main": name == (entry.name or NAME),
                    "version": served.version,
                    "run": snapshot.run,
                    "site": snapshot.client,
                    "method": served.method,
                    "model": own,
                    "data": {"scenario": scenario.name, "title": scenario.title, "source": scenario.source},
                    "evaluated": served.written,
                    "since": entry.since,
                    "input": {
                        "kind": kind,
                        "shape": list(shape),
                        "columns": list(scenario.column_names),
                        **_column_kinds(scenario),
                    },
                    "prediction": {**asdict(prediction), "parts": list(task.parts)},
                    "measure": headline.title,
                    "measured": {
                        place: {"count": count, "value": value, "text": headline.text(value, 1) + headline.unit}
                        for place, (count, value) in found.items()
                    },
                }
            )
    limits = inference.limits
    return {"server": f"perennial {__version__}", "max_batch": limits.max_batch, "models": models}


def _column_kinds(scenario: Scenario) -> dict[str, Any]:
    """Which columns are of names, with these, and which may be empty; nothing where all are numbers."""
    named = {name: list(own.categories) for name, own in scenario.cells.items() if isinstance(own, CategoryColumn)}
    may = [name for name, own in scenario.cells.items() if name in named or getattr(own, "fill", None) is not None]
    return {"categories": named, "may_be_empty": may} if scenario.cells else {}


def page() -> tuple[str, str]:
    """The page and its Content-Security-Policy: nothing from outside, and no script or style but its own."""
    text = PAGE.read_text(encoding="utf-8")
    hashes = {
        tag: "'sha256-" + b64encode(sha256(found[1].encode()).digest()).decode() + "'"
        for tag in ("script", "style")
        if (found := re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL))
    }
    return text, (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _whole(request: Request, most: int) -> AsyncIterator[bytes]:
    """The body, in one. Raises `Refused` where it is longer, as soon as that is known."""
    sentence = f"the body has more than {most} bytes; send fewer samples"
    if int(request.headers.get("content-length", "0")) > most:  # h11 has looked that it is a number
        raise Refused(INVALID, sentence, 413)
    parts, size = list[bytes](), 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > most:
            raise Refused(INVALID, sentence, 413)
    yield b"".join(parts)


def _model_and_version(request: Request) -> tuple[str, str]:
    """Model and version in the path."""
    return request.path_params["model"], request.path_params.get("version", "")


async def _unknown_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if error.status_code == 404:
        detail = "there is no such path; the protocol's begin with /v2, and a page for people is at /"
    return JSONResponse({"error": detail}, error.status_code, error.headers)
