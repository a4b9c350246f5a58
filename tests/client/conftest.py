"""Starts one real server per session and hands out `openai` clients.

SUANPAN_BIN    the binary (default: target/release/suanpan, else target/debug/suanpan)
SUANPAN_MODEL  what --model gets (default: builtin:recall)
"""

import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = os.environ.get("SUANPAN_MODEL", "builtin:recall")
START_TIMEOUT_S = 120


def binary():
    if "SUANPAN_BIN" in os.environ:
        return os.environ["SUANPAN_BIN"]
    for profile in ("release", "debug"):
        path = ROOT / "target" / profile / "suanpan"
        if path.exists():
            return str(path)
    pytest.exit("no suanpan binary: build it or set SUANPAN_BIN", returncode=2)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A running `suanpan serve`."""

    def __init__(self, *flags):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [binary(), "serve", "--model", MODEL, "--port", str(self.port), "--served-model-name", "suanpan", *flags]
        # A file, not a pipe: nobody reads while the server writes its log.
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)
        try:
            self._wait()
        except Exception:
            self.process.kill()
            raise

    def _wait(self):
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"serve ended with {self.process.returncode}:\n{self.output()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=1) as reply:
                    if reply.status == 200:
                        return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError("serve did not become healthy")

    def output(self):
        self.log.seek(0)
        return self.log.read()

    def client(self, api_key="none", **options):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60, **options)

    def get(self, path, **headers):
        request = urllib.request.Request(f"{self.url}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()

    def metric(self, name, **labels):
        """The value of one sample; labels are a subset to match."""
        status, page = self.get("/metrics")
        assert status == 200
        for line in page.splitlines():
            found = re.match(rf"{re.escape(name)}\{{(.*)\}} (\S+)$", line)
            if found and all(f'{k}="{v}"' in found.group(1) for k, v in labels.items()):
                return float(found.group(2))
        raise AssertionError(f"{name} {labels} is not on the page:\n{page}")

    def stop(self):
        """SIGTERM; returns (exit code, output)."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, self.output()


@pytest.fixture(scope="session")
def server():
    running = Server("--max-model-len", "4096", "--max-num-seqs", "8")
    yield running
    code, output = running.stop()
    assert code == 0, output


@pytest.fixture
def client(server):
    return server.client()
