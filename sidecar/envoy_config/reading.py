"""Options and settings become a deployment, or one error that lists everything wrong with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from sidecar.config import ConfigError, load_settings
from sidecar.config.values import address_to_connect, format_duration, format_megabytes, quoted
from sidecar.envoy_config.addresses import (
    Address,
    SocketPath,
    TcpAddress,
    ip_of,
    is_host,
    parse_address,
    parse_listen,
)
from sidecar.envoy_config.deployment import (
    DEADLINE_MARGIN,
    LONGEST_MESSAGE_TIMEOUT,
    REWRITE_ROOM,
    Deployment,
    Part,
    Phase,
    SidecarTls,
    Topology,
)
from sidecar.envoy_config.options import ADMIN_LISTEN, LISTEN, SPECIFIC, WORKERS, flag_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from sidecar.config import Settings

T = TypeVar("T")

_LARGEST_BUFFER = (1 << 32) - 1
"""Bytes; the buffer limit is an unsigned 32-bit number."""

_USED: dict[Part, tuple[str, ...]] = {
    "bootstrap": SPECIFIC,
    "listeners": ("listen", "picker"),
    "filter": (),
    "cluster": ("sidecar", "sidecar_ca", "sidecar_name"),
    "access-log": (),
}


class OptionsError(Exception):
    """No configuration can be written.

    Attributes:
        problems: everything that is wrong, one line each; no secrets.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "no Envoy configuration can be written:\n" + "\n".join(f"  {line}" for line in problems)
        )


def read(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Deployment, tuple[str, ...]]:
    """What the options and the settings describe, and the warnings about the settings.

    Raises:
        OptionsError: with every problem of the options and of the settings.
    """
    reader = _Reader(options)
    try:
        settings, warnings = load_settings(options.config, environ)
    except ConfigError as error:
        raise OptionsError([*error.problems, *reader.problems]) from None
    deployment = reader.deployment(settings)
    if reader.problems:
        raise OptionsError(reader.problems)
    return deployment, warnings


