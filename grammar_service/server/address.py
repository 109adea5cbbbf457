"""Where the service listens: a Unix socket, or a TCP port on loopback unless told otherwise."""

import contextlib
import ipaddress
import os
import socket
import stat
from pathlib import Path

import grpc

from grammar_service.settings import ServiceSettings


def bind(server: grpc.Server, settings: ServiceSettings) -> str:
    """Binds the server; returns the target for clients. Raises OSError or ValueError."""
    if settings.listen.startswith("unix:"):
        return _bind_unix(server, Path(settings.listen.removeprefix("unix:")), settings)
    host, _, port = settings.listen.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"listen is unix:PATH or HOST:PORT, not {settings.listen!r}")
    if not _is_loopback(host.strip("[]")) and not settings.insecure:
        raise ValueError(
            f"{host} is beyond loopback and this service has no TLS: anyone who reaches the port "
            "could use it. Listen on unix:PATH or 127.0.0.1, or set insecure"
        )
    bound = server.add_insecure_port(settings.listen)
    return f"{host}:{bound}"


def _bind_unix(server: grpc.Server, path: Path, settings: ServiceSettings) -> str:
    path = path.absolute()
    if not path.parent.is_dir():
        raise OSError(f"the socket's directory {path.parent} doesn't exist; make it first")
    if path.exists():
        _remove_stale(path)
    mode = int(settings.socket_mode, 8)
    umask = os.umask(0o777 & ~mode)
    try:
        server.add_insecure_port(f"unix:{path}")
    finally:
        os.umask(umask)
    # The directory's group decides who may connect, so that containers can run as two users.
    with contextlib.suppress(PermissionError):
        os.chown(path, -1, path.parent.stat().st_gid)
    return f"unix:{path}"


def _remove_stale(path: Path) -> None:
    """A socket that a killed service left is removed; one that answers is somebody's."""
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise OSError(f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()
            return
    raise OSError(f"another process listens on {path}")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
