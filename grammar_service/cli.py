"""`grammar-service`: serve, health, check, tokenizer."""

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import grpc
from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliPositionalArg,
    CliSubCommand,
    SettingsConfigDict,
    SettingsError,
)

from engine_client.round_trip import round_trip
from engine_client.vocabulary import Vocabulary, load_tokenizer
from grammar_service.settings import ServiceSettings


class Serve(ServiceSettings):
    """Run the service until SIGTERM or SIGINT. Prints where it listens."""

    def cli_cmd(self) -> None:
        """Serves; the first line on stdout is the target."""
        # Imported here: torch and xgrammar take seconds, which the other commands don't need.
        from grammar_service.server.app import GrammarServer
        from grammar_service.server.log import configure, logger

        configure(self.log_level, self.log_format)
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        try:
            server = GrammarServer(self)
            server.start()
        except (OSError, ValueError, RuntimeError) as error:
            raise SystemExit(f"grammar-service: {error}") from None
        print(f"listening on {server.target}", flush=True)
        logger().info("serving", target=server.target, region_dir=str(self.region_dir))
        stop.wait()
        logger().info("stopping", grace_seconds=self.grace_seconds)
        if not server.stop():
            logger().error("some calls don't end; exiting without them")
            os._exit(1)  # the interpreter would wait for their threads


class Health(BaseModel):
    """Ask a service whether it serves; exits with 1 if it doesn't."""

    target: CliPositionalArg[str] = Field(description="unix:PATH or HOST:PORT.")
    timeout: float = Field(2.0, gt=0, description="Seconds to wait for an answer.")

    def cli_cmd(self) -> None:
        """Prints the status."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        with grpc.insecure_channel(self.target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(
                    health_pb2.HealthCheckRequest(), timeout=self.timeout, wait_for_ready=True
                )
            except grpc.RpcError as error:
                raise SystemExit(f"grammar-service: {self.target}: {error.code().name}") from None
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        print(status)
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise SystemExit(1)


class Tokenizer(BaseModel):
    """Show a tokenizer and test its bytes against itself, or list what a service has registered."""

    path: CliPositionalArg[Path | None] = Field(
        None, description="Hugging Face tokenizer directory or tokenizer.json file."
    )
    width: int | None = Field(None, gt=0, description="Columns of the model's logits.")
    target: str | None = Field(None, description="A service, unix:PATH or HOST:PORT, to ask.")

    def cli_cmd(self) -> None:
        """Prints JSON; exits with 1 when a round trip fails."""
        if (self.path is None) == (self.target is None):
            raise SystemExit("grammar-service: tokenizer takes a PATH, or --target of a service")
        if self.target is not None:
            self._list(self.target)
        else:
            assert self.path is not None
            self._show(self.path)

    def _list(self, target: str) -> None:
        """One line a tokenizer."""
        from google.protobuf.json_format import MessageToDict

        from engine_client.wire.tokenizers_pb2 import ListTokenizersRequest
        from engine_client.wire.tokenizers_pb2_grpc import TokenizerServiceStub

        with grpc.insecure_channel(target) as channel:
            stub = TokenizerServiceStub(channel)
            try:
                answer = stub.ListTokenizers(ListTokenizersRequest(), timeout=5)
            except grpc.RpcError as error:
                raise SystemExit(f"grammar-service: {target}: {error.code().name}") from None
        for tokenizer in answer.tokenizers:
            print(json.dumps(MessageToDict(tokenizer, preserving_proto_field_name=True)))

    def _show(self, path: Path) -> None:
        try:
            vocabulary = Vocabulary.from_path(path, width=self.width)
            problems = round_trip(vocabulary, load_tokenizer(path))
        except ValueError as error:
            raise SystemExit(f"grammar-service: {error}") from None
        tokens = vocabulary.tokens
        shown = {
            "id": vocabulary.id,
            "vocab_size": len(tokens),
            "width": vocabulary.width,
            "stop_tokens": {
                token_id: tokens[token_id].decode("utf-8", "replace")
                for token_id in vocabulary.stop_token_ids
            },
            "special_count": len(vocabulary.special_token_ids),
            "empty_count": sum(not token for token in tokens),
            "round_trip": problems or "ok",
        }
        print(json.dumps(shown, ensure_ascii=False, indent=2))
        if problems:
            raise SystemExit(1)


class Check(BaseModel):
    """Check which texts a grammar admits, case by case; prints a JSON line a case.

    A case is a JSON line: {"id", "spec": {"type", "source", "options"?}, "texts": [...]}.
    """

    tokenizer: Path = Field(description="Hugging Face tokenizer directory or tokenizer.json file.")
    cases: Path = Field(description="File of cases, one a line; - is standard input.")
    width: int | None = Field(None, gt=0, description="Columns of the model's logits.")
    timeout: float = Field(60.0, gt=0, description="Seconds that the steps of a case may take.")
    jobs: int = Field(
        min(os.cpu_count() or 2, 16),
        gt=0,
        description="Compiles at once, each in a child process of about 300 MB.",
    )

    def cli_cmd(self) -> None:
        """Prints the reports in the order of the cases."""
        from grammar_service.check.process import CheckError
        from grammar_service.check.supervisor import check

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        try:
            with contextlib.ExitStack() as stack:
                lines: BinaryIO = sys.stdin.buffer
                if self.cases != Path("-"):
                    lines = stack.enter_context(self.cases.open("rb"))
                output = sys.stdout.buffer
                check(self.tokenizer, self.width, lines, output, self.timeout, self.jobs)
        except BrokenPipeError:  # whoever reads the reports has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        except (OSError, CheckError) as error:
            raise SystemExit(f"grammar-service: {error}") from None


class Cli(BaseSettings):
    """Grammar state for LLM serving, as a service."""

    model_config = SettingsConfigDict(
        cli_prog_name="grammar-service",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    serve: CliSubCommand[Serve]
    health: CliSubCommand[Health]
    tokenizer: CliSubCommand[Tokenizer]
    check: CliSubCommand[Check]

    def cli_cmd(self) -> None:
        """Runs the subcommand."""
        CliApp.run_subcommand(self)


def main() -> None:
    """Entry point; mistakes end with one line and status 2."""
    try:
        CliApp.run(Cli)
    except ValidationError as error:
        for fault in error.errors():
            name = ".".join(str(part) for part in fault["loc"][1:])
            print(f"grammar-service: {name}: {fault['msg']}", file=sys.stderr)
        raise SystemExit(2) from None
    except SettingsError as error:
        raise SystemExit(f"grammar-service: {error}") from None
