"""Bad luck for processes of a deployment: connections that break what passes, and clocks that jump."""

import asyncio
import shutil
import subprocess
from pathlib import Path
from threading import Thread

from perennial.common.flower.processes import free_port

LATENCY = 0.02
"""Seconds that a proxy holds what it passes on."""


class Proxies(Thread):
    """A TCP proxy for each site, in one thread; `mood` says by site what it does wrong."""

    def __init__(self, count: int, behind: int) -> None:
        super().__init__(daemon=True)
        self.ports, self.behind = [free_port() for _ in range(count)], behind
        self.mood: dict[int, str] = {}

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        servers = [
            await asyncio.start_server(lambda r, w, n=n: self._connect(n, r, w), "127.0.0.1", port)
            for n, port in enumerate(self.ports)
        ]
        await asyncio.gather(*(server.serve_forever() for server in servers))

    async def _connect(self, site: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.behind)
        except OSError:
            writer.close()
            return
        await asyncio.wait(
            [asyncio.create_task(self._pass(site, *way)) for way in ((reader, back), (there, writer))],
            return_when=asyncio.FIRST_COMPLETED,
        )
        for end in (writer, back):
            end.transport.abort()

    async def _pass(self, site: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await asyncio.sleep(LATENCY)
                while (mood := self.mood.get(site)) == "holds":
                    await asyncio.sleep(0.1)
                half = len(data) // 2
                if mood == "cuts":
                    return
                if mood == "truncates":
                    writer.write(data[:half])
                    await writer.drain()
                    return
                if mood == "delays":
                    await asyncio.sleep(5.0)
                elif mood == "drops":
                    continue
                elif mood == "reorders":
                    data = data[half:] + data[:half]
                elif mood == "doubles":
                    data *= 2
                elif mood == "flips a bit":
                    data = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
                writer.write(data)
                await writer.drain()
        except OSError:
            return


MOODS = ("cuts", "holds", "delays", "truncates", "drops", "reorders", "doubles", "flips a bit")


def wrong_clock(folder: Path) -> Path | None:
    """A library that makes a process's clock wrong (`wrong_clock.c`), where there is a compiler."""
    library, source = folder / "wrong_clock.so", Path(__file__).with_name("wrong_clock.c")
    words = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
    return library if shutil.which("cc") and subprocess.run(words, check=False).returncode == 0 else None
