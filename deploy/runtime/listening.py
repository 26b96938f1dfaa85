"""Sockets of servers: where they are asked to listen."""

import socket

from polybasic.chain.base.errors import UserError


def bound(host: str, port: int, named: str, any_port: str) -> socket.socket:
    """A socket that listens to nobody yet.

    Args:
        host: a name or a number, of either family of IP.
        port: 0 takes a free one.
        named: what the user gave, for messages.
        any_port: how the user asks for a free port.

    Raises:
        UserError: no such address, or another process has it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(
            "cannot listen",
            f"{named} ({reason})",
            f"choose another address or port; {any_port} takes a free one",
        ) from error
    return made
