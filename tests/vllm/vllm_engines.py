"""render, encode, prefill and decode of one model as local vLLM processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from deploy.envoy.local_stack import Program, answers, free_ports
from tests.vllm.install_vllm import LOW_PRIORITY, python

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ROLES = ("render", "encode", "prefill", "decode")
OTHER_ENCODE = "encode-small-pictures"
"""A second encoder that scales pictures down further than the renderer does."""

MODEL = "tiny-vl"
"""What the model is called, whichever it is."""

START_SECONDS = 420.0
"""A start takes 20 s to 25 s on an idle machine, several times that on a busy one."""

_MAX_LENGTH = 8192
_BLOCK = 32
_MEMORY_AT_ONCE = 10 << 30
"""Available bytes below which the services start one after the other."""

_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


class Engines:
    """The vLLM processes of the test session; every role keeps its port when the model changes.

    Args:
        home: folder of the vLLM environment and of the models.
        directory: holds logs and the two stores.
    """

    def __init__(self, home: Path, directory: Path) -> None:
        self.home = home
        self._directory = directory
        numbers = free_ports(range(len(ROLES) + 1))
        self._ports = dict(zip((*ROLES, OTHER_ENCODE), numbers.values(), strict=True))
        self._programs: dict[str, Program] = {}
        self._model = ""
        self.start_seconds: dict[str, float] = {}
        for store in ("ec", "kv"):
            (directory / store).mkdir()

    def url(self, role: str) -> str:
        """Base URL of a role."""
        return f"http://127.0.0.1:{self._ports[role]}"

    def port(self, role: str) -> int:
        return self._ports[role]

    def use(self, model: str) -> None:
        """Run all roles on this model; starts what is missing or dead."""
        if model != self._model:
            self.stop()
            self._model = model
        wanted = [role for role in ROLES if role not in self._programs or not self._healthy(role)]
        self._start(wanted)

    def use_other_encode(self) -> None:
        """Run the second encoder, too."""
        if OTHER_ENCODE not in self._programs:
            self._start([OTHER_ENCODE])

    def dead(self) -> list[str]:
        """What is wrong with the processes that should run; empty when all of them answer."""
        return [
            f"{role} is dead:\n{program.tail()}"
            for role, program in self._programs.items()
            if not self._healthy(role)
        ]

    def _healthy(self, role: str) -> bool:
        return self._programs[role].running() and answers(f"{self.url(role)}/health")

    def _start(self, roles: Sequence[str]) -> None:
        if not roles:
            return
        for role in roles:
            self._stop(role)
        self.clear_stores()
        started = time.monotonic()
        at_once = psutil.virtual_memory().available >= _MEMORY_AT_ONCE
        for role in roles:
            self._programs[role] = self._spawn(role)
            if not at_once:
                self._wait(role)
        for role in roles:
            self._wait(role)
        self.start_seconds[f"{self._model} {'+'.join(roles)}"] = time.monotonic() - started

    def _wait(self, role: str) -> None:
        self._programs[role].wait_until(lambda: answers(f"{self.url(role)}/health"), START_SECONDS)

    def _spawn(self, role: str) -> Program:
        log = self._directory / f"{self._model}-{role}.log"
        binaries = python(self.home).parent
        command = [*LOW_PRIORITY, str(binaries / "vllm"), *self._arguments(role)]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                env={
                    **os.environ,
                    **_ENVIRONMENT,
                    "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
                    "VLLM_CACHE_ROOT": str(self.home / "cache"),
                },
                start_new_session=True,
            )
        return Program(role, process, log)

    def _arguments(self, role: str) -> list[str]:
        model = str(self.home / "models" / self._model)
        common = [
            *(model, "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self._ports[role])),
            *("--dtype", "float32", "--max-model-len", str(_MAX_LENGTH)),
            *(
                "--limit-mm-per-prompt",
                json.dumps({"image": 8} | ({"video": 2} if self._takes_video else {})),
            ),
        ]
        if self._takes_video:
            common += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        if role == "render":
            return ["launch", "render", *common]
        serve = [
            *("serve", *common, "--enforce-eager", "--enable-scale-out", "--seed", "0"),
            *("--max-num-seqs", "4", "--max-num-batched-tokens", str(_MAX_LENGTH)),
            # A model with random weights would otherwise fill JSON with blanks until its answer is cut off.
            *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        ]
        match role:
            case "encode":
                return [*serve, *self._encoder_cache("ec_producer")]
            case "prefill":
                return [*serve, *self._encoder_cache("ec_consumer"), *self._key_value_cache()]
            case "decode":
                return [*serve, *self._key_value_cache()]
        small = json.dumps({"max_pixels": 112 * 112})
        return [*serve, *self._encoder_cache("ec_producer"), "--mm-processor-kwargs", small]

    @property
    def _takes_video(self) -> bool:
        return self._model.startswith("qwen")

    def _encoder_cache(self, role: str) -> list[str]:
        transfer = {
            "ec_connector": "ECExampleConnector",
            "ec_role": role,
            "ec_connector_extra_config": {"shared_storage_path": str(self._directory / "ec")},
        }
        caching = ["--no-enable-prefix-caching"] if role == "ec_producer" else []
        return ["--ec-transfer-config", json.dumps(transfer), *caching]

    def _key_value_cache(self) -> list[str]:
        transfer = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(self._directory / "kv")},
        }
        # Only whole blocks are shared; the default of 128 tokens would leave most of a short prompt out.
        return ["--kv-transfer-config", json.dumps(transfer), "--block-size", str(_BLOCK)]

    def clear_stores(self) -> None:
        """Empty both stores. An encoder does not write a picture again that it still caches."""
        self.clear("ec")
        self.clear("kv")

    def clear(self, store: str) -> None:
        """Empty one store, `ec` or `kv`."""
        for item in (self._directory / store).iterdir():
            if item.is_dir():
                shutil.rmtree(item)
            else:
                item.unlink()

    def stored(self, store: str) -> set[str]:
        """Names of what a store holds: render hashes in `ec`, digests of token blocks in `kv`."""
        return {item.name for item in (self._directory / store).iterdir()}

    def stop(self) -> None:
        """End every process."""
        for program in self._programs.values():
            program.terminate()
        for role in list(self._programs):
            self._stop(role)

    def _stop(self, role: str) -> None:
        program = self._programs.pop(role, None)
        if program is None:
            return
        program.stop()
        # The group also holds the engine core, a child that outlives an API server which died.
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
