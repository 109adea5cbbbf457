"""Puts the service together, starts it and stops it."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from engine_client.vocabulary import Vocabulary
from engine_client.wire import (
    grammars_pb2,
    grammars_pb2_grpc,
    sequences_pb2,
    sequences_pb2_grpc,
    tokenizers_pb2,
    tokenizers_pb2_grpc,
)
from grammar_service.backends import NAMES, create
from grammar_service.grammars.catalog import Catalog
from grammar_service.grammars.children import CompileChildren
from grammar_service.grammars.schema import Limits
from grammar_service.grammars.tokenizers import Tokenizers
from grammar_service.sequences.stepper import Stepper
from grammar_service.server.address import bind
from grammar_service.server.grammars import GrammarService, TokenizerService
from grammar_service.server.log import logger
from grammar_service.server.sequences import SequenceService
from grammar_service.server.streams import Streams
from grammar_service.settings import ServiceSettings


class Health(health.HealthServicer):  # type: ignore[misc]
    """The standard service, whose watchers are let go when it stops."""

    def __init__(self) -> None:
        super().__init__()
        self._respond: list[Callable[[health_pb2.HealthCheckResponse | None], None]] = []

    def stop(self) -> None:
        """Says NOT_SERVING from now on, and ends watches: they would hold the whole grace up."""
        self.enter_graceful_shutdown()
        for respond in list(self._respond):
            respond(None)

    def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.ServicerContext,
        send_response_callback: Callable[[health_pb2.HealthCheckResponse | None], None],
    ) -> None:
        """As the standard has it. None is the callback's word for the end."""
        self._respond.append(send_response_callback)
        context.add_callback(lambda: self._respond.remove(send_response_callback))
        super().Watch(request, context, send_response_callback)


_OTHER_CALLS = 32
"""Threads beyond those of streams and compiles: health, uploads, forks, closes, unary steps."""
_POOL = "rpc"
_SLACK_SECONDS = 2.0
"""What calls may take to end after the grace."""
_SERVICES = tuple(
    file.services_by_name[name].full_name
    for file, name in (
        (tokenizers_pb2.DESCRIPTOR, "TokenizerService"),
        (grammars_pb2.DESCRIPTOR, "GrammarService"),
        (sequences_pb2.DESCRIPTOR, "SequenceService"),
    )
)


def _make_region_dir(path: Path | None) -> None:
    """Makes the directory if need be. Raises OSError where it can't be, which isn't silent."""
    if path is not None and not path.is_dir():
        path.mkdir(mode=0o770)


class GrammarServer:
    """A grammar service in this process. Raises OSError or ValueError if it can't listen."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._stopping = threading.Event()
        # In one order, whatever that of the setting: it is a part of grammar ids.
        names: list[str] = [name for name in NAMES if name in settings.backends]
        backends = {name: create(name, settings.step_threads) for name in names}
        self._children = CompileChildren(
            settings.compile_workers,
            names,
            settings.compile_seconds,
            settings.load_seconds,
            settings.compile_memory_bytes,
            settings.compile_kept_bytes,
            settings.compile_queue,
            Limits(
                depth=settings.schema_depth,
                nodes=settings.schema_nodes,
                enum=settings.schema_enum,
                repetition=settings.schema_repetition,
            ),
        )
        self._tokenizers = Tokenizers(settings.max_tokenizers)
        self._catalog = Catalog(
            backends,
            self._children,
            settings.grammar_cache_bytes,
        )
        self._stepper = Stepper(
            self._catalog,
            settings.max_sequences,
            settings.idle_seconds,
            settings.matcher_cache_bytes,
        )
        self._streams = Streams(settings.max_streams)
        threads = settings.max_streams + settings.compile_queue + _OTHER_CALLS
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=_POOL)
        self._server = grpc.server(
            self._pool,
            options=[
                # A leftover server must not share the port in silence.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.max_send_message_length", -1),
            ],
            maximum_concurrent_rpcs=threads,
        )
        self._health = Health()
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        tokenizers_pb2_grpc.add_TokenizerServiceServicer_to_server(
            TokenizerService(self._tokenizers, self._catalog, settings), self._server
        )
        grammars_pb2_grpc.add_GrammarServiceServicer_to_server(
            GrammarService(self._tokenizers, self._catalog, settings), self._server
        )
        sequences_pb2_grpc.add_SequenceServiceServicer_to_server(
            SequenceService(self._stepper, settings, self._streams), self._server
        )
        reflection.enable_server_reflection(
            (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        try:
            _make_region_dir(settings.region_dir)
            self.target = bind(self._server, settings)
        except BaseException:
            self._children.close()
            raise

    def start(self) -> None:
        """Registers the settings' tokenizers, and serves. Raises ValueError for a bad path."""
        for path in self._settings.tokenizers:
            vocabulary = Vocabulary.from_path(path)
            if not self._tokenizers.add(vocabulary):
                self._catalog.prepare(vocabulary)
            logger().info("tokenizer registered", path=str(path), tokenizer=vocabulary.id)
        if self._settings.metrics_port:
            start_http_server(self._settings.metrics_port, addr="127.0.0.1")
        self._server.start()
        threading.Thread(target=self._expire, name="expiry", daemon=True).start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)

    def stop(self) -> bool:
        """Drains: health says NOT_SERVING, streams end after their step, calls get the grace.

        False if some call hasn't ended even so, as in native code that doesn't return.
        """
        self._stopping.set()
        self._health.stop()
        self._streams.drain()
        end = time.monotonic() + self._settings.grace_seconds + _SLACK_SECONDS
        self._server.stop(self._settings.grace_seconds).wait(end - time.monotonic())
        self._children.close()
        self._pool.shutdown(wait=False)
        calls = [thread for thread in threading.enumerate() if thread.name.startswith(_POOL)]
        for thread in calls:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in calls)

    def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", *_SERVICES):
            self._health.set(name, status)

    def _expire(self) -> None:
        period = min(self._settings.idle_seconds / 4, 30.0)
        while not self._stopping.wait(period):
            self._stepper.expire()
