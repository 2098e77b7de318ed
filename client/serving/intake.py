"""How many requests come in at a time: each takes memory before anybody can know how long it is."""

import asyncio
from collections.abc import AsyncIterable
from typing import Any

import grpc

from perennial.client.serving.messages import Refused, invalid


class Intake:
    """Reads so many requests at a time; of those that wait for their turn, the newest first.

    One that has not come in after `patience` seconds gives way as soon as another waits. So callers who send
    nothing, or slowly, keep nobody out, and without a crowd a request may take its time.
    """

    def __init__(self, most: int, patience: float) -> None:
        self._free, self._patience = most, patience
        self._turns: list[asyncio.Future[None]] = []
        """Of those that wait."""

    async def read(self, stream: AsyncIterable[bytes]) -> bytes:
        """The bytes of a call's request. Raises `Refused` where there is none, or it gives way."""
        await self._turn()
        messages: Any = aiter(stream)
        reading = asyncio.ensure_future(anext(messages, None))
        try:
            while not (await asyncio.wait([reading], timeout=self._patience))[0]:
                if any(not turn.done() for turn in self._turns):
                    raise Refused(
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        f"the request has not come in within {self._patience:g} seconds, and others wait; "
                        "try again later",
                    )
            request: bytes | None = reading.result()
            if request is None:
                invalid("the call ended without a request")
            return request
        finally:
            reading.cancel()
            self._pass_on()
            await asyncio.wait([reading])
            await messages.aclose()  # or it holds what it has read as long as gRPC holds it

    async def _turn(self) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await turn
        except asyncio.CancelledError:  # the caller has left
            if not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._turns:
            if not (turn := self._turns.pop()).done():
                turn.set_result(None)
                return
        self._free += 1
