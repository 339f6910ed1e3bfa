"""One chat request with two pictures, sent in the three forms media can travel in, through a real Envoy.

Starts the simulator (render, encode, prefill and decode without a GPU), the sidecar and Envoy on free
loopback ports, streams the answers, prints the report of Envoy's access log and leaves nothing running.
`--keep` keeps everything up on the well-known ports of the bootstrap until it is interrupted.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw

from deploy.envoy.local_stack import (
    EXTERNAL,
    REPOSITORY,
    SIDECAR_ADMIN,
    WELL_KNOWN_PORTS,
    LocalStack,
    StartError,
    free_ports,
    is_free,
    load_bootstrap,
    load_sidecar_config,
)

if TYPE_CHECKING:
    from types import FrameType

PATH = "/v1/chat/completions"
MODEL = "simulated-vl"
PICTURES = ((640, 480), (320, 512))
NIXL = ("--descriptors", "nixl", "--kv-connector", "nixl")
_LOG_SECONDS = 10.0


@dataclass(frozen=True)
class Form:
    """One way media travel.

    Attributes:
        title: what the terminal shows.
        mm_payload: `tensors` or `none`, asked of the renderer.
        ec_connector: whether encode hands over descriptors of its outputs.
        prefill_form: what the access log must say.
    """

    title: str
    mm_payload: str
    ec_connector: str
    prefill_form: str


FORMS = (
    Form("tensors rendered, encoder outputs by descriptor", "tensors", "ec-nixl", "mm_metadata"),
    Form("no tensors, encoder outputs by descriptor", "none", "ec-nixl", "mm_metadata"),
    Form("no tensors, no descriptors", "none", "ec-shared-storage", "content_parts"),
)


def main() -> int:
    """Run the demo; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="stay up on the well-known ports")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="epd-sidecar-demo-") as directory:
            if options.keep:
                return keep(Path(directory))
            return show(Path(directory))
    except StartError as error:
        sys.stderr.write(f"\nthe demo could not start: {error}\n")
        return 1
    except KeyboardInterrupt:
        say("\nstopped")
        return 0 if options.keep else 130


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """End the demo through its context managers; another signal must not cut their cleaning short."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def show(directory: Path) -> int:
    """Send the request once per form, print the report and check what it says."""
    with LocalStack(directory, free_ports()) as stack:
        say("starting the simulator, the sidecar and Envoy on free loopback ports")
        stack.simulator(*NIXL)
        answers: set[str] = set()
        for number, form in enumerate(FORMS, 1):
            sidecar = stack.sidecar(sidecar_config(stack, form))
            if number == 1:
                stack.envoy(load_bootstrap("bootstrap.yaml", stack.ports, stack.access_log))
            say(f"\n{number}. {form.title}")
            say(f"   mm_payload: {form.mm_payload}, ec_connector: {form.ec_connector}")
            answers.add(stream_answer(stack.url(EXTERNAL)))
            records = wait_for_records(stack, number)
            sidecar.stop()
        say("\nwhat Envoy's access log says (`epd-sidecar report`):\n")
        report = [sys.executable, "-m", "sidecar", "report", str(stack.access_log)]
        subprocess.run(report, cwd=REPOSITORY, check=True)
    return conclude(answers, records)


def keep(directory: Path) -> int:
    """Run on the well-known ports until interrupted."""
    if busy := [str(port) for port in WELL_KNOWN_PORTS if not is_free(port)]:
        raise StartError(f"stop what listens on 127.0.0.1, port {', '.join(busy)}")
    with LocalStack(directory, {port: port for port in WELL_KNOWN_PORTS}) as stack:
        stack.simulator(*NIXL)
        stack.sidecar(sidecar_config(stack, FORMS[1]))
        envoy = stack.envoy(load_bootstrap("bootstrap.yaml", stack.ports, stack.access_log))
        body = directory / "two-pictures.json"
        body.write_text(json.dumps(chat_request()), encoding="utf-8")
        url, json_type = stack.url(EXTERNAL), "-H 'content-type: application/json'"
        text = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]})
        say(
            f"""up, with everything in {directory} until Ctrl-C; try:

  curl -N {url}{PATH} {json_type} -d @{body}
  curl {url}{PATH} {json_type} -d '{text}'
  curl {url}/v1/models
  curl {stack.url(SIDECAR_ADMIN)}/metrics
  {sys.executable} -m sidecar report {stack.access_log}
"""
        )
        envoy.process.wait()
        raise StartError(f"envoy ended with code {envoy.process.returncode}:\n{envoy.tail()}")


def sidecar_config(stack: LocalStack, form: Form) -> dict[str, Any]:
    """The shipped sidecar configuration, sending encode and prefill tokens in one form."""
    config = load_sidecar_config(stack.ports)
    config["pipeline"] |= {
        "use_openai_format": False,
        "kv_connector": "kv-nixl",
        "ec_connector": form.ec_connector,
    }
    for step in config["pipeline"]["steps"]:
        if step["type"] == "render":
            step["params"]["mm_payload"] = form.mm_payload
    return config


def chat_request() -> dict[str, Any]:
    """A streamed chat request with two JPEGs of different sizes."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": jpeg_url(width, height)}} for width, height in PICTURES
    ]
    content = [*parts, {"type": "text", "text": "What is in these pictures?"}]
    return {
        "model": MODEL,
        "stream": True,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": content}],
    }


def jpeg_url(width: int, height: int) -> str:
    """A real JPEG as a data URI."""
    picture = Image.new("RGB", (width, height), (30, 60, 110))
    ImageDraw.Draw(picture).ellipse(
        (width // 4, height // 4, width * 3 // 4, height * 3 // 4), (240, 200, 60)
    )
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def stream_answer(base: str) -> str:
    """Send the request and print the answer while it arrives; raises StartError if it is not one."""
    words: list[str] = []
    connection = http.client.HTTPConnection(base.removeprefix("http://"), timeout=30)
    connection.request("POST", PATH, json.dumps(chat_request()), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != HTTPStatus.OK:
        raise StartError(f"the request was answered {response.status}: {response.read().decode()}")
    sys.stdout.write("   ")
    for line in response:
        data = line.decode().removeprefix("data: ").strip()
        if not data or data == "[DONE]":
            continue
        for choice in json.loads(data)["choices"]:
            words.append(choice["delta"].get("content") or "")
            sys.stdout.write(words[-1])
            sys.stdout.flush()
    say("")
    connection.close()
    return "".join(words)


def wait_for_records(stack: LocalStack, count: int) -> list[dict[str, Any]]:
    """The first `count` lines of the access log, once Envoy has written them."""

    def lines() -> list[str]:
        return stack.access_log.read_text(encoding="utf-8").splitlines()

    stack.programs[-1].wait_until(lambda: stack.access_log.exists() and len(lines()) >= count, _LOG_SECONDS)
    return [json.loads(line) for line in lines()[:count]]


def conclude(answers: set[str], records: list[dict[str, Any]]) -> int:
    """Say what the answers and records show; returns 1 when they do not show it."""
    taken = [record["prefill_form"] for record in records]
    if len(answers) != 1 or taken != [form.prefill_form for form in FORMS]:
        say(f"\nunexpected: {len(answers)} different answers, prefill took the forms {', '.join(taken)}")
        return 1
    with_tensors, without = (int(record["render_bytes"]) for record in records[:2])
    say(
        f"\nThe same answer three times: without tensors the render answer shrank from {with_tensors:,} to "
        f"{without:,} bytes, and only the request without descriptors sent its pictures to prefill again."
    )
    return 0


def say(text: str) -> None:
    """Print one line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
