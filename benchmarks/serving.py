"""`perennial serve`: what an answer takes, beside PyTorch alone; and what ten times the load does to it.

    python benchmarks/serving.py                  # a table of latencies: gRPC, HTTP, PyTorch
    python benchmarks/serving.py --load SECONDS   # ten times as many requests as it can answer

Callers are Triton's own Python client, which is among the development tools, and for JSON Python's `http.client`.
The server, its callers and the bare loop each have a process of their own, with one thread for PyTorch. All is on
this machine.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[1]
sys.path.insert(0, str(PROJECT))
SMALL = {"model": {"name": "cnn-small"}, "inputs": (3, 28, 28)}
LARGE = {"model": {"name": "resnet18"}, "inputs": (3, 64, 64)}
BATCHES, SECONDS = (1, 64), 5.0


def snapshot(folder: Path, model: dict, inputs: tuple[int, ...]) -> None:
    """An untrained model, as a site would have left it."""
    from perennial.client.snapshot import Snapshot
    from perennial.client.trainer import Received
    from perennial.common.config import load_config
    from perennial.common.models.network import network

    scenario = {"name": "own-data", "sites": ("here",), "inputs": inputs, "labels": tuple("0123456789")}
    config = load_config(options={"method": "fedavg", "scenario": scenario, "model": model})
    net = network(config.model, inputs, 10)
    received = Received(1, {"model": net.initial(0)})
    Snapshot(config.task(), "here", None, received, {}).save(folder / "run" / "here")


@contextlib.contextmanager
def serving(state: Path) -> Iterator[tuple[int, str, str]]:
    """A server's process id and addresses, gRPC's and HTTP's."""
    code = "from perennial.server.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", "--state", str(state), "--device", "cpu", "--port", "0"]
    listener = __import__("socket").create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    command += ["--http", f"127.0.0.1:{port}"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            grpc_port = ""
            for line in process.stderr:
                if found := re.search(r"listening on 127.0.0.1, port (\d+), ", line):
                    grpc_port = found[1]
                if "serving round" in line:
                    break
            yield process.pid, f"127.0.0.1:{grpc_port}", f"127.0.0.1:{port}"
        finally:
            process.terminate()


def timed(ask: Callable[[], object]) -> list[float]:
    """Seconds of each call, for a while, after some to warm up."""
    for _ in range(20):
        ask()
    taken, end = [], time.perf_counter() + SECONDS
    while (begun := time.perf_counter()) < end:
        ask()
        taken.append(time.perf_counter() - begun)
    return taken


def caller(way: str, batch: int, grpc_address: str, http_address: str) -> list[float]:
    """What one caller measures."""
    import numpy as np

    shape = [batch, *SMALL["inputs"]]
    x = np.random.default_rng(0).random(shape, np.float32)
    if way == "PyTorch":
        import torch

        from perennial.common.config import load_config
        from perennial.common.models.network import network

        torch.set_num_threads(1)
        scenario = {"name": "own-data", "inputs": SMALL["inputs"], "labels": tuple("0123456789")}
        config = load_config(options={"scenario": scenario, "model": SMALL["model"]})
        net = network(config.model, SMALL["inputs"], 10)
        tensors = net.initial(0)

        @torch.no_grad()
        def alone() -> object:
            return net.predict(tensors, torch.from_numpy(x)).softmax(dim=1).numpy()

        return timed(alone)
    if way == "JSON":
        host, _, port = http_address.partition(":")
        connection = http.client.HTTPConnection(host, int(port))
        body = json.dumps(
            {"inputs": [{"name": "input", "datatype": "FP32", "shape": shape, "data": x.ravel().tolist()}]}
        )

        def ask() -> object:
            connection.request("POST", "/v2/models/perennial/infer", body)
            return json.loads(connection.getresponse().read())

        return timed(ask)
    if way == "gRPC":
        import tritonclient.grpc as triton
    else:
        import tritonclient.http as triton
    client = triton.InferenceServerClient(grpc_address if way == "gRPC" else http_address)
    samples = triton.InferInput("input", shape, "FP32")
    samples.set_data_from_numpy(x)
    wanted = [triton.InferRequestedOutput("probabilities")]
    return timed(lambda: client.infer("perennial", [samples], outputs=wanted).as_numpy("probabilities"))


def table() -> None:
    """Prints the table of latencies."""
    names = {
        "PyTorch": "PyTorch alone",
        "gRPC": "Triton's client, gRPC",
        "HTTP": "Triton's client, HTTP",
        "JSON": "JSON over HTTP",
    }
    print(
        "| samples in a request | asked by | requests a second | median | 99th percentile |\n|--:|---|--:|--:|--:|"
    )
    with tempfile.TemporaryDirectory() as folder:
        snapshot(Path(folder), **SMALL)
        with serving(Path(folder)) as (_, *addresses):
            for batch in BATCHES:
                for way, name in names.items():
                    command = [sys.executable, __file__, "--caller", way, str(batch), *addresses]
                    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                    taken = sorted(json.loads(done.stdout))
                    middle, high = statistics.median(taken), taken[int(0.99 * len(taken))]
                    rate = len(taken) / sum(taken)
                    print(
                        f"| {batch} | {name} | {rate:,.0f} | {1e3 * middle:.2f} ms | {1e3 * high:.2f} ms |",
                        flush=True,
                    )


async def load(seconds: float, pid: int, grpc_address: str, http_address: str) -> None:
    """Measures how many requests a second are answered, then sends ten times as many, half of them by HTTP."""
    import grpc
    import httpx
    import numpy as np
    from tritonclient.grpc import service_pb2

    shape = [1, *LARGE["inputs"]]
    x = np.random.default_rng(0).random(shape, np.float32)
    message = service_pb2.ModelInferRequest(model_name="perennial", raw_input_contents=[x.tobytes()])
    message.inputs.add(name="input", datatype="FP32", shape=shape)
    data = message.SerializeToString()
    head = {
        "inputs": [
            {"name": "input", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": x.nbytes}}
        ]
    }
    text = json.dumps(head).encode()
    limits = httpx.Limits(max_connections=200)
    async with (
        grpc.aio.insecure_channel(grpc_address) as channel,
        httpx.AsyncClient(base_url=f"http://{http_address}", limits=limits, timeout=60) as client,
        httpx.AsyncClient(base_url=f"http://{http_address}", timeout=60) as other,
    ):
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        async def by_grpc() -> str:
            try:
                await infer(data, timeout=60)
            except grpc.RpcError as error:
                return f"gRPC {error.code().name}"
            return "gRPC OK"

        async def by_http() -> str:
            headers = {"Inference-Header-Content-Length": str(len(text))}
            try:
                answer = await client.post(
                    "/v2/models/perennial/infer", content=text + x.tobytes(), headers=headers
                )
            except httpx.HTTPError as error:
                return f"HTTP {type(error).__name__}"
            return f"HTTP {answer.status_code}"

        begun = time.perf_counter()
        for _ in range(30):
            await asyncio.gather(*(by_grpc() for _ in range(4)))
        rate = 120 / (time.perf_counter() - begun)
        memory, outcomes, waits, tasks = [_resident(pid)], Counter[str](), [], set()
        print(f"answers {rate:.1f} requests a second; {10 * rate:.0f} a second for {seconds:g} s", flush=True)

        def count(task: asyncio.Task[str]) -> None:
            tasks.discard(task)
            outcomes[task.result()] += 1

        begun = looked = time.perf_counter()
        sent = 0
        while (now := time.perf_counter()) - begun < seconds:
            while sent < (now - begun) * 10 * rate:
                task = asyncio.create_task(by_grpc() if sent % 2 else by_http())
                tasks.add(task)
                task.add_done_callback(count)
                sent += 1
            if now - looked > 1:
                looked = now
                memory.append(_resident(pid))
                asked = time.perf_counter()
                await other.get("/v2/health/ready")
                waits.append(time.perf_counter() - asked)
            await asyncio.sleep(0.005)
        spent = time.perf_counter() - begun
        await asyncio.gather(*tasks)
        print(
            f"sent {sent} in {spent:.0f} s, {sent / spent / rate:.1f} times what it answers: "
            + ", ".join(f"{name} {number}" for name, number in sorted(outcomes.items()))
        )
        third = len(memory) // 3
        parts = [statistics.median(memory[part : part + third]) for part in (0, third, 2 * third)]
        print("resident MiB, medians of thirds: " + ", ".join(f"{part:.0f}" for part in parts))
        print(f"at the start {memory[0]:.0f}, most {max(memory):.0f}, at the end {_resident(pid):.0f}")
        print(f"health answered within {max(waits):.2f} s at the longest")
        print(f"afterwards: {await by_grpc()}, {await by_http()}")


def _resident(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", type=float)
    parser.add_argument("--caller", nargs=4)
    arguments = parser.parse_args()
    if arguments.caller:
        way, batch, *addresses = arguments.caller
        print(json.dumps(caller(way, int(batch), *addresses)))
    elif arguments.load:
        with tempfile.TemporaryDirectory() as folder:
            # Of its own, for it brings the protocol's messages, as Triton's client does.
            making = "import sys; from pathlib import Path; from benchmarks.serving import *; "
            making += "snapshot(Path(sys.argv[1]), **LARGE)"
            subprocess.run([sys.executable, "-c", making, folder], cwd=PROJECT, check=True)
            with serving(Path(folder)) as (pid, *addresses):
                asyncio.run(load(arguments.load, pid, *addresses))
    else:
        table()


if __name__ == "__main__":
    main()