class _Reader:
    """Turns options into a deployment and collects what is wrong with them.

    The options are read at once; `problems` then holds all that can be said without the settings.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.problems: list[str] = []
        used = _USED[options.part]
        self._given = {name: getattr(options, name) for name in SPECIFIC if name in used}
        for name in SPECIFIC:
            if name not in used and getattr(options, name) is not None:
                self._problem(flag_of(name), f"has no place in --part {options.part}; leave it out")

        self._read_addresses()
        self._check_tls_options()

    def _read_addresses(self) -> None:
        given = self._given.get
        self._listen = self._parsed("--listen", given("listen"), parse_listen) or LISTEN
        self._admin = self._parsed("--admin-listen", given("admin_listen"), parse_listen) or ADMIN_LISTEN
        if self._listen.collides(self._admin):
            self._problem("--admin-listen", f"{self._admin} is also --listen; use another port")
        self._sidecars = self._addresses("--sidecar", given("sidecar"))
        self._picker = self._parsed("--picker", given("picker"), parse_address)
        self._workers: dict[Phase, tuple[Address, ...]] = {}
        for phase, default in WORKERS.items():
            self._workers[phase] = self._addresses(f"--{phase}", given(phase)) or (default,)
            if given("picker") is not None and given(phase) is not None:
                self._problem(
                    f"--{phase}", "has no effect with --picker, which names the workers; leave it out"
                )

    def _check_tls_options(self) -> None:
        ca, name = self._given.get("sidecar_ca"), self._given.get("sidecar_name")
        if ca is not None and not (ca and ca.isprintable()):
            self._problem("--sidecar-ca", f"{quoted(ca)} is not a path; name a PEM file")
        if name is not None and not is_host(name):
            self._problem(
                "--sidecar-name", f"{quoted(name)} is not a host name; write one of the certificate"
            )

    def deployment(self, settings: Settings) -> Deployment:
        """The deployment; complete only if there are no problems."""
        options = self._options
        render = settings.pipeline.render
        self._check_limits(settings)
        self._check_routing(settings)
        sidecars = self._sidecars or self._own_listener(settings)
        if options.part == "bootstrap":
            self._check_taken(sidecars)
        return Deployment(
            topology=options.topology,
            body_mode=options.body_mode,
            listen=self._listen,
            admin_listen=self._admin,
            internal=self._internal(settings),
            sidecars=sidecars,
            sidecar_tls=self._tls(settings),
            workers=self._workers,
            picker=self._picker,
            namespace=settings.observability.metadata_namespace,
            request_deadline=settings.ext_proc.request_deadline,
            max_body=settings.ext_proc.max_request_body_size,
            render="" if render is None else render.address,
            sees_answers=settings.pipeline.steps[-1].type == "prefill-decode",
            observes_prompt_tokens=settings.observability.prompt_token_parity == "warn",  # noqa: S105 - of a prompt
        )

    def _check_limits(self, settings: Settings) -> None:
        if self._options.body_mode != "buffered":
            return
        size, deadline = settings.ext_proc.max_request_body_size, settings.ext_proc.request_deadline
        if size + REWRITE_ROOM > _LARGEST_BUFFER:
            self._problem(
                "ext_proc.max_request_body_size",
                f"{format_megabytes(size)} MB is more than Envoy buffers; with --body-mode buffered use at "
                "most 4094",
            )
        if deadline + DEADLINE_MARGIN > LONGEST_MESSAGE_TIMEOUT:
            longest = format_duration(LONGEST_MESSAGE_TIMEOUT - DEADLINE_MARGIN)
            self._problem(
                "ext_proc.request_deadline",
                f"{format_duration(deadline)} is longer than Envoy waits for a reply; with --body-mode "
                f"buffered use at most {longest}",
            )

    def _check_routing(self, settings: Settings) -> None:
        topology: Topology = self._options.topology
        if topology == "shared-listener" and not settings.gateway.phase_token:
            self._problem(
                "gateway.phase_token",
                "required by --topology shared-listener, where it tells sub-requests from clients; set it to "
                "file:/path or in SIDECAR__GATEWAY__PHASE_TOKEN",
            )
        if topology == "reroute" and not settings.ext_proc.clear_route_cache:
            self._problem(
                "ext_proc.clear_route_cache",
                "false leaves every request on the route it came by, and --topology reroute needs the route "
                "of decode; set it to true",
            )

        pinned = settings.pipeline.prefill_decode is not None and self._picker is None
        if pinned and len(self._workers["prefill"]) > 1:
            self._problem(
                "--prefill",
                "prefill-decode reserves one of the prefill workers, which an endpoint picker does; use "
                "--picker, or one endpoint",
            )

    def _own_ports(self) -> tuple[tuple[str, TcpAddress], ...]:
        return ("--listen", self._listen), ("--admin-listen", self._admin)

    def _check_taken(self, sidecars: tuple[Address, ...]) -> None:
        """No port of Envoy's is one of a process that it calls on this host."""
        called = {"--sidecar": sidecars}
        if self._picker is None:
            called |= {f"--{phase}": addresses for phase, addresses in self._workers.items()}
        for flag, own in self._own_ports():
            for other, addresses in called.items():
                for address in addresses:
                    if isinstance(address, TcpAddress) and address.is_loopback and own.collides(address):
                        text = f"{own} is where Envoy looks for {other} ({address}); use another port"
                        self._problem(flag, text)

    def _internal(self, settings: Settings) -> TcpAddress | None:
        """Where the internal listener listens; checks `gateway.address` for either kind of topology."""
        if self._options.part not in ("bootstrap", "listeners"):
            return None
        text = settings.gateway.address
        url = urlsplit(text)
        if url.scheme != "http" or url.path:
            self._problem(
                "gateway.address",
                f"{quoted(text)} must be plain http without a path: the listener of the sub-requests has no "
                "TLS and takes every path as it is",
            )
        gateway = TcpAddress(url.hostname or "", url.port or 80)
        if self._options.topology == "shared-listener":
            if gateway.port != self._listen.port:
                self._problem(
                    "gateway.address",
                    f"{quoted(text)} leads to port {gateway.port}, clients and sub-requests share port "
                    f"{self._listen.port} (--listen); make them the same",
                )
            return None
        if not gateway.is_loopback:
            what = "a host name" if ip_of(gateway.host) is None else "an address that other hosts reach"
            self._problem(
                "gateway.address",
                f"{quoted(text)} has {what}; the internal listener listens there, and whoever reaches it "
                "chooses phases at will: run Envoy beside the sidecar and use "
                f"http://127.0.0.1:{gateway.port}, or print the other parts (--part) for a gateway that is "
                "elsewhere",
            )
        for flag, address in self._own_ports():
            if gateway.collides(address):
                self._problem(
                    flag,
                    f"{address} is also gateway.address ({text}), the internal listener; use another port",
                )
        return gateway

    def _own_listener(self, settings: Settings) -> tuple[Address, ...]:
        """`ext_proc.listen` as Envoy on the same host connects to it."""
        if "sidecar" not in self._given:
            return ()
        try:
            return (parse_address(address_to_connect(settings.ext_proc.listen)),)
        except ValueError as error:
            self._problem("--sidecar", f"ext_proc.listen: {error}; name the sidecar's address here")
            return ()

    def _tls(self, settings: Settings) -> SidecarTls | None:
        if "sidecar_ca" not in self._given:
            return None
        serves_tls = bool(settings.ext_proc.tls.cert_path)
        for name in ("sidecar_ca", "sidecar_name"):
            if serves_tls and self._given[name] is None:
                self._problem(flag_of(name), "required: the sidecar serves TLS (ext_proc.tls.cert_path)")
            elif not serves_tls and self._given[name] is not None:
                self._problem(
                    flag_of(name), "the sidecar serves no TLS; set ext_proc.tls.cert_path, or leave this out"
                )
        return (
            SidecarTls(self._given["sidecar_ca"] or "", self._given["sidecar_name"] or "")
            if serves_tls
            else None
        )

    def _addresses(self, flag: str, texts: list[str] | None) -> tuple[Address, ...]:
        parsed = [self._parsed(flag, text, parse_address) for text in texts or ()]
        addresses = tuple(address for address in parsed if address is not None)
        names = [address for address in addresses if isinstance(address, TcpAddress) and address.is_name]
        if names and any(isinstance(address, SocketPath) for address in addresses):
            self._problem(
                flag, f"a cluster cannot have socket paths and names; write the IP address of {names[0]}"
            )
        return addresses

    def _parsed(self, flag: str, text: str | None, parse: Callable[[str], T]) -> T | None:
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            self._problem(flag, str(error))
            return None

    def _problem(self, where: str, text: str) -> None:
        self.problems.append(f"{where}: {text}")
