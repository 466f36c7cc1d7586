"""`Options`: what a group of the backend `paceline` is told when it is made. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigurationError

TCP, UDP = "tcp", "udp"


@dataclass(frozen=True)
class Options:
    """For `init_process_group("paceline", pg_options=Options(...))`, and `new_group`.

    Attributes:
        between_hosts: What carries collectives between hosts: "tcp" is Gloo's, "udp" are reliable datagrams, for
            networks that lose packets; "" is what PACELINE_BETWEEN_HOSTS says. Rank 0's counts.

    Raises:
        ConfigurationError: `between_hosts` is something else.
    """

    between_hosts: str = ""

    def __post_init__(self) -> None:
        if self.between_hosts not in ("", TCP, UDP):
            raise ConfigurationError(
                f'between_hosts={self.between_hosts!r}: say "udp", or "tcp", which is the default.'
            )

    @classmethod
    def of(cls, given: object) -> Options:
        """What was passed as `pg_options`, or the defaults.

        Raises:
            ConfigurationError: It is another backend's.
        """
        if given is None:
            return cls()
        if not isinstance(given, cls):
            raise ConfigurationError(
                f"pg_options={given!r} is not for the backend paceline. Pass paceline.process_group.Options, or none."
            )
        return given
