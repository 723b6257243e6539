"""`lockstep serve` as a process of its own, asked over HTTP: one POST /generate for a whole batch, not streamed.

A connection per request: between two requests the server may have been stopped for minutes.  The client is made
before: its TLS context alone takes longer than a small model's prefill.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from typing import Any

import httpx

from benchmarks.peers.workers import protocol
from benchmarks.peers.workers.protocol import Prompts

START_S = 300.0
STOP_S = 8.0
REQUEST_S = 900.0


class LockstepHttp:
    def __init__(self, model_path: str, threads: int, kv_tokens: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "rollout.cli.main", "serve", "--model-path", model_path]
        command += ["--port", str(port), "--dtype", "bfloat16", "--skip-tokenizer-init", "--disable-radix-cache"]
        command += ["--max-total-tokens", str(kv_tokens), "--num-threads", str(threads), "--log-level", "warning"]
        self._server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=protocol.die_with_parent
        )
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", limits=httpx.Limits(max_keepalive_connections=0), trust_env=False
        )
        self._wait_ready()
        self.about = f"lockstep serve, {threads} threads"

    def generate(self, prompts: Prompts, max_new_tokens: int) -> tuple[float, Prompts]:
        body = {
            "input_ids": prompts,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
        }
        start = time.perf_counter()
        outputs = self._post(body)
        return time.perf_counter() - start, [output["output_ids"] for output in outputs]

    def top_logprobs(self, prompts: Prompts, count: int) -> list[list[tuple[int, float]]]:
        outputs = self._post(
            {
                "input_ids": prompts,
                "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
                "return_logprob": True,
                "top_logprobs_num": count,
            }
        )
        tops = [output["meta_info"]["output_top_logprobs"][0] for output in outputs]
        return [[(entry[1], entry[0]) for entry in top] for top in tops]

    def tune(self, prompts: Prompts, max_new_tokens: int) -> str:
        self.generate(prompts, max_new_tokens)
        return ""

    def close(self) -> None:
        """End the server by SIGTERM, and after a while by SIGKILL."""
        self._client.close()
        self._server.send_signal(signal.SIGTERM)
        try:
            self._server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._server.kill()

    def _post(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        response = self._client.post("/generate", json=body, timeout=REQUEST_S)
        if response.status_code != 200:
            raise RuntimeError(f"HTTP {response.status_code}: {response.text[:500]}")
        return response.json()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while self._server.poll() is None:
            if time.monotonic() > deadline:
                self._server.kill()
                raise TimeoutError(f"the server was not ready within {START_S:.0f} s")
            try:
                if self._client.get("/health", timeout=5.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"the server ended with status {self._server.returncode}")


if __name__ == "__main__":
    protocol.main(LockstepHttp)
