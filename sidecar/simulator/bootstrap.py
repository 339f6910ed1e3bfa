"""Bootstrap rooms: where the prefill and the decode of one SGLang request find each other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.simulator.errors import bad_request, internal_error
from sidecar.simulator.store import Store

if TYPE_CHECKING:
    from sidecar.simulator.config import Role
    from sidecar.simulator.deployment import Address, Call, Deployment
    from sidecar.simulator.recorder import Recorder

BOOTSTRAP_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Body fields that name the bootstrap server of prefill and the room at it."""
RANK_FIELDS = ("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank")
"""Body fields by which a client could choose the data-parallel rank of an SGLang engine."""
PREFILL_SUFFIX = "-prefill"
_ROOMS = 1 << 63
_PORTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The bootstrap fields of one body.

    Attributes:
        host: IP address of prefill; an IPv6 address without brackets.
        port: port of its bootstrap server.
        room: number of the room.
    """

    host: str
    port: int
    room: int


@dataclass(frozen=True, slots=True)
class Party:
    """One request that takes part in a room.

    Attributes:
        call: the request.
        server: the bootstrap server of prefill; for decode, the one it looks for.
        prompt_key: what its KV blocks are found by.
    """

    call: Call
    server: Address
    prompt_key: str


class Rooms:
    """The rooms of a deployment; each is for one prefill and one decode, in either order.

    A room is open as long as somebody waits in it. Who was in it stays known for the last 65536 parties.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: dict[int, dict[Role, tuple[Party, asyncio.Future[Party]]]] = {}
        self._taken: Store[tuple[int, Role], None] = Store()

    def __len__(self) -> int:
        return len(self._open)

    async def meet(self, room: int, party: Party, seconds: float) -> Party:
        """Wait for the other party of a room.

        The second request of one role under one room is a violation. It meets nobody, as there is one KV
        transfer per room.

        Raises:
            ApiError: 500 when nobody came in time.
        """
        met: asyncio.Future[Party] = asyncio.get_running_loop().create_future()
        role = party.call.role
        if repeated := (room, role) in self._taken:
            message = f"a second {role} request under bootstrap_room {room}"
            self._recorder.violate(party.call.exchange, message)
        else:
            self._taken.put((room, role), None)
            self._open.setdefault(room, {})[role] = (party, met)
            self._introduce(room)
        try:
            async with asyncio.timeout(seconds):
                return await met
        except TimeoutError:
            raise internal_error(
                f"{role}: nobody to exchange KV blocks with under bootstrap_room {room} for {seconds:g} s"
            ) from None
        finally:
            if not repeated:
                self._leave(room, role)

    def _introduce(self, room: int) -> None:
        parties = self._open[room]
        if len(parties) == 1:
            return
        (prefill, prefill_met), (decode, decode_met) = parties["prefill"], parties["decode"]
        if prefill_met.done() or decode_met.done():
            # That request is being cancelled and leaves the room in a moment.
            return
        expected = decode.call.exchange.request_id + PREFILL_SUFFIX
        if prefill.call.exchange.request_id != expected:
            self._recorder.violate(
                decode.call.exchange,
                f"decode {decode.call.exchange.request_id!r} meets prefill "
                f"{prefill.call.exchange.request_id!r}, which should be {expected!r}",
            )
        if prefill.server != decode.server:
            self._recorder.violate(
                decode.call.exchange,
                f"decode looks for the bootstrap server {decode.server}, that of its prefill is "
                f"{prefill.server}",
            )
            return
        prefill_met.set_result(decode)
        decode_met.set_result(prefill)

    def _leave(self, room: int, role: Role) -> None:
        parties = self._open[room]
        del parties[role]
        if not parties:
            del self._open[room]


def read_bootstrap(deployment: Deployment, call: Call) -> Bootstrap:
    """The bootstrap fields of a body; each one that is missing or impossible is a violation.

    Raises:
        ApiError: 400, as engines in a disaggregated mode answer a request they cannot pair.
    """
    fields = tuple(call.body.get(name) for name in BOOTSTRAP_FIELDS)
    host, port, room = fields
    problems = []
    if not isinstance(host, str) or not host:
        problems.append(f"bootstrap_host is {host!r:.80}, where it should be the IP address of prefill")
    if type(port) is not int or not 0 < port < _PORTS:
        problems.append(f"bootstrap_port is {port!r:.80}, where it should be a port number")
    if type(room) is not int or not 0 <= room < _ROOMS:
        problems.append(f"bootstrap_room is {room!r:.80}, where it should be an integer from 0 below 2^63")
    for problem in problems:
        deployment.violate(call, problem)
    match fields:
        case (str() as host, int() as port, int() as room) if not problems:
            return Bootstrap(host.removeprefix("[").removesuffix("]"), port, room)
        case _:
            raise bad_request(f"{call.role} cannot be paired: {'; '.join(problems)}")


def violate_fields(deployment: Deployment, call: Call, names: tuple[str, ...], owner: str) -> None:
    """Record each of some fields that a body carries and should not."""
    for name in names:
        if name in call.body:
            deployment.violate(call, f"{name} in the body of {owner}")
